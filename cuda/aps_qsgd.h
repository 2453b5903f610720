// QSGD: a sign and a level of the bucket's scale, rounded at random; horovod_aps/formats/qsgd.py defines it.
// man_bits: bits of a level; codec: 0 for the largest magnitude, 1 for the L2 norm.
#ifndef APS_QSGD_H
#define APS_QSGD_H

#include "aps_buckets.h"

enum { APS_QSGD_FRACTION = 16 };  // bits of a level that are rounded away

struct ApsQsgdCodec {
    enum { n_sides = 1, side_size = 4 };
    int width, levels;
    bool is_l2;
    explicit APS_METHOD ApsQsgdCodec(const ApsSegment& s)
        : width(s.man_bits + 1), levels((1 << s.man_bits) - 1), is_l2(s.codec == 1) {}
    static APS_METHOD bool is_valid(const ApsSegment& s) {
        return s.man_bits >= 1 && s.man_bits <= 7 && s.codec <= 1 && s.block >= 1;
    }

    struct Tally {
        double sum;
        uint32_t top;
        APS_METHOD Tally() : sum(0.0), top(0) {}
        APS_METHOD void join(const Tally& other) {
            sum += other.sum;
            top = other.top > top ? other.top : top;
        }
    };
    APS_METHOD void add(Tally& tally, float x) const {
        const uint32_t bits = aps_bits(x) & 0x7fffffffu;
        if (is_l2) tally.sum += (double)x * (double)x;  // exact products
        else tally.top = bits > tally.top ? bits : tally.top;
    }
    // The scale: no element exceeds it, since a root is rounded to nearest and the largest is a float32 itself.
    APS_METHOD void sides(const Tally& tally, int64_t, int, float* out) const {
        out[0] = aps_float(tally.top >= 0x7f800000u ? 0x7fc00000u : tally.top);
        if (!is_l2) return;
#ifdef __CUDA_ARCH__
        const double norm = sqrt(tally.sum);
#else
        const double norm = __builtin_sqrt(tally.sum);
#endif
        const double most = 3.4028234663852886e38;
        out[0] = tally.sum - tally.sum != 0.0 ? aps_float(0x7fc00000u) : (float)(norm < most ? norm : most);
    }

    struct Plan {
        float power, step, limit;  // the last two times 2^16
        int sign_shift;
        bool is_zero;
        // rnd: 16 bits. Adding 2^23 leaves the nearest integer in the lower bits of a float below it.
        APS_METHOD uint32_t code(uint32_t bits, uint32_t rnd) const {
            if (is_zero) return 0u;
            float y = aps_float(bits & 0x7fffffffu) * power * step;
            y = y < limit ? y : limit;
            const uint32_t level = aps_bits(y + 8388608.0f) - 0x4b000000u;
            return (level + rnd) >> APS_QSGD_FRACTION | bits >> 31 << sign_shift;
        }
    };
    APS_METHOD Plan plan(const float* sides) const {
        const float one = (float)(1 << APS_QSGD_FRACTION), scale = sides[0];
        Plan p;
        p.power =
            scale<(float)aps_pow2(-64) ? (float)aps_pow2(64) : scale>(float) aps_pow2(64) ? (float)aps_pow2(-64) : 1.0f;
        p.is_zero = scale == 0.0f;
        p.step = p.is_zero ? 0.0f : (float)levels / (scale * p.power) * one;
        p.limit = (float)levels * one;
        p.sign_shift = width - 1;
        return p;
    }
    // 16 bits for element `index` of a layer; half of a level where nothing is drawn.
    static APS_METHOD uint32_t draw(ApsKey key, int mode, uint64_t index) {
        if (mode != APS_STOCHASTIC) return 1u << (APS_QSGD_FRACTION - 1);
        return aps_random16(key, index);
    }

    struct Scale {
        float scale, part;
        uint32_t mask;
        int sign_shift;
        APS_METHOD float value(uint32_t code) const {
            const float magnitude = scale * ((float)(int32_t)(code & mask) * part);
            return aps_float(aps_bits(magnitude) ^ code >> sign_shift << 31);
        }
    };
    APS_METHOD Scale scale(const float* sides) const {
        Scale s;
        s.scale = sides[0];
        s.part = 1.0f / (float)levels;
        s.mask = (uint32_t)levels;
        s.sign_shift = width - 1;
        return s;
    }
};

#endif
