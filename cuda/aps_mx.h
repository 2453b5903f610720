// Microscaling: small floats in blocks that share a power of two, a byte; horovod_aps/formats/mx.py defines it.
// exp_bits, man_bits: of an element; codec: 1 for OCP's rule, by which the largest value may saturate.
#ifndef APS_MX_H
#define APS_MX_H

#include "aps_buckets.h"

enum { APS_MX_MIN_BLOCK = 8, APS_MX_MAX_BLOCK = 2048, APS_MX_NAN = 255 };

// (5, 2) has Inf and NaN as IEEE 754 has them, (4, 3) one NaN; of the others every code is a number.
APS_FN ApsFormat aps_mx_format(int exp_bits, int man_bits) {
    ApsFormat f = aps_format(exp_bits, man_bits, exp_bits == 5 && man_bits == 2);
    if (exp_bits == 4 && man_bits == 3) f.max_code -= 1u;
    return f;
}
// 2^(byte - 127) and its inverse, subnormal ones included; NaN for 255.
APS_FN float aps_mx_power(int byte) {
    return aps_float(byte == APS_MX_NAN ? 0x7fc00000u : byte ? (uint32_t)byte << 23 : 0x00400000u);
}
APS_FN float aps_mx_inverse(int byte) { return aps_float(byte < 254 ? (uint32_t)(254 - byte) << 23 : 0x00400000u); }

struct ApsMxCodec {
    enum { n_sides = 1, side_size = 1 };
    ApsFormat format;
    int width;
    uint32_t emin_bits;
    uint32_t bump, bump_up;  // what the mantissa of a block's largest value needs to carry if it does not fit
    float limit;
    explicit APS_METHOD ApsMxCodec(const ApsSegment& s)
        : format(aps_mx_format(s.exp_bits, s.man_bits)), width(format.width),
          emin_bits(aps_decode_emin_bits(format, format.emax)), bump(0), bump_up(0) {
        const int m = format.man_bits;
        const uint32_t man = format.max_code & ((1u << m) - 1u);
        limit = aps_decode_float(format.max_code, emin_bits, m, format.exp_bits + m);
        if (s.codec) return;
        const bool is_even = m > 0 && !(man & 1u);
        bump = 0x800000u - (((man << 1 | 1u) << (22 - m)) + is_even);
        bump_up = 0x800000u - ((man << (23 - m)) + 1u);
    }
    static APS_METHOD bool is_valid(const ApsSegment& s) {
        const uint32_t b = s.block;
        return s.exp_bits >= 1 && s.exp_bits + s.man_bits <= 7 && s.codec <= 1 && b >= APS_MX_MIN_BLOCK &&
               b <= APS_MX_MAX_BLOCK && (b & (b - 1)) == 0;
    }

    typedef ApsTop Tally;
    APS_METHOD void add(Tally& tally, float x) const { tally.add(x); }
    // The byte of a block from its largest magnitude. A subnormal one has the least power, as its exponent field has it.
    APS_METHOD int byte_of(uint32_t top, int mode) const {
        if (top >= 0x7f800000u) return APS_MX_NAN;
        const int byte = (int)((top + (mode == APS_STOCHASTIC ? bump_up : bump)) >> 23) - format.emax;
        return byte > 0 ? byte : 0;
    }
    APS_METHOD void sides(const Tally& tally, int64_t, int mode, float* out) const {
        out[0] = (float)byte_of(tally.top, mode);
    }

    struct Plan {
        float scale, limit;
        uint32_t emin_bits;
        int man_bits, mag_bits;
        bool is_nan;
        // rnd: 31 bits; the 32nd: to nearest
        APS_METHOD uint32_t code(uint32_t bits, uint32_t rnd) const {
            if (is_nan) return 0u;
            if (rnd >> 31) return aps_encode_fast(bits, scale, limit, emin_bits, man_bits, mag_bits);
            return aps_encode_fast_stochastic(bits, scale, limit, emin_bits, man_bits, mag_bits, rnd);
        }
    };
    APS_METHOD Plan plan(const float* sides) const {
        Plan p;
        p.scale = aps_mx_inverse((int)sides[0]);
        p.is_nan = (int)sides[0] == APS_MX_NAN;
        p.limit = limit;
        p.emin_bits = emin_bits;
        p.man_bits = format.man_bits;
        p.mag_bits = format.exp_bits + format.man_bits;
        return p;
    }
    static APS_METHOD uint32_t draw(ApsKey key, int mode, uint64_t index) {
        return mode == APS_STOCHASTIC ? aps_random31(key, index) : 0x80000000u;
    }

    struct Scale {
        float power;
        uint32_t emin_bits;
        int man_bits, mag_bits;
        APS_METHOD float value(uint32_t code) const {
            return aps_decode_float(code, emin_bits, man_bits, mag_bits) * power;
        }
    };
    APS_METHOD Scale scale(const float* sides) const {
        Scale s;
        s.power = aps_mx_power((int)sides[0]);
        s.emin_bits = emin_bits;
        s.man_bits = format.man_bits;
        s.mag_bits = format.exp_bits + format.man_bits;
        return s;
    }
};

#endif
