// Families whose messages have the scales of buckets before the codes: `n_sides` of `side_size` bytes (4: float32, 1: a
// byte) for each bucket of s.block elements (0: one bucket, all of the segment), then the codes, packed as those of every
// family. Elements count as float32. What horovod_aps/formats/buckets.py says in NumPy; shared by the CPU library and the CUDA kernels.
//
// A codec of such a family has: n_sides, width, is_valid(segment), side_size, a Tally of elements (add, join, sides), and with the
// sides of a bucket a Plan that encodes (code) and a Scale that decodes (value).
#ifndef APS_BUCKETS_H
#define APS_BUCKETS_H

#include "aps_codecs.h"

enum { APS_CHUNK = 256, APS_LANES = 8 };  // order of additions, see aps_tally_chunk

// ---------------------------------------------------------------------------------------------- layout of a segment
APS_FN bool aps_has_buckets(const ApsSegment& s) { return s.family >= APS_FAMILY_QSGD && s.family < APS_N_FAMILIES; }
APS_FN int64_t aps_bucket_size(const ApsSegment& s) { return s.block ? (int64_t)s.block : s.n > 0 ? s.n : 1; }
APS_FN int64_t aps_n_buckets(const ApsSegment& s) {
    const int64_t size = aps_bucket_size(s);
    return (s.n + size - 1) / size;
}
template <class Codec>
APS_FN int64_t aps_side_bytes(const ApsSegment& s) {
    return (int64_t)Codec::side_size * Codec::n_sides * aps_n_buckets(s);
}
// Messages begin anywhere, and devices load only what is aligned: otherwise byte by byte, which compilers must not join.
APS_FN float aps_load_side(const uint8_t* p) {
    if ((uint64_t)p % 4 == 0) return aps_float(*(const uint32_t*)p);
    const volatile uint8_t* bytes = p;
    uint32_t bits = 0;
    for (int k = 0; k < 4; ++k) bits |= (uint32_t)bytes[k] << (8 * k);
    return aps_float(bits);
}
APS_FN void aps_store_side(uint8_t* p, float value) {
    const uint32_t bits = aps_bits(value);
    volatile uint8_t* bytes = p;
    if ((uint64_t)p % 4 == 0) *(uint32_t*)p = bits;
    else
        for (int k = 0; k < 4; ++k) bytes[k] = (uint8_t)(bits >> (8 * k));
}
template <class Codec>
APS_FN void aps_load_sides(const uint8_t* base, int64_t bucket, float* sides) {
    const uint8_t* p = base + bucket * Codec::n_sides * Codec::side_size;
    for (int k = 0; k < Codec::n_sides; ++k) sides[k] = Codec::side_size == 1 ? (float)p[k] : aps_load_side(p + 4 * k);
}
template <class Codec>
APS_FN void aps_store_sides(uint8_t* base, int64_t bucket, const float* sides) {
    uint8_t* p = base + bucket * Codec::n_sides * Codec::side_size;
    for (int k = 0; k < Codec::n_sides; ++k) {
        if (Codec::side_size == 1) p[k] = (uint8_t)sides[k];
        else aps_store_side(p + 4 * k, sides[k]);
    }
}
APS_FN float aps_load_float(const ApsSegment& s, int64_t i) {
    return aps_float((uint32_t)aps_convert(aps_load((const void*)s.data, s.dtype, i), s.dtype, APS_F32));
}

// ---------------------------------------------------------------------------------------------- exponents
// 0, or what float32 makes of the largest magnitude.
APS_FN int aps_bucket_exponent(uint64_t top, int dtype) {
    const uint32_t bits = (uint32_t)aps_convert(top, dtype, APS_F32) & 0x7fffffffu;
    return bits >= 0x7f800000u ? (int)APS_EXP_NONFINITE : bits ? 0 : (int)APS_EXP_ZERO;
}

// ---------------------------------------------------------------------------------------------- one element
template <class Codec>
APS_FN float aps_bucket_value(const ApsSegment& s, const Codec& codec, const uint8_t* base, int64_t i) {
    float sides[Codec::n_sides];
    aps_load_sides<Codec>(base, i / aps_bucket_size(s), sides);
    return codec.scale(sides).value(aps_get(base + aps_side_bytes<Codec>(s), i, codec.width));
}
// Bits in dtype of a sum times the factor: in float32, or in double for float64.
APS_FN uint64_t aps_bucket_finish(float sum, float factor, int dtype) {
    if (dtype == APS_F64) return aps_bits64((double)sum * (double)factor);
    return aps_convert(aps_bits(sum * factor), APS_F32, dtype);
}
// x - value, rounded once to dtype.
APS_FN uint64_t aps_bucket_residual(uint64_t bits, float value, int dtype) {
    return aps_difference(bits, aps_convert(aps_bits(value), APS_F32, APS_F64), dtype);
}

template <class Codec>
struct ApsBucketValues {
    const ApsSegment& s;
    const Codec& codec;
    const uint8_t* base;
    APS_METHOD double operator()(int64_t i) const {
        if (s.exponent == APS_EXP_ZERO) return 0.0;
        if (s.exponent == APS_EXP_NONFINITE) return aps_double(aps_special(0, APS_KIND_NAN, APS_F64));
        return (double)aps_bucket_value(s, codec, base, i);
    }
};
template <class Codec>
APS_FN void aps_measure_buckets(const ApsSegment& s, const uint8_t* base, int64_t begin, int64_t end, double* out) {
    const Codec codec(s);
    const ApsBucketValues<Codec> values = {s, codec, base};
    aps_measure_values(s, values, begin, end, out);
}

// A Tally of the largest magnitude, by its bits; NaN and Inf have the largest.
struct ApsTop {
    uint32_t top;
    APS_METHOD ApsTop() : top(0) {}
    APS_METHOD void add(float x) {
        const uint32_t bits = aps_bits(x) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    APS_METHOD void join(const ApsTop& other) { top = other.top > top ? other.top : top; }
};

// Elements [begin, end) of a bucket, at most APS_CHUNK: 8 partial sums, joined pairwise. Chunks are joined in order.
template <class Codec, class Source>
APS_FN typename Codec::Tally aps_tally_chunk(const Codec& codec, const Source& source, int64_t begin, int64_t end) {
    typename Codec::Tally lanes[APS_LANES];
    for (int64_t i = begin; i < end; ++i) codec.add(lanes[(i - begin) % APS_LANES], source(i));
    for (int half = APS_LANES / 2; half; half /= 2) {
        for (int k = 0; k < half; ++k) lanes[k].join(lanes[k + half]);
    }
    return lanes[0];
}

#endif
