// CUDA kernels over a bucket: the same operations, table and bits as the CPU library.
//
// The launcher cuts the segments into tiles; blocks take tiles in turn, threads take groups of 8 elements, which fill
// exactly `width` bytes of the message, so no two threads write the same byte and any grid is correct. A block is a
// multiple of 32 threads: the scans reduce within a warp before they touch memory.
//
// Every operation has two kernels. The common one holds the 8 elements of a group in registers, works in float32 and
// loads and stores whole words; the launcher gives it only segments whose numbers allow that (kernels/cuda.py
// states when). The wide one takes one element after the other, exactly, in integers and double.
//
// Exponents come beside the table, which stays the same from step to step. Compile with --fmad=false and without
// flush-to-zero: either would change the last bit.
#define APS_TABLES_BY_ADDRESS
#include "aps_codecs.h"
#include "aps_mx.h"
#include "aps_onebit.h"
#include "aps_qsgd.h"
#include "aps_table.h"

struct ApsTile {
    int64_t segment, begin;
};
constexpr int64_t APS_TILE = 4096, APS_GROUP = 8;  // elements

typedef unsigned long long ull;

static __device__ __forceinline__ int64_t tile_end(const ApsSegment& s, int64_t begin) {
    return begin + APS_TILE < s.n ? begin + APS_TILE : s.n;
}
#define APS_FOR_TILES(tile) for (int64_t tile = blockIdx.x; tile < n_tiles; tile += gridDim.x)
// Group after group of a thread: i is the first element, count is 8, or less at the end of a segment.
#define APS_FOR_GROUPS(i, count, begin, end)                                       \
    for (int64_t i = (begin) + APS_GROUP * (int64_t)threadIdx.x, count; i < (end); \
         i += APS_GROUP * (int64_t)blockDim.x)                                     \
        if (count = (end) - i < APS_GROUP ? (end) - i : APS_GROUP, true)
#define APS_UNROLL _Pragma("unroll") for (int k = 0; k < APS_GROUP; ++k)

// ---------------------------------------------------------------------------------------------- words of a group
static __device__ __forceinline__ void unpack4(const uint4 v, uint32_t* words) {
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
static __device__ __forceinline__ uint4 pack4(const uint32_t* words) {
    uint4 v;
    v.x = words[0], v.y = words[1], v.z = words[2], v.w = words[3];
    return v;
}
static __device__ __forceinline__ bool is_whole(uint64_t address, int64_t count, uint64_t alignment) {
    return count == APS_GROUP && address % alignment == 0;
}

// The bits of 8 elements of at most 32 bits; zeros behind the last.
static __device__ __forceinline__ void load_group(const ApsSegment& s, int64_t i, int64_t count, uint32_t* bits) {
    const bool is_half = s.dtype != APS_F32;
    const uint64_t at = s.data + (is_half ? 2 : 4) * (uint64_t)i;
    const bool whole = is_whole(at, count, 16);
    if (whole && is_half) {
        uint32_t words[4];
        unpack4(*(const uint4*)at, words);
        APS_UNROLL bits[k] = k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xffffu;
    } else if (whole) {
        unpack4(((const uint4*)at)[0], bits);
        unpack4(((const uint4*)at)[1], bits + 4);
    } else if (is_half) {
        APS_UNROLL bits[k] = k < count ? ((const uint16_t*)at)[k] : 0u;
    } else {
        APS_UNROLL bits[k] = k < count ? ((const uint32_t*)at)[k] : 0u;
    }
}
// The same as bits of float32.
static __device__ __forceinline__ void load_floats(const ApsSegment& s, int64_t i, int64_t count, uint32_t* bits) {
    load_group(s, i, count, bits);
    if (s.dtype == APS_F32) return;
    APS_UNROLL bits[k] = aps_widen(bits[k], s.dtype);
}
static __device__ __forceinline__ void store_floats(const ApsSegment& s, int64_t i, int64_t count, uint32_t* bits) {
    const bool is_half = s.dtype != APS_F32;
    const uint64_t at = s.data + (is_half ? 2 : 4) * (uint64_t)i;
    const bool whole = is_whole(at, count, 16);
    if (is_half) {
        APS_UNROLL bits[k] = aps_narrow(bits[k], s.dtype);
    }
    if (whole && is_half) {
        uint32_t words[4];
        APS_UNROLL if (k % 2) words[k / 2] = bits[k - 1] | bits[k] << 16;
        *(uint4*)at = pack4(words);
    } else if (whole) {
        ((uint4*)at)[0] = pack4(bits);
        ((uint4*)at)[1] = pack4(bits + 4);
    } else if (is_half) {
        APS_UNROLL if (k < count)((uint16_t*)at)[k] = (uint16_t)bits[k];
    } else {
        APS_UNROLL if (k < count)((uint32_t*)at)[k] = bits[k];
    }
}

// Codes of one group, one after the other; the last byte is filled up with zeros.
struct Reader {
    const uint8_t* p;
    uint64_t word;
    int filled;
    __device__ __forceinline__ explicit Reader(const uint8_t* p) : p(p), word(0), filled(0) {}
    __device__ __forceinline__ uint32_t get(int width) {
#pragma unroll 1
        for (; filled < width; filled += 8) word |= (uint64_t)*p++ << filled;
        const uint32_t code = (uint32_t)word & (0xffffffffu >> (32 - width));
        word >>= width;
        filled -= width;
        return code;
    }
};
struct Writer {
    uint8_t* p;
    uint64_t word;
    int filled;
    __device__ __forceinline__ explicit Writer(uint8_t* p) : p(p), word(0), filled(0) {}
    __device__ __forceinline__ void put(uint32_t code, int width) {
        word |= (uint64_t)code << filled;
#pragma unroll 1
        for (filled += width; filled >= 8; filled -= 8) {
            *p++ = (uint8_t)word;
            word >>= 8;
        }
    }
    __device__ __forceinline__ void end() {
        if (filled) *p = (uint8_t)word;
    }
};

// Codes of 8 elements. Widths of 4, 8, 16 and 32 bits travel in whole words, others byte by byte.
static __device__ __forceinline__ void load_codes(const uint8_t* base, int64_t i, int64_t count, int width,
                                                  uint32_t* codes) {
    const uint8_t* p = base + (i >> 3) * width;
    const uint64_t at = (uint64_t)p;
    if (width == 8 && is_whole(at, count, 8)) {
        const uint2 v = *(const uint2*)at;
        APS_UNROLL codes[k] = (k < 4 ? v.x : v.y) >> 8 * (k % 4) & 0xffu;
    } else if (width == 4 && is_whole(at, count, 4)) {
        const uint32_t v = *(const uint32_t*)at;
        APS_UNROLL codes[k] = v >> 4 * k & 0xfu;
    } else if (width == 16 && is_whole(at, count, 16)) {
        uint32_t words[4];
        unpack4(*(const uint4*)at, words);
        APS_UNROLL codes[k] = k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xffffu;
    } else if (width == 32 && is_whole(at, count, 16)) {
        unpack4(((const uint4*)at)[0], codes);
        unpack4(((const uint4*)at)[1], codes + 4);
    } else {
        Reader reader(p);
        APS_UNROLL codes[k] = k < count ? reader.get(width) : 0u;
    }
}
static __device__ __forceinline__ void store_codes(uint8_t* base, int64_t i, int64_t count, int width,
                                                   const uint32_t* codes) {
    uint8_t* p = base + (i >> 3) * width;
    const uint64_t at = (uint64_t)p;
    if (width == 8 && is_whole(at, count, 8)) {
        uint2 v;
        v.x = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        v.y = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
        *(uint2*)at = v;
    } else if (width == 4 && is_whole(at, count, 4)) {
        uint32_t v = 0;
        APS_UNROLL v |= codes[k] << 4 * k;
        *(uint32_t*)at = v;
    } else if (width == 16 && is_whole(at, count, 16)) {
        uint32_t words[4];
        APS_UNROLL if (k % 2) words[k / 2] = codes[k - 1] | codes[k] << 16;
        *(uint4*)at = pack4(words);
    } else if (width == 32 && is_whole(at, count, 16)) {
        ((uint4*)at)[0] = pack4(codes);
        ((uint4*)at)[1] = pack4(codes + 4);
    } else {
        Writer writer(p);
        APS_UNROLL if (k < count) writer.put(codes[k], width);
        writer.end();
    }
}

// The largest value of a warp goes to memory.
template <class T>
static __device__ __forceinline__ T warp_max(T v) {
    for (int step = 16; step; step >>= 1) {
        const T other = __shfl_xor_sync(0xffffffffu, v, step);
        v = other > v ? other : v;
    }
    return v;
}
static __device__ __forceinline__ void raise_to(ull* top, uint64_t value) {
    if (threadIdx.x % 32 == 0 && value) atomicMax(top, (ull)value);
}

// ---------------------------------------------------------------------------------------------- packed floats
// What a family makes of a tile. Common: an Encoder of float32 bits, and `value` and `finish` around a sum of floats.
// Wide: what is exact for every dtype and format.
struct FloatTile : ApsFloatCodec {
    using ApsFloatCodec::ApsFloatCodec;
    enum { is_scanned = 1 };

    struct Encoder {
        float scale, limit;
        uint32_t emin_bits;
        int man_bits, mag_bits, width, mode;
        bool is_zero;  // nothing but zeros to write
        ApsKey key;
        __device__ __forceinline__ Encoder(const ApsSegment& s, int exponent, int mode, uint64_t seed)
            : man_bits(s.man_bits), mag_bits(s.exp_bits + s.man_bits), width(mag_bits + 1), mode(mode),
              is_zero(exponent == APS_EXP_ZERO || exponent == APS_EXP_NONFINITE), key(aps_key(seed, s.uid)) {
            const ApsFormat f = ApsFloatCodec(s).format;
            scale = aps_float((uint32_t)(f.emax - exponent + 127) << 23);
            emin_bits = aps_decode_emin_bits(f, f.emax);
            limit = aps_decode_float(f.max_code, emin_bits, man_bits, mag_bits);
        }
        __device__ __forceinline__ uint32_t code(uint32_t bits, int64_t index) const {
            if (is_zero) return 0u;
            if (mode == APS_STOCHASTIC)
                return aps_encode_fast_stochastic(bits, scale, limit, emin_bits, man_bits, mag_bits,
                                                  aps_random31(key, (uint64_t)index));
            return aps_encode_fast(bits, scale, limit, emin_bits, man_bits, mag_bits);
        }
    };

    // Sums with the format's top value at 2^top_exp.
    struct Summer {
        uint32_t emin_bits;
        int man_bits, mag_bits, width;
        __device__ __forceinline__ Summer(const ApsSegment& s, int top_exp)
            : emin_bits(aps_decode_emin_bits(ApsFloatCodec(s).format, top_exp)), man_bits(s.man_bits),
              mag_bits(s.exp_bits + s.man_bits), width(mag_bits + 1) {}
        __device__ __forceinline__ float value(uint32_t code) const {
            return aps_decode_float(code, emin_bits, man_bits, mag_bits);
        }
    };

    // One element at a time.
    static __device__ __forceinline__ uint32_t wide_code(const ApsSegment& s, uint64_t bits, int dtype, int exponent,
                                                         int mode, uint64_t seed, int64_t index) {
        if (exponent == APS_EXP_ZERO || exponent == APS_EXP_NONFINITE) return 0u;
        const ApsFormat f = ApsFloatCodec(s).format;
        const uint32_t rnd = mode == APS_STOCHASTIC ? aps_random31(aps_key(seed, s.uid), (uint64_t)index) : 0u;
        return aps_encode(bits, dtype, f.emax - exponent, f, APS_OVERFLOW_WIRE, mode, rnd);
    }
    static __device__ __forceinline__ double wide_sum(const ApsSegment& s, int64_t i, const uint64_t* inputs, int n_in,
                                                      const ApsDecodePlan& plan) {
        const ApsFormat& f = plan.format;
        const bool plain = plan.accumulate == APS_SUM_FLOAT;
        const double scale = aps_pow2(APS_ACC_EXP - f.emax);
        double acc = 0.0, lost = 0.0;
        for (int j = 0; j < n_in; ++j) {
            const uint32_t code = aps_get((const uint8_t*)inputs[j] + s.offset, i, f.width);
            if (plain && !plan.wide) {
                const float v = aps_decode_float(code, plan.emin_bits, f.man_bits, f.exp_bits + f.man_bits);
                acc = j ? (double)((float)acc + v) : (double)v;
            } else {
                double v = aps_decode_double(code, f);
                if (plain) v *= scale;
                if (j == 0) acc = v;
                else if (plain) acc += v;
                else aps_add(&acc, &lost, v, f, plan.accumulate);
            }
        }
        return plain ? acc : acc * scale;
    }
    static __device__ __forceinline__ uint64_t wide_decode(const ApsSegment& s, int64_t i, const uint64_t* inputs,
                                                           int n_in, int accumulate) {
        if (aps_is_constant(s))
            return aps_special(0, s.exponent == APS_EXP_ZERO ? APS_KIND_ZERO : APS_KIND_NAN, s.dtype);
        const ApsDecodePlan plan =
            aps_decode_plan(ApsFloatCodec(s).format, s.exponent, s.factor, s.dtype, n_in, accumulate);
        return aps_finish_plan(wide_sum(s, i, inputs, n_in, plan), plan);
    }
    static __device__ __forceinline__ ApsDecodePlan reduce_plan(const ApsSegment& s, int n_in, int accumulate) {
        return aps_decode_plan(ApsFloatCodec(s).format, APS_EXP_ZERO, 1.0f, APS_F32, n_in, accumulate);
    }
    static __device__ __forceinline__ uint32_t wide_reduce(const ApsSegment& s, int64_t i, const uint64_t* inputs,
                                                           int n_in, int accumulate, int acc_exp, int mode,
                                                           uint64_t seed) {
        if (acc_exp == APS_EXP_ZERO || acc_exp == APS_EXP_NONFINITE) return 0u;
        const ApsDecodePlan plan = reduce_plan(s, n_in, accumulate);
        const double acc = wide_sum(s, i, inputs, n_in, plan);
        if (!plan.wide && accumulate == APS_SUM_FLOAT)
            return wide_code(s, aps_bits((float)acc), APS_F32, acc_exp, mode, seed, s.first + i);
        return wide_code(s, aps_bits64(acc), APS_F64, acc_exp, mode, seed, s.first + i);
    }
};

// ---------------------------------------------------------------------------------------------- raw float32
struct RawTile : ApsRawCodec {
    using ApsRawCodec::ApsRawCodec;
    enum { is_scanned = 0 };

    struct Encoder {
        enum { is_zero = 0, width = 32 };
        __device__ __forceinline__ Encoder(const ApsSegment&, int, int, uint64_t) {}
        __device__ __forceinline__ uint32_t code(uint32_t bits, int64_t) const { return bits; }
    };
    struct Summer {
        enum { width = 32 };
        __device__ __forceinline__ Summer(const ApsSegment&, int) {}
        __device__ __forceinline__ float value(uint32_t code) const { return aps_float(code); }
    };
    static __device__ __forceinline__ uint32_t wide_code(const ApsSegment&, uint64_t bits, int dtype, int, int,
                                                         uint64_t, int64_t) {
        return ApsRawCodec::code(bits, dtype);
    }
    static __device__ __forceinline__ float sum(const ApsSegment& s, int64_t i, const uint64_t* inputs, int n_in) {
        float acc = 0.0f;
        for (int j = 0; j < n_in; ++j) {
            const float v = aps_float(aps_get((const uint8_t*)inputs[j] + s.offset, i, 32));
            acc = j ? acc + v : v;
        }
        return acc;
    }
    static __device__ __forceinline__ uint64_t wide_decode(const ApsSegment& s, int64_t i, const uint64_t* inputs,
                                                           int n_in, int) {
        const float acc = sum(s, i, inputs, n_in);
        if (s.dtype == APS_F64)
            return aps_bits64(aps_to_double(aps_bits(acc), APS_F32) * aps_to_double(aps_bits(s.factor), APS_F32));
        return aps_convert(aps_bits(acc * s.factor), APS_F32, s.dtype);
    }
    static __device__ __forceinline__ uint32_t wide_reduce(const ApsSegment& s, int64_t i, const uint64_t* inputs,
                                                           int n_in, int, int, int, uint64_t) {
        return aps_bits(sum(s, i, inputs, n_in));
    }
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

// Sums of 8 elements, input after input as in the CPU library.
template <class Summer>
static __device__ __forceinline__ void sum_group(const Summer& summer, const ApsSegment& s, int64_t i, int64_t count,
                                                 const uint64_t* inputs, int n_in, float* acc) {
    uint32_t codes[APS_GROUP];
    load_codes((const uint8_t*)inputs[0] + s.offset, i, count, summer.width, codes);
    APS_UNROLL acc[k] = summer.value(codes[k]);
    for (int j = 1; j < n_in; ++j) {
        load_codes((const uint8_t*)inputs[j] + s.offset, i, count, summer.width, codes);
        APS_UNROLL acc[k] = acc[k] + summer.value(codes[k]);
    }
}

template <class Tile>
static __device__ __forceinline__ void encode_tile(const ApsSegment& s, int64_t begin, uint8_t* message, int mode,
                                                   uint64_t seed) {
    const typename Tile::Encoder encoder(s, s.exponent, mode, seed);
    uint32_t bits[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        load_floats(s, i, count, bits);
        APS_UNROLL bits[k] = encoder.code(bits[k], s.first + i + k);
        store_codes(message + s.offset, i, count, encoder.width, bits);
    }
}

template <class Tile>
static __device__ __forceinline__ void decode_tile(const ApsSegment& s, int64_t begin, const uint64_t* inputs,
                                                   int n_in) {
    const typename Tile::Summer summer(s, s.exponent);
    const bool is_constant = Tile::is_scanned && aps_is_constant(s);
    float acc[APS_GROUP];
    uint32_t bits[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        if (is_constant) {
            APS_UNROLL bits[k] = s.exponent == APS_EXP_ZERO ? 0u : 0x7fc00000u;
        } else {
            sum_group(summer, s, i, count, inputs, n_in, acc);
            APS_UNROLL bits[k] = aps_bits(acc[k] * s.factor);
        }
        store_floats(s, i, count, bits);
    }
}

template <class Tile>
static __device__ __forceinline__ void reduce_tile(const ApsSegment& s, int64_t begin, const uint64_t* inputs, int n_in,
                                                   int acc_exp, uint8_t* message, int mode, uint64_t seed) {
    const typename Tile::Summer summer(s, APS_ACC_EXP);
    const typename Tile::Encoder encoder(s, acc_exp, mode, seed);
    float acc[APS_GROUP];
    uint32_t codes[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        sum_group(summer, s, i, count, inputs, n_in, acc);
        APS_UNROLL codes[k] = encoder.code(aps_bits(acc[k]), s.first + i + k);
        store_codes(message + s.offset, i, count, encoder.width, codes);
    }
}

template <class Tile>
static __device__ __forceinline__ void residual_tile(const ApsSegment& s, int64_t begin, const uint8_t* message) {
    const typename Tile::Summer summer(s, s.exponent);
    const bool is_scanned = Tile::is_scanned;
    uint32_t bits[APS_GROUP], codes[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        load_group(s, i, count, bits);
        load_codes(message + s.offset, i, count, summer.width, codes);
        if (is_scanned && aps_is_constant(s)) {
            APS_UNROLL bits[k] = s.exponent == APS_EXP_ZERO ? bits[k] : 0u;
        } else {
            APS_UNROLL bits[k] = aps_quiet(aps_bits(aps_float(bits[k]) - summer.value(codes[k])));
        }
        store_floats(s, i, count, bits);
    }
}

// ---------------------------------------------------------------------------------------------- kernels
extern "C" {

#define APS_TABLE const ApsSegment *segs, const int32_t *exponents, const ApsTile *tiles, int64_t n_tiles
#define APS_SEGMENT(t)                        \
    ApsSegment s = segs[tiles[t].segment];    \
    s.exponent = exponents[tiles[t].segment]; \
    const int64_t begin = tiles[t].begin;
// One element after the other, in groups of a thread.
#define APS_FOR_ELEMENTS(i, first, count) for (int64_t i = (first); i < (first) + (count); ++i)

// Largest |x| of every segment, as bits of its dtype; top starts at 0. NaN and Inf have the largest bits.
__global__ void scan_kernel(APS_TABLE, ull* top) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        const uint32_t mask = s.dtype == APS_F32 ? 0x7fffffffu : 0x7fffu;
        uint32_t best = 0, bits[APS_GROUP];
        APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
            load_group(s, i, count, bits);
            APS_UNROLL best = (bits[k] & mask) > best ? bits[k] & mask : best;
        }
        raise_to(&top[tiles[t].segment], warp_max(best));
    }
}
__global__ void scan_wide_kernel(APS_TABLE, ull* top) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        const int sign_bit = 8 * aps_dtype_size(s.dtype) - 1;
        ull best = 0;
        APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
            APS_FOR_ELEMENTS(i, first, count) {
                const ull bits = aps_load((const void*)s.data, s.dtype, i) & ((1ull << sign_bit) - 1ull);
                best = bits > best ? bits : best;
            }
        }
        raise_to(&top[tiles[t].segment], warp_max(best));
    }
}

__global__ void encode_kernel(APS_TABLE, uint8_t* message, int mode, uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, encode_tile<Tile>(s, begin, message, aps_mode(s, mode), seed))
    }
}
__global__ void encode_wide_kernel(APS_TABLE, uint8_t* message, int mode, uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, {
            const int width = Tile(s).width, how = aps_mode(s, mode);
            APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
                Writer writer(message + s.offset + (first >> 3) * width);
                APS_FOR_ELEMENTS(i, first, count) {
                    const uint64_t bits = aps_load((const void*)s.data, s.dtype, i);
                    writer.put(Tile::wide_code(s, bits, s.dtype, s.exponent, how, seed, s.first + i), width);
                }
                writer.end();
            }
        })
    }
}

__global__ void decode_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, decode_tile<Tile>(s, begin, inputs, n_in))
    }
}
__global__ void decode_wide_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int accumulate) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(
            s, APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) APS_FOR_ELEMENTS(i, first, count) {
                aps_store((void*)s.data, s.dtype, i, Tile::wide_decode(s, i, inputs, n_in, accumulate));
            })
    }
}

// First half of reduce: largest |sum| of every segment in the accumulation domain, as bits of a double. Raw segments and
// those without a usual exponent are left out by the launcher.
__global__ void reduce_scan_kernel(APS_TABLE, const uint64_t* inputs, int n_in, ull* top) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        const FloatTile::Summer summer(s, APS_ACC_EXP);
        float acc[APS_GROUP];
        uint32_t best = 0;
        APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
            sum_group(summer, s, i, count, inputs, n_in, acc);
            APS_UNROLL {
                const uint32_t bits = aps_bits(acc[k]) & 0x7fffffffu;
                best = k < count && bits > best ? bits : best;
            }
        }
        best = warp_max(best);
        raise_to(&top[tiles[t].segment], best ? aps_convert(best, APS_F32, APS_F64) : 0);
    }
}
__global__ void reduce_scan_wide_kernel(APS_TABLE, const uint64_t* inputs, int n_in, ull* top) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        const ApsDecodePlan plan = FloatTile::reduce_plan(s, n_in, APS_SUM_FLOAT);
        ull best = 0;
        APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
            APS_FOR_ELEMENTS(i, first, count) {
                const double acc = FloatTile::wide_sum(s, i, inputs, n_in, plan);
                const ull bits = aps_bits64(acc) & 0x7fffffffffffffffull;
                best = bits > best ? bits : best;
            }
        }
        raise_to(&top[tiles[t].segment], warp_max(best));
    }
}

// Second half: encode the sums; `exponents` are theirs in the accumulation domain (APS_EXP_ZERO writes zeros).
__global__ void reduce_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int, uint8_t* message, int mode,
                              uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, reduce_tile<Tile>(s, begin, inputs, n_in, s.exponent, message, aps_mode(s, mode), seed))
    }
}
__global__ void reduce_wide_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int accumulate, uint8_t* message,
                                   int mode, uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, {
            const int width = Tile(s).width, how = aps_mode(s, mode);
            APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
                Writer writer(message + s.offset + (first >> 3) * width);
                APS_FOR_ELEMENTS(i, first, count) {
                    writer.put(Tile::wide_reduce(s, i, inputs, n_in, accumulate, s.exponent, how, seed), width);
                }
                writer.end();
            }
        })
    }
}

__global__ void residual_kernel(APS_TABLE, const uint8_t* message) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, residual_tile<Tile>(s, begin, message))
    }
}
__global__ void residual_wide_kernel(APS_TABLE, const uint8_t* message) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_FAMILY(s, {
            const Tile tile(s);
            APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
                APS_FOR_ELEMENTS(i, first, count) {
                    const uint64_t bits = aps_load((const void*)s.data, s.dtype, i);
                    const uint32_t code = aps_get(message + s.offset, i, tile.width);
                    aps_store((void*)s.data, s.dtype, i, tile.residual(bits, code, s.dtype));
                }
            }
        })
    }
}

// targets: the float32 array of each segment, which its data are added to.
__global__ void add_kernel(APS_TABLE, const uint64_t* targets) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        ApsSegment kept = s;
        kept.data = targets[tiles[t].segment], kept.dtype = APS_F32;
        uint32_t bits[APS_GROUP], sums[APS_GROUP];
        APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
            load_floats(s, i, count, bits);
            load_group(kept, i, count, sums);
            APS_UNROLL sums[k] = aps_quiet(aps_bits(aps_float(sums[k]) + aps_float(bits[k])));
            store_floats(kept, i, count, sums);
        }
    }
}
__global__ void add_wide_kernel(APS_TABLE, const uint64_t* targets) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        float* kept = (float*)targets[tiles[t].segment];
        APS_FOR_GROUPS(first, count, begin, tile_end(s, begin)) {
            APS_FOR_ELEMENTS(i, first, count) {
                kept[i] = aps_add_error(kept[i], aps_load((const void*)s.data, s.dtype, i), s.dtype);
            }
        }
    }
}

// One thread per chunk, in order, so that the sums have the bits of the CPU library's; out has 4 doubles per chunk.
__global__ void measure_kernel(const ApsSegment* segs, const int32_t* exponents, const ApsTile* tiles, int64_t n_chunks,
                               const uint8_t* message, double* out) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; c < n_chunks; c += step) {
        APS_SEGMENT(c)
        if (aps_has_buckets(s)) continue;
        const int64_t end = begin + APS_MEASURE_CHUNK < s.n ? begin + APS_MEASURE_CHUNK : s.n;
        APS_BY_FAMILY(s, aps_measure_chunk(s, Tile(s), message + s.offset, begin, end, out + 4 * c))
    }
}

}  // extern "C"

#include "aps_kernels_buckets.h"
