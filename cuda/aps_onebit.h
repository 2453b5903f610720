// 1-bit SGD: which side of zero, and the means of both sides of a bucket; horovod_aps/formats/onebit.py defines it.
#ifndef APS_ONEBIT_H
#define APS_ONEBIT_H

#include "aps_buckets.h"

struct ApsOneBitCodec {
    enum { n_sides = 2, side_size = 4, width = 1 };
    explicit APS_METHOD ApsOneBitCodec(const ApsSegment&) {}
    static APS_METHOD bool is_valid(const ApsSegment&) { return true; }

    struct Tally {
        double from_zero, below;
        int64_t n_below;
        APS_METHOD Tally() : from_zero(0.0), below(0.0), n_below(0) {}
        APS_METHOD void join(const Tally& other) {
            from_zero += other.from_zero;
            below += other.below;
            n_below += other.n_below;
        }
    };
    APS_METHOD void add(Tally& tally, float x) const {
        if (x < 0.0f) {
            tally.below += (double)x;
            tally.n_below += 1;
        } else {
            tally.from_zero += (double)x;
        }
    }
    APS_METHOD void sides(const Tally& tally, int64_t n, int, float* out) const {
        const int64_t n_from_zero = n - tally.n_below;
        out[0] = n_from_zero ? (float)(tally.from_zero / (double)n_from_zero) : 0.0f;
        out[1] = tally.n_below ? (float)(tally.below / (double)tally.n_below) : 0.0f;
    }

    struct Plan {
        APS_METHOD uint32_t code(uint32_t bits, uint32_t) const { return aps_float(bits) < 0.0f; }
    };
    APS_METHOD Plan plan(const float*) const { return Plan(); }
    static APS_METHOD uint32_t draw(ApsKey, int, uint64_t) { return 0u; }

    struct Scale {
        float means[2];
        APS_METHOD float value(uint32_t code) const { return code & 1u ? means[1] : means[0]; }
    };
    APS_METHOD Scale scale(const float* sides) const {
        Scale s;
        s.means[0] = sides[0];
        s.means[1] = sides[1];
        return s;
    }
};

#endif
