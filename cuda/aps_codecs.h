// A segment, and what each family of formats makes of one of its elements; shared by the CPU library and the CUDA
// kernels. A family is chosen once per range of a segment, never per element: the CPU library has a table of loops per
// family (aps_cpu.cpp), the CUDA kernels a switch per tile (APS_BY_FAMILY in aps_kernels.cu).
//
// A codec of one element has: is_valid(segment), is_scaled(segment), width, own_value(code), residual(bits, code, dtype).
// A family whose elements share something (a table, the scale of a block) keeps it in its codec, made once per range.
#ifndef APS_CODECS_H
#define APS_CODECS_H

#include "aps_scalar.h"

// Numbers as in kernels/segments.py. The families of formats that have no native code are encoded by Python and never
// come here.
enum {
    APS_FAMILY_FLOAT = 0,
    APS_FAMILY_RAW = 1,
    APS_FAMILY_QSGD = 2,
    APS_FAMILY_ONEBIT = 3,
    APS_FAMILY_TABLE = 4,
    APS_FAMILY_MX = 5,
    APS_N_FAMILIES = 6
};
// Flags: some codes are Inf and NaN; rounds to nearest although there is a seed.
enum { APS_SPECIALS = 1, APS_TO_NEAREST = 2 };

struct ApsSegment {
    uint64_t data;     // address of the first element
    int64_t n;         // elements
    int64_t offset;    // first byte in the message
    int32_t exponent;  // E shared by all ranks, or APS_EXP_ZERO / APS_EXP_NONFINITE
    float factor;      // decode multiplies by it
    uint8_t exp_bits, man_bits, flags, dtype;
    uint32_t uid;    // random stream of the layer
    uint8_t family;  // how elements are encoded
    uint16_t codec;  // which format of a family that keeps a list of them
    uint32_t block;  // elements that share a scale; 0: all of the segment
    int64_t first;   // index of the first element within its layer
};

APS_FN bool aps_is_constant(const ApsSegment& s) {
    return s.exponent == APS_EXP_ZERO || s.exponent == APS_EXP_NONFINITE;
}
// How a segment rounds where the call's mode is this: some round to nearest beside others that do not.
APS_FN int aps_mode(const ApsSegment& s, int mode) { return s.flags & APS_TO_NEAREST ? (int)APS_NEAREST : mode; }

// ---------------------------------------------------------------------------------------------- packed floats
// One exponent per layer; codes of 1 + e + m bits.
struct ApsFloatCodec {
    ApsFormat format;
    int width, exponent;
    explicit APS_METHOD ApsFloatCodec(const ApsSegment& s)
        : format(aps_format(s.exp_bits, s.man_bits, s.flags & APS_SPECIALS)), width(format.width),
          exponent(s.exponent) {}
    static APS_METHOD bool is_valid(const ApsSegment& s) {
        const bool has_numbers = s.exp_bits > 1 || s.man_bits > 0 || !(s.flags & APS_SPECIALS);
        return s.exp_bits >= 1 && s.exp_bits <= 8 && s.man_bits <= 23 && has_numbers;
    }
    // Whether the values are scaled by the exponent, and sums need one of their own.
    static APS_METHOD bool is_scaled(const ApsSegment& s) { return !aps_is_constant(s); }
    // Decoded value of a code in true units, as double bits.
    APS_METHOD uint64_t own_value(uint32_t code) const {
        if (exponent == APS_EXP_ZERO) return 0;
        if (exponent == APS_EXP_NONFINITE) return aps_special(0, APS_KIND_NAN, APS_F64);
        ApsFormat finite = format;
        finite.specials = 0;
        return aps_decode_bits(code, finite, exponent - format.emax, APS_F64);
    }
    // x - decoded, rounded once to dtype; 0 where the layer was not finite, so that no NaN outlives the step.
    APS_METHOD uint64_t residual(uint64_t bits, uint32_t code, int dtype) const {
        if (exponent == APS_EXP_NONFINITE) return 0;
        return aps_difference(bits, own_value(code), dtype);
    }
};

// ---------------------------------------------------------------------------------------------- raw float32
// The bits of float32, neither scaled nor rounded; the exponent means nothing.
struct ApsRawCodec {
    enum { width = 32 };
    explicit APS_METHOD ApsRawCodec(const ApsSegment&) {}
    static APS_METHOD bool is_valid(const ApsSegment&) { return true; }
    static APS_METHOD bool is_scaled(const ApsSegment&) { return false; }
    static APS_METHOD uint32_t code(uint64_t bits, int dtype) { return (uint32_t)aps_convert(bits, dtype, APS_F32); }
    APS_METHOD uint64_t own_value(uint32_t code) const { return aps_convert(code, APS_F32, APS_F64); }
    APS_METHOD uint64_t residual(uint64_t bits, uint32_t code, int dtype) const {
        return aps_difference(bits, own_value(code), dtype);
    }
};

// ---------------------------------------------------------------------------------------------- for every family
enum { APS_MEASURE_CHUNK = 256 };  // partial sums of this many elements are added in order: same bits everywhere
// values: what element i decodes to.
template <class Values>
APS_FN void aps_measure_values(const ApsSegment& s, const Values& values, int64_t begin, int64_t end, double* out) {
    double lost = 0.0, error = 0.0, square = 0.0, largest = 0.0;
    for (int64_t i = begin; i < end; ++i) {
        double x = aps_to_double(aps_load((const void*)s.data, s.dtype, i), s.dtype);
        double d = values(i);
        double magnitude = x < 0 ? -x : x;
        if (x != 0.0 && d == 0.0) lost += 1.0;
        error += (x - d) * (x - d);
        square += x * x;
        if (magnitude > largest || magnitude != magnitude) largest = magnitude;  // NaN stays
    }
    out[0] = lost;
    out[1] = error;
    out[2] = square;
    out[3] = largest;
}
template <class Codec>
struct ApsOwnValues {
    const Codec& codec;
    const uint8_t* base;
    APS_METHOD double operator()(int64_t i) const { return aps_double(codec.own_value(aps_get(base, i, codec.width))); }
};
template <class Codec>
APS_FN void aps_measure_chunk(const ApsSegment& s, const Codec& codec, const uint8_t* base, int64_t begin, int64_t end,
                              double* out) {
    const ApsOwnValues<Codec> values = {codec, base};
    aps_measure_values(s, values, begin, end, out);
}

#endif
