// CUDA kernels over a bucket: the same operations, table and bits as the CPU library.
//
// The launcher cuts the segments into tiles; blocks take tiles in turn, threads take groups of 8 elements, which fill
// exactly `width` bytes of the message, so no two threads write the same byte and any grid and block size is correct.
// Every tile is handed to the code of its segment's family of formats by one switch, APS_BY_FAMILY. Messages lie in
// pinned host memory. Compile with --fmad=false: a fused multiply-add would change the last bit.
#include "aps_codecs.h"

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
#define APS_FOR_GROUPS(group, begin, end)                                                            \
    for (int64_t i_ = (begin) + 8 * (int64_t)threadIdx.x; i_ < (end); i_ += 8 * (int64_t)blockDim.x) \
        for (ApsGroup group = {i_, (int)((end) - i_ < 8 ? (end) - i_ : 8)}; group.count; group.count = 0)

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

// ---------------------------------------------------------------------------------------------- packed floats
// A codec of a tile: what its Encoder makes of a value or a sum, and its Summer of the inputs' codes.
struct FloatTile : ApsFloatCodec {
    using ApsFloatCodec::ApsFloatCodec;
    enum { is_scanned = 1 };

    struct Encoder {
        ApsEncodePlan plan;
        ApsKey key;
        int mode;
        bool is_zero;  // nothing but zeros to write
        __device__ __forceinline__ Encoder(const ApsSegment& s, int exponent, int mode, uint64_t seed)
            : plan(aps_encode_plan(ApsFloatCodec(s).format, exponent, mode)), key(aps_key(seed, s.uid)), mode(mode),
              is_zero(exponent == APS_EXP_ZERO || exponent == APS_EXP_NONFINITE) {}
        __device__ __forceinline__ uint32_t code(uint64_t bits, int dtype, int64_t index) const {
            const ApsFormat& f = plan.format;
            if (is_zero) return 0u;
            uint32_t rnd = mode == APS_STOCHASTIC ? aps_random31(key, (uint64_t)index) : 0u;
            if (plan.fast && dtype == APS_F32 && mode == APS_NEAREST) {
                return aps_encode_fast((uint32_t)bits, plan.scale, plan.limit, plan.emin_bits, f.man_bits,
                                       f.exp_bits + f.man_bits);
            }
            return aps_encode(bits, dtype, plan.shift, f, APS_OVERFLOW_WIRE, mode, rnd);
        }
    };

    struct Summer {
        ApsDecodePlan plan;
        int exponent;
        bool is_constant;  // no sum to form: the layer is zero, or not finite
        __device__ __forceinline__ Summer(const ApsSegment& s, int exponent, float factor, int dtype, int n_in,
                                          int accumulate)
            : plan(aps_decode_plan(ApsFloatCodec(s).format, exponent, factor, dtype, n_in, accumulate)),
              exponent(exponent), is_constant(aps_is_constant(s)) {}
        // Input after input as in the CPU library.
        __device__ __forceinline__ void sum(const ApsSegment& s, ApsGroup g, const uint64_t* inputs, int n_in,
                                            double* acc) const {
            const ApsFormat& f = plan.format;
            const bool plain = plan.accumulate == APS_SUM_FLOAT;
            const int mag_bits = f.exp_bits + f.man_bits;
            const double scale = aps_pow2(APS_ACC_EXP - f.emax);
            uint32_t codes[8];
            double lost[8];
            for (int j = 0; j < n_in; ++j) {
                load_codes((const uint8_t*)inputs[j] + s.offset, g, f.width, codes);
                for (int k = 0; k < g.count; ++k) {
                    if (plain && !plan.wide) {
                        float v = aps_decode_float(codes[k], plan.emin_bits, f.man_bits, mag_bits);
                        acc[k] = j ? (double)((float)acc[k] + v) : (double)v;
                    } else {
                        double v = aps_decode_double(codes[k], f);
                        if (plain) v *= scale;
                        if (j == 0) acc[k] = v, lost[k] = 0.0;
                        else if (plain) acc[k] += v;
                        else aps_add(&acc[k], &lost[k], v, f, plan.accumulate);
                    }
                }
            }
            if (!plain) {
                for (int k = 0; k < g.count; ++k) acc[k] *= scale;
            }
        }
        // The bits to store of a decoded sum.
        __device__ __forceinline__ uint64_t finish(double acc) const {
            if (is_constant) return aps_special(0, exponent == APS_EXP_ZERO ? APS_KIND_ZERO : APS_KIND_NAN, plan.dtype);
            return aps_finish_plan(acc, plan);
        }
        // The code of a sum that is sent on.
        __device__ __forceinline__ uint32_t code(double acc, const Encoder& encoder, int64_t index) const {
            if (!plan.wide && plan.accumulate == APS_SUM_FLOAT)
                return encoder.code(aps_bits((float)acc), APS_F32, index);
            return encoder.code(aps_bits64(acc), APS_F64, index);
        }
    };
};

// ---------------------------------------------------------------------------------------------- raw float32
struct RawTile : ApsRawCodec {
    using ApsRawCodec::ApsRawCodec;
    enum { is_scanned = 0 };

    struct Encoder {
        enum { is_zero = 0 };
        __device__ __forceinline__ Encoder(const ApsSegment&, int, int, uint64_t) {}
        __device__ __forceinline__ uint32_t code(uint64_t bits, int dtype, int64_t) const {
            return ApsRawCodec::code(bits, dtype);
        }
    };

    struct Summer {
        float factor;
        int dtype;
        enum { is_constant = 0 };
        __device__ __forceinline__ Summer(const ApsSegment&, int, float factor, int dtype, int, int)
            : factor(factor), dtype(dtype) {}
        __device__ __forceinline__ void sum(const ApsSegment& s, ApsGroup g, const uint64_t* inputs, int n_in,
                                            double* acc) const {
            uint32_t codes[8];
            for (int j = 0; j < n_in; ++j) {
                load_codes((const uint8_t*)inputs[j] + s.offset, g, width, codes);
                for (int k = 0; k < g.count; ++k) {
                    float v = aps_float(codes[k]);
                    acc[k] = j ? (double)((float)acc[k] + v) : (double)v;
                }
            }
        }
        __device__ __forceinline__ uint64_t finish(double acc) const {
            if (dtype == APS_F64) return aps_bits64(acc * aps_to_double(aps_bits(factor), APS_F32));
            return aps_convert(aps_bits((float)acc * factor), APS_F32, dtype);
        }
        __device__ __forceinline__ uint32_t code(double acc, const Encoder&, int64_t) const {
            return aps_bits((float)acc);
        }
    };
};

// ---------------------------------------------------------------------------------------------- tiles
// Call a template over the tile codec of a segment's family, named Tile in the call.
#define APS_BY_FAMILY(s, ...)       \
    switch ((s).family) {           \
        case APS_FAMILY_RAW: {      \
            typedef RawTile Tile;   \
            __VA_ARGS__;            \
            break;                  \
        }                           \
        default: {                  \
            typedef FloatTile Tile; \
            __VA_ARGS__;            \
        }                           \
    }

template <class Tile>
static __device__ __forceinline__ void scan_tile(const ApsSegment& s, int64_t begin, ull* top) {
    if constexpr (Tile::is_scanned) {
        const int sign_bit = 8 * aps_dtype_size(s.dtype) - 1;
        uint64_t best = 0, bits[8];
        APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
            load_group(s, g, bits);
            for (int k = 0; k < g.count; ++k) {
                uint64_t magnitude = bits[k] & ((1ull << sign_bit) - 1ull);
                best = magnitude > best ? magnitude : best;
            }
        }
        if (best) atomicMax(top, (ull)best);
    }
}

template <class Tile>
static __device__ __forceinline__ void encode_tile(const ApsSegment& s, int64_t begin, uint8_t* message, int mode,
                                                   uint64_t seed) {
    const typename Tile::Encoder encoder(s, s.exponent, mode, seed);
    const Tile tile(s);
    uint64_t bits[8];
    uint32_t codes[8];
    APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
        load_group(s, g, bits);
        for (int k = 0; k < g.count; ++k) codes[k] = encoder.code(bits[k], s.dtype, s.first + g.first + k);
        store_codes(message + s.offset, g, tile.width, codes);
    }
}

template <class Tile>
static __device__ __forceinline__ void decode_tile(const ApsSegment& s, int64_t begin, const uint64_t* inputs, int n_in,
                                                   int accumulate) {
    const typename Tile::Summer summer(s, s.exponent, s.factor, s.dtype, n_in, accumulate);
    double acc[8] = {};
    uint64_t bits[8];
    APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
        if (!summer.is_constant) summer.sum(s, g, inputs, n_in, acc);
        for (int k = 0; k < g.count; ++k) bits[k] = summer.finish(acc[k]);
        store_group(s, g, bits);
    }
}

template <class Tile>
static __device__ __forceinline__ void reduce_scan_tile(const ApsSegment& s, int64_t begin, const uint64_t* inputs,
                                                        int n_in, ull* top) {
    const typename Tile::Summer summer(s, APS_EXP_ZERO, 1.0f, APS_F32, n_in, APS_SUM_FLOAT);
    double acc[8];
    uint64_t best = 0;
    if (!Tile::is_scaled(s)) return;
    APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
        summer.sum(s, g, inputs, n_in, acc);
        for (int k = 0; k < g.count; ++k) {
            uint64_t magnitude = aps_bits64(acc[k]) & 0x7fffffffffffffffull;
            best = magnitude > best ? magnitude : best;
        }
    }
    if (best) atomicMax(top, (ull)best);
}

template <class Tile>
static __device__ __forceinline__ void reduce_tile(const ApsSegment& s, int64_t begin, const uint64_t* inputs, int n_in,
                                                   int accumulate, int acc_exp, uint8_t* message, int mode,
                                                   uint64_t seed) {
    const typename Tile::Summer summer(s, APS_EXP_ZERO, 1.0f, APS_F32, n_in, accumulate);
    const typename Tile::Encoder encoder(s, acc_exp, mode, seed);
    const Tile tile(s);
    double acc[8] = {};
    uint32_t codes[8];
    APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
        if (!encoder.is_zero) summer.sum(s, g, inputs, n_in, acc);
        for (int k = 0; k < g.count; ++k) codes[k] = summer.code(acc[k], encoder, s.first + g.first + k);
        store_codes(message + s.offset, g, tile.width, codes);
    }
}

template <class Tile>
static __device__ __forceinline__ void residual_tile(const ApsSegment& s, int64_t begin, const uint8_t* message) {
    const Tile tile(s);
    uint64_t bits[8];
    uint32_t codes[8];
    APS_FOR_GROUPS(g, begin, tile_end(s, begin)) {
        load_group(s, g, bits);
        load_codes(message + s.offset, g, tile.width, codes);
        for (int k = 0; k < g.count; ++k) bits[k] = tile.residual(bits[k], codes[k], s.dtype);
        store_group(s, g, bits);
    }
}

// ---------------------------------------------------------------------------------------------- kernels
extern "C" {

// Largest |x| of every segment, as bits of its dtype; top starts at 0. NaN and Inf have the largest bits.
__global__ void scan_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, ull* top) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        APS_BY_FAMILY(s, scan_tile<Tile>(s, tiles[t].begin, &top[tiles[t].segment]))
    }
}

__global__ void encode_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, uint8_t* message, int mode,
                              uint64_t seed) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        APS_BY_FAMILY(s, encode_tile<Tile>(s, tiles[t].begin, message, mode, seed))
    }
}

__global__ void decode_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* inputs,
                              int n_in, int accumulate) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        APS_BY_FAMILY(s, decode_tile<Tile>(s, tiles[t].begin, inputs, n_in, accumulate))
    }
}

// First half of reduce: largest |sum| of every segment in the accumulation domain, as bits of a double.
__global__ void reduce_scan_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles,
                                   const uint64_t* inputs, int n_in, ull* top) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        APS_BY_FAMILY(s, reduce_scan_tile<Tile>(s, tiles[t].begin, inputs, n_in, &top[tiles[t].segment]))
    }
}

// Second half: encode the sums at acc_exp, their exponent in the accumulation domain (APS_EXP_ZERO writes zeros).
__global__ void reduce_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint64_t* inputs,
                              int n_in, int accumulate, const int32_t* acc_exp, uint8_t* message, int mode,
                              uint64_t seed) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        const int exponent = acc_exp[tiles[t].segment];
        APS_BY_FAMILY(s, reduce_tile<Tile>(s, tiles[t].begin, inputs, n_in, accumulate, exponent, message, mode, seed))
    }
}

__global__ void residual_kernel(const ApsSegment* segs, const ApsTile* tiles, int64_t n_tiles, const uint8_t* message) {
    APS_FOR_TILES(t) {
        const ApsSegment s = segs[tiles[t].segment];
        APS_BY_FAMILY(s, residual_tile<Tile>(s, tiles[t].begin, message))
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
        APS_BY_FAMILY(s, aps_measure_chunk(s, Tile(s), message + s.offset, begin, end, out + 4 * c))
    }
}

}  // extern "C"
