// CUDA kernels over a bucket: the same operations, table and bits as the CPU library.
//
// The launcher cuts the segments into tiles; blocks take tiles in turn, threads take groups of 8 elements, which fill
// exactly `width` bytes of the message, so no two threads write the same byte and any grid and block size is correct.
// Messages lie in pinned host memory. Compile with --fmad=false: a fused multiply-add would change the last bit.
#include "aps_scalar.h"

struct ApsTile {
    int64_t segment, begin;
};
enum { APS_TILE = 4096 };  // elements, a multiple of 8

typedef unsigned long long ull;

struct ApsGroup {  // 8 elements, fewer at the end of a segment
    int64_t first;
    int count;
};
static __device__ __forceinline__ int64_t tile_end(const ApsSegment& s, int64_t begin) {
    return begin + APS_TILE < s.n ? begin + APS_TILE : s.n;
}
#define APS_FOR_TILES(tile) for (int64_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x)
#define APS_FOR_GROUPS(group, begin, end)                                                                      \
    for (int64_t i_ = (begin) + 8 * (int64_t)threadIdx.x; i_ < (end); i_ += 8 * (int64_t)blockDim.x)           \
        for (ApsGroup group = {i_, (int)((end)-i_ < 8 ? (end)-i_ : 8)}; group.count; group.count = 0)

// 16-byte loads where the address allows it.
static __device__ __forceinline__ void load_group(const ApsSegment& s, ApsGroup g, uint64_t* bits) {
    if (s.dtype == APS_F32 && g.count == 8 && (s.data + 4 * (uint64_t)g.first) % 16 == 0) {
        const uint4* p = (const uint4*)(s.data + 4 * (uint64_t)g.first);
        uint4 a = p[0], b = p[1];
        bits[0] = a.x, bits[1] = a.y, bits[2] = a.z, bits[3] = a.w;
        bits[4] = b.x, bits[5] = b.y, bits[6] = b.z, bits[7] = b.w;
        return;
    }
    for (int k = 0; k < g.count; ++k) bits[k] = aps_load((const void*)s.data, s.dtype, g.first + k);
}
static __device__ __forceinline__ void store_group(const ApsSegment& s, ApsGroup g, const uint64_t* bits) {
    if (s.dtype == APS_F32 && g.count == 8 && (s.data + 4 * (uint64_t)g.first) % 16 == 0) {
        uint4* p = (uint4*)(s.data + 4 * (uint64_t)g.first);
        uint4 a, b;
        a.x = (uint32_t)bits[0], a.y = (uint32_t)bits[1], a.z = (uint32_t)bits[2], a.w = (uint32_t)bits[3];
        b.x = (uint32_t)bits[4], b.y = (uint32_t)bits[5], b.z = (uint32_t)bits[6], b.w = (uint32_t)bits[7];
        p[0] = a, p[1] = b;
        return;
    }
    for (int k = 0; k < g.count; ++k) aps_store((void*)s.data, s.dtype, g.first + k, bits[k]);
}
// Eight one-byte codes travel in one 8-byte access where the address allows it.
static __device__ __forceinline__ void load_codes(const uint8_t* base, ApsGroup g, int width, uint32_t* codes) {
    const uint8_t* p = base + (g.first >> 3) * width;
    if (width == 8 && g.count == 8 && (uint64_t)p % 8 == 0) {
        uint64_t word = *(const uint64_t*)p;
        for (int k = 0; k < 8; ++k) codes[k] = (uint32_t)(word >> (8 * k)) & 0xffu;
        return;
    }
    for (int k = 0; k < g.count; ++k) codes[k] = aps_get(p, k, width);
}
static __device__ __forceinline__ void store_codes(uint8_t* base, ApsGroup g, int width, const uint32_t* codes) {
    uint8_t* p = base + (g.first >> 3) * width;
    if (width == 8 && g.count == 8 && (uint64_t)p % 8 == 0) {
        uint64_t word = 0;
        for (int k = 0; k < 8; ++k) word |= (uint64_t)codes[k] << (8 * k);
        *(uint64_t*)p = word;
        return;
    }
    aps_put8(p, codes, g.count, width);
}
static __device__ __forceinline__ uint32_t encode_one(uint64_t bits, int dtype, const ApsEncodePlan& p, int mode, ApsKey key,
                                                      int64_t index) {
    const ApsFormat& f = p.format;
    uint32_t rnd = mode == APS_STOCHASTIC ? aps_random31(key, (uint64_t)index) : 0u;
    if (p.fast && dtype == APS_F32 && mode == APS_NEAREST) {
        return aps_encode_fast((uint32_t)bits, p.scale, p.limit, p.emin_bits, f.man_bits, f.exp_bits + f.man_bits);
    }
    return aps_encode(bits, dtype, p.shift, f, APS_OVERFLOW_WIRE, mode, rnd);
}
static __device__ __forceinline__ bool is_constant(const ApsSegment& s) {
    return !(s.flags & APS_RAW) && (s.exponent == APS_EXP_ZERO || s.exponent == APS_EXP_NONFINITE);
}

// Sums of a group, input after input as in the CPU library: bits of doubles, or of float32 for RAW.
static __device__ __forceinline__ void sum_group(const ApsSegment& s, ApsGroup g, const uint64_t* inputs, int n_in,
                                                 const ApsDecodePlan& p, double* acc) {
    const ApsFormat& f = p.format;
    const bool raw = s.flags & APS_RAW, plain = p.accumulate == APS_SUM_FLOAT;
    const int mag_bits = f.exp_bits + f.man_bits;
    const double scale = aps_pow2(APS_ACC_EXP - f.emax);
    uint32_t codes[8];
    double lost[8];
    for (int j = 0; j < n_in; ++j) {
        load_codes((const uint8_t*)inputs[j] + s.offset, g, f.width, codes);
        for (int k = 0; k < g.count; ++k) {
            if (raw || (plain && !p.wide)) {
                float v = raw ? aps_float(codes[k]) : aps_decode_float(codes[k], p.emin_bits, f.man_bits, mag_bits);
                acc[k] = j ? (double)((float)acc[k] + v) : (double)v;
            } else {
                double v = aps_decode_double(codes[k], f);
                if (plain) v *= scale;
                if (j == 0) acc[k] = v, lost[k] = 0.0;
                else if (plain) acc[k] += v;
                else aps_add(&acc[k], &lost[k], v, f, p.accumulate);
            }
        }
    }
    if (!raw && !plain) {
        for (int k = 0; k < g.count; ++k) acc[k] *= scale;
    }
}

extern "C" {

// Largest |x| of every segment, as bits of its dtype; top starts at 0. NaN and Inf have the largest bits.
__global__ void scan_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, ull* top) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const int sign_bit = 8 * aps_dtype_size(s.dtype) - 1;
        uint64_t best = 0, bits[8];
        if (s.flags & APS_RAW) continue;
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            load_group(s, g, bits);
            for (int k = 0; k < g.count; ++k) {
                uint64_t magnitude = bits[k] & ((1ull << sign_bit) - 1ull);
                best = magnitude > best ? magnitude : best;
            }
        }
        if (best) atomicMax(&top[tiles[t].segment], (ull)best);
    }
}

__global__ void encode_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, uint8_t* message, int mode,
                              uint64_t seed) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const ApsFormat f = aps_segment_format(s);
        const ApsEncodePlan p = aps_encode_plan(f, s.exponent, mode);
        const ApsKey key = aps_key(seed, s.uid);
        uint64_t bits[8];
        uint32_t codes[8];
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            load_group(s, g, bits);
            for (int k = 0; k < g.count; ++k) {
                if (s.flags & APS_RAW) codes[k] = aps_float32_code(bits[k], s.dtype);
                else codes[k] = is_constant(s) ? 0u : encode_one(bits[k], s.dtype, p, mode, key, s.first + g.first + k);
            }
            store_codes(message + s.offset, g, f.width, codes);
        }
    }
}

__global__ void decode_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* inputs, int n_in,
                              int accumulate) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const ApsFormat f = aps_segment_format(s);
        const ApsDecodePlan p = aps_decode_plan(f, s.exponent, s.factor, s.dtype, n_in, accumulate);
        double acc[8];
        uint64_t bits[8];
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            if (!is_constant(s)) sum_group(s, g, inputs, n_in, p, acc);
            for (int k = 0; k < g.count; ++k) {
                if (is_constant(s)) bits[k] = aps_special(0, s.exponent == APS_EXP_ZERO ? APS_KIND_ZERO : APS_KIND_NAN, s.dtype);
                else if (!(s.flags & APS_RAW)) bits[k] = aps_finish_plan(acc[k], p);
                else if (s.dtype == APS_F64) bits[k] = aps_bits64(acc[k] * p.factor);
                else bits[k] = aps_convert(aps_bits((float)acc[k] * s.factor), APS_F32, s.dtype);
            }
            store_group(s, g, bits);
        }
    }
}

// First half of reduce: largest |sum| of every segment in the accumulation domain, as bits of a double.
__global__ void reduce_scan_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* inputs, int n_in,
                                   ull* top) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const ApsDecodePlan p = aps_decode_plan(aps_segment_format(s), APS_EXP_ZERO, 1.0f, APS_F32, n_in, APS_SUM_FLOAT);
        double acc[8];
        uint64_t best = 0;
        if (s.flags & APS_RAW || is_constant(s)) continue;
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            sum_group(s, g, inputs, n_in, p, acc);
            for (int k = 0; k < g.count; ++k) {
                uint64_t magnitude = aps_bits64(acc[k]) & 0x7fffffffffffffffull;
                best = magnitude > best ? magnitude : best;
            }
        }
        if (best) atomicMax(&top[tiles[t].segment], (ull)best);
    }
}

// Second half: encode the sums at acc_exp, their exponent in the accumulation domain (APS_EXP_ZERO writes zeros).
__global__ void reduce_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* inputs, int n_in,
                              int accumulate, const int32_t* acc_exp, uint8_t* message, int mode, uint64_t seed) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const ApsFormat f = aps_segment_format(s);
        const int exponent = acc_exp[tiles[t].segment];
        const bool raw = s.flags & APS_RAW;
        const ApsDecodePlan p = aps_decode_plan(f, APS_EXP_ZERO, 1.0f, APS_F32, n_in, accumulate);
        const ApsEncodePlan q = aps_encode_plan(f, exponent, mode);
        const ApsKey key = aps_key(seed, s.uid);
        const bool is_float = !p.wide && accumulate == APS_SUM_FLOAT;
        double acc[8];
        uint32_t codes[8];
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            if (raw || exponent != APS_EXP_ZERO) sum_group(s, g, inputs, n_in, p, acc);
            for (int k = 0; k < g.count; ++k) {
                int64_t index = s.first + g.first + k;
                if (raw) codes[k] = aps_bits((float)acc[k]);
                else if (exponent == APS_EXP_ZERO) codes[k] = 0;
                else if (is_float) codes[k] = encode_one(aps_bits((float)acc[k]), APS_F32, q, mode, key, index);
                else codes[k] = encode_one(aps_bits64(acc[k]), APS_F64, q, mode, key, index);
            }
            store_codes(message + s.offset, g, f.width, codes);
        }
    }
}

__global__ void residual_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint8_t* message) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const ApsFormat f = aps_segment_format(s);
        uint64_t bits[8];
        uint32_t codes[8];
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            load_group(s, g, bits);
            load_codes(message + s.offset, g, f.width, codes);
            for (int k = 0; k < g.count; ++k) bits[k] = aps_residual(bits[k], codes[k], s, f);
            store_group(s, g, bits);
        }
    }
}

__global__ void add_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* targets) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        float* kept = (float*)targets[tiles[t].segment];
        uint64_t bits[8];
        APS_FOR_GROUPS(g, tiles[t].begin, tile_end(s, tiles[t].begin)) {
            load_group(s, g, bits);
            for (int k = 0; k < g.count; ++k) kept[g.first + k] = aps_add_error(kept[g.first + k], bits[k], s.dtype);
        }
    }
}

// One thread per chunk, in order, so that the sums have the bits of the CPU library's; out has 4 doubles per chunk.
__global__ void measure_kernel(const ApsSegment* segs, const ApsTile* chunks, int64_t n_chunks, const uint8_t* message,
                               double* out) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; c < n_chunks; c += step) {
        const ApsSegment s = segs[chunks[c].segment];
        const int64_t begin = chunks[c].begin, end = begin + APS_MEASURE_CHUNK < s.n ? begin + APS_MEASURE_CHUNK : s.n;
        aps_measure_chunk(s, aps_segment_format(s), message + s.offset, begin, end, out + 4 * c);
    }
}

}  // extern "C"
