// Error-bounded compression of activations, one block of 64 values at a time; shared by aps_activations.cpp (CPU) and
// aps_activations.cu (CUDA).
//
// Flow: a value becomes its bin of width 2·eb (code 0 is zero alone, code c > 0 is (2(c-1)·eb, 2c·eb], negative values
// mirror it), the middle of the bin is what decoding gives. So zero stays zero, signs stay, and what is checked here
// with the very value that decoding will give differs from it by at most eb; a block where one value fails (NaN, Inf,
// codes that do not fit) is stored as it is. A block then takes the cheapest of: codes less their least, differences
// of neighbours, or one bit per value and the codes of those that are not zero. Codes are stored as planes of bits.
//
// A guided stream is decoded beside what else is stored. A mask of bits: where it is off the bound is 2^coarse times as
// large, and a block may take codes that are on and codes that are off apart. In bins that wide errors would follow the
// values, so the bins of every value are shifted by a part of their width that changes from one to the next (dither; the
// bin at zero is cut at zero, so that signs stay). A prediction: code 0 is the predicted
// value itself, where that is near enough, other codes count bins from the one it is in.
//
// Stream: header, one uint32 per chunk with its size, chunks. Chunk: one uint16 per block, then what the blocks hold.
#ifndef APS_ACTIVATIONS_H
#define APS_ACTIVATIONS_H

#include "aps_scalar.h"

enum { ACT_BLOCK = 64, ACT_CHUNK_BLOCKS = 64, ACT_CHUNK = ACT_BLOCK * ACT_CHUNK_BLOCKS };
enum { ACT_MAX_CODE = 16383, ACT_MAX_WIDTH = 15 };
enum { ACT_MANY = 48 };            // with fewer values that are not zero, differences of neighbours do not pay
enum { ACT_MAGIC = 0x31415041u };  // "APA1"
// What a block holds. DENSE: no zero among its values, so codes skip it.
enum {
    ACT_DENSE = 0,        // planes of code - base
    ACT_ZEROS = 1,        // the same with zeros; width 0 and base 0 is a block of zeros
    ACT_DENSE_DELTA = 2,  // int16 first code, planes of code[i] - code[i-1] - base
    ACT_ZEROS_DELTA = 3,
    ACT_SPARSE = 4,         // mask of what is not zero, planes of their codes, all of them positive
    ACT_SPARSE_SIGNED = 5,  // the same with signs, zigzag
    ACT_RAW = 6,            // 64 values as they are
    ACT_SPLIT = 7,          // int16 base, planes of codes - base where the mask is on, then planes where it is off;
                            // or, ACT_WITHIN, one bit where the mask is on, planes of codes that are not zero, zigzag
};
enum { ACT_MASKED = 1, ACT_PREDICTED = 2 };  // flags of guided streams
enum { ACT_MAX_COARSE = 15, ACT_MAX_OFF_WIDTH = 6, ACT_OFF_BASE = 32 };
enum { ACT_WITHIN = 7 };  // as width of codes that are off: all are zero, and most of those that are on

struct ActHeader {  // 32 bytes, little endian
    uint32_t magic;
    uint8_t dtype;
    uint8_t flags;
    uint8_t coarse;
    uint8_t unused;
    int64_t n;
    float bound;  // of the quantiser: at most the eb that was asked for
    uint32_t n_chunks;
    int64_t size;  // of the whole stream
};

// ---------------------------------------------------------------------------------------------- quantiser
struct ActQuantizer {
    float inverse;  // 1 / (2·eb); 0: everything but zeros is stored as it is
    float middle;   // code c becomes (2c - 1)·middle
    float limit;    // what the error may be
    int dtype;
    int strict;  // the error must stay below the limit
};

// float32: eb is taken 2^-8 lower and cut to 12 bits, so that the middles of bins are exact and the rounding of
// x / (2·eb) does no harm; the check is strict, as a float32 difference below a float32 limit proves the true one is
// not above it. float16, bfloat16: eb is the power of two below, so that scaling is exact and the middle of a bin
// either is a value of the dtype or lies half way between two, of which the outer is the only one in the bin; a bias
// of 2^-22 makes nearest-even take that one.
APS_FN float act_bound(double eb, int dtype) {
    if (!(eb >= 7.8886090522101181e-31)) return 0.0f;  // 2^-100
    if (eb > 1.2676506002282294e30) eb = 1.2676506002282294e30;
    double lower = dtype == APS_F32 ? eb * (1.0 - 0.00390625) : eb;
    const uint64_t keep = dtype == APS_F32 ? ~((1ull << 41) - 1ull) : ~((1ull << 52) - 1ull);
    return (float)aps_double(aps_bits64(lower) & keep);
}
APS_FN ActQuantizer act_quantizer(float bound, double eb, int dtype) {
    ActQuantizer q;
    q.dtype = dtype;
    q.strict = dtype == APS_F32;
    q.inverse = bound > 0.0f ? 0.5f / bound : 0.0f;
    q.middle = dtype == APS_F32 ? bound : bound + bound * 2.384185791015625e-07f;
    float limit = eb < 3.0e38 ? (float)eb : 3.0e38f;
    if ((double)limit > eb) limit = aps_float(aps_bits(limit) - 1u);  // the float32 below
    q.limit = bound > 0.0f ? limit : -1.0f;
    return q;
}
APS_FN float act_load(const void* data, int dtype, int64_t i) {
    if (dtype == APS_F32) return ((const float*)data)[i];
    const uint32_t bits = ((const uint16_t*)data)[i];
    if (dtype == APS_BF16) return aps_float(bits << 16);
    return aps_float((uint32_t)aps_convert(bits, APS_F16, APS_F32));
}
// float32 to the dtype, nearest even, as float32 bits to the dtype's bits.
APS_FN uint32_t act_narrow(float x, int dtype) {
    const uint32_t bits = aps_bits(x);
    if (dtype == APS_F32) return bits;
    if (dtype == APS_BF16) return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // x is not NaN
    return (uint32_t)aps_convert(bits, APS_F32, APS_F16);
}
APS_FN float act_widen(uint32_t bits, int dtype) {
    if (dtype == APS_F32) return aps_float(bits);
    if (dtype == APS_BF16) return aps_float(bits << 16);
    return aps_float((uint32_t)aps_convert(bits, APS_F16, APS_F32));
}
// Bits of the value that a code stands for.
APS_FN uint32_t act_value(int code, const ActQuantizer& q) {
    const int c = code < 0 ? -code : code;
    if (!c) return 0;
    const uint32_t bits = act_narrow((float)(2 * c - 1) * q.middle, q.dtype);
    return bits | (code < 0 ? q.dtype == APS_F32 ? 0x80000000u : 0x8000u : 0u);
}
APS_FN int act_is_near(float x, float y, const ActQuantizer& q) {
    float error = x - y;
    error = error < 0.0f ? -error : error;
    return q.strict ? error < q.limit : error <= q.limit;
}
// The code of a value, and whether what it stands for is near enough.
APS_FN int act_code(float x, const ActQuantizer& q, int* good) {
    const float a = aps_float(aps_bits(x) & 0x7fffffffu);
    float t = a * q.inverse;
    t = t < (float)ACT_MAX_CODE ? t : (float)ACT_MAX_CODE;  // NaN too
    int c = (int)t;
    c += t > (float)c;
    if (c == 0 && !(x == 0.0f)) c = 1;
    const float y = act_widen(act_value(c, q), q.dtype);
    if (!act_is_near(a, y, q) && !(x == 0.0f)) *good = 0;
    return x < 0.0f ? -c : c;
}

// ---------------------------------------------------------------------------------------------- layout of a block
struct ActPlan {
    int mode, width, base, n_kept, size;  // size: bytes after the block's uint16
    int off_width, off_base;              // of ACT_SPLIT
};
APS_FN int act_bits(uint32_t range) { return range ? 64 - aps_clz((uint64_t)range) : 0; }
// Bases are stored in units that grow with the width, so that 9 bits reach.
APS_FN int act_unit(int width) { return width > 4 ? width - 4 : 0; }
APS_FN int act_floor_shift(int value, int shift) { return value >> shift; }  // arithmetic, on all compilers here
// Least width and base for codes in low..high; width 16 if there is none.
APS_FN int act_fit(int low, int high, int* base) {
    for (int width = act_bits((uint32_t)(high - low)); width <= ACT_MAX_WIDTH; ++width) {
        int b = act_floor_shift(low, act_unit(width));
        if (b < -256) continue;
        b = b > 255 ? 255 : b;
        const int from = b * (1 << act_unit(width));
        if (high - from < (1 << width)) {
            *base = b;
            return width;
        }
    }
    *base = 0;
    return ACT_MAX_WIDTH + 1;
}
// code with zero left out
APS_FN int act_skip(int code) { return code > 0 ? code - 1 : code; }
APS_FN int act_unskip(int code) { return code >= 0 ? code + 1 : code; }

// From what is known of the codes: their range, how many are not zero, and the range of differences (delta_low >
// delta_high: not measured), in the same numbering (act_skip where nothing is zero) that the block would be stored in.
APS_FN ActPlan act_plan(int low, int high, int n_kept, int delta_low, int delta_high, int good, int raw_size) {
    ActPlan p;
    p.mode = ACT_RAW;
    p.width = 0;
    p.base = 0;
    p.n_kept = n_kept;
    p.size = raw_size;
    p.off_width = p.off_base = 0;
    if (!good) return p;
    const int zeros = n_kept < ACT_BLOCK;
    int base;
    int width = zeros ? act_fit(low, high, &base) : act_fit(act_skip(low), act_skip(high), &base);
    if (width <= ACT_MAX_WIDTH && 8 * width < p.size) {
        p.mode = zeros ? ACT_ZEROS : ACT_DENSE;
        p.width = width;
        p.base = base;
        p.size = 8 * width;
    }
    if (delta_low <= delta_high) {
        width = act_fit(delta_low, delta_high, &base);
        if (width <= ACT_MAX_WIDTH && 8 * width + 2 < p.size) {
            p.mode = zeros ? ACT_ZEROS_DELTA : ACT_DENSE_DELTA;
            p.width = width;
            p.base = base;
            p.size = 8 * width + 2;
        }
    }
    if (zeros && n_kept) {
        uint32_t top = (uint32_t)(high > 0 ? high - 1 : 0);
        if (low < 0) {
            top = 2 * top > (uint32_t)(-2 * low - 1) ? 2 * top : (uint32_t)(-2 * low - 1);
        }
        width = act_bits(top);
        const int size = 8 + (width * n_kept + 7) / 8;
        if (width <= ACT_MAX_WIDTH && size < p.size) {
            p.mode = low < 0 ? ACT_SPARSE_SIGNED : ACT_SPARSE;
            p.width = width;
            p.base = n_kept - 1;  // travels in the field of the base
            p.size = size;
        }
    }
    return p;
}
// ACT_SPLIT, if it is smaller than the plan p: ranges of the codes where the mask is on and off, 0..0 if there are none;
// n_kept of all codes are not zero.
APS_FN void act_plan_split(int low, int high, int off_low, int off_high, int n_on, int n_kept, ActPlan* p) {
    if (n_kept && !off_low && !off_high) {
        uint32_t top = (uint32_t)(high > 0 ? 2 * (high - 1) : 0);
        if (low < 0 && (uint32_t)(-2 * low - 1) > top) top = (uint32_t)(-2 * low - 1);
        const int width = act_bits(top), size = (n_on + width * n_kept + 7) / 8;
        if (width <= ACT_MAX_WIDTH && size < p->size) {
            p->mode = ACT_SPLIT;
            p->width = width;
            p->base = 0;
            p->n_kept = n_on;
            p->size = size;
            p->off_width = ACT_WITHIN;
            p->off_base = n_kept - 1;  // travels in the field of the base
        }
    }
    const int width = act_bits((uint32_t)(high - low));
    const int base = off_low < ACT_OFF_BASE ? off_low : ACT_OFF_BASE - 1;
    const int off_width = act_bits((uint32_t)(off_high - base));
    if (width > ACT_MAX_WIDTH || off_width > ACT_MAX_OFF_WIDTH || base < -ACT_OFF_BASE) return;
    const int size = 2 + (width * n_on + off_width * (ACT_BLOCK - n_on) + 7) / 8;
    if (size >= p->size) return;
    p->mode = ACT_SPLIT;
    p->width = width;
    p->base = low;
    p->n_kept = n_on;
    p->size = size;
    p->off_width = off_width;
    p->off_base = base;
}
APS_FN uint32_t act_pack_plan(const ActPlan& p) {
    if (p.mode == ACT_SPLIT) {
        return (uint32_t)p.mode | (uint32_t)p.width << 3 | (uint32_t)p.off_width << 7 |
               ((uint32_t)p.off_base & 63u) << 10;
    }
    return (uint32_t)p.mode | (uint32_t)p.width << 3 | ((uint32_t)p.base & 511u) << 7;
}
// Reads any bits; ACT_SPLIT (see act_unpack_split) and sparse counts over 64 give size -1.
APS_FN ActPlan act_unpack_plan(uint32_t bits, int dtype) {
    ActPlan p;
    p.mode = (int)(bits & 7u);
    p.width = (int)(bits >> 3 & 15u);
    const int field = (int)(bits >> 7 & 511u);
    p.base = field >= 256 ? field - 512 : field;
    p.n_kept = ACT_BLOCK;
    p.off_width = p.off_base = 0;
    p.size = 8 * p.width;
    if (p.mode == ACT_DENSE_DELTA || p.mode == ACT_ZEROS_DELTA) p.size += 2;
    if (p.mode == ACT_SPARSE || p.mode == ACT_SPARSE_SIGNED) {
        p.n_kept = field + 1;
        p.size = field < ACT_BLOCK ? 8 + (p.width * p.n_kept + 7) / 8 : -1;
    }
    if (p.mode == ACT_RAW) p.size = ACT_BLOCK * aps_dtype_size(dtype);
    if (p.mode > ACT_RAW) p.size = -1;
    return p;
}
// The same for a block of a masked stream.
APS_FN ActPlan act_unpack_split(uint32_t bits, int dtype, int n_on) {
    ActPlan p = act_unpack_plan(bits, dtype);
    if (p.mode != ACT_SPLIT) return p;
    p.n_kept = n_on;
    p.off_width = (int)(bits >> 7 & 7u);
    p.off_base = (int)(bits >> 10 & 63u);
    if (p.off_width == ACT_WITHIN) {
        p.size = (n_on + p.width * (p.off_base + 1) + 7) / 8;
        return p;
    }
    if (p.off_base >= ACT_OFF_BASE) p.off_base -= 2 * ACT_OFF_BASE;
    p.base = 0;  // comes with the codes
    p.size = 2 + (p.width * n_on + p.off_width * (ACT_BLOCK - n_on) + 7) / 8;
    return p;
}

// ---------------------------------------------------------------------------------------------- bytes
APS_FN void act_put64(uint8_t* p, uint64_t word, int n_bytes) {
    for (int k = 0; k < n_bytes; ++k) p[k] = (uint8_t)(word >> (8 * k));
}
APS_FN uint64_t act_get64(const uint8_t* p, int n_bytes) {
    uint64_t word = 0;
    for (int k = 0; k < n_bytes; ++k) word |= (uint64_t)p[k] << (8 * k);
    return word;
}

// ---------------------------------------------------------------------------------------------- one block, in scalars
// Codes of the block that begins at element `begin` of n; behind the end they are zero. Returns whether all are good.
APS_FN int act_codes(const void* data, int64_t begin, int64_t n, const ActQuantizer& q, int* codes) {
    int good = 1;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        codes[i] = begin + i < n ? act_code(act_load(data, q.dtype, begin + i), q, &good) : 0;
    }
    return good;
}
APS_FN ActPlan act_plan_codes(const int* codes, int good, int dtype) {
    int low = codes[0], high = codes[0], n_kept = 0;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        low = codes[i] < low ? codes[i] : low;
        high = codes[i] > high ? codes[i] : high;
        n_kept += codes[i] != 0;
    }
    int delta_low = 2 * ACT_MAX_CODE, delta_high = -2 * ACT_MAX_CODE;
    for (int i = 1; i < ACT_BLOCK && n_kept >= ACT_MANY; ++i) {
        const int d = n_kept < ACT_BLOCK ? codes[i] - codes[i - 1] : act_skip(codes[i]) - act_skip(codes[i - 1]);
        delta_low = d < delta_low ? d : delta_low;
        delta_high = d > delta_high ? d : delta_high;
    }
    return act_plan(low, high, n_kept, delta_low, delta_high, good, ACT_BLOCK * aps_dtype_size(dtype));
}
APS_FN void act_write(const void* data, int64_t begin, int64_t n, const int* codes, const ActPlan& p, int dtype,
                      uint8_t* out) {
    if (p.mode == ACT_RAW) {
        const int size = aps_dtype_size(dtype);
        for (int i = 0; i < ACT_BLOCK; ++i) {
            act_put64(out + i * size, begin + i < n ? aps_load(data, dtype, begin + i) : 0, size);
        }
        return;
    }
    const int delta = p.mode == ACT_DENSE_DELTA || p.mode == ACT_ZEROS_DELTA;
    const int dense = p.mode == ACT_DENSE || p.mode == ACT_DENSE_DELTA;
    if (p.mode == ACT_SPARSE || p.mode == ACT_SPARSE_SIGNED) {
        uint64_t mask = 0;
        for (int i = 0; i < ACT_BLOCK; ++i) mask |= (uint64_t)(codes[i] != 0) << i;
        act_put64(out, mask, 8);
        out += 8;
        const int n_bytes = p.size - 8;
        for (int k = 0; k < n_bytes; ++k) out[k] = 0;
        int bit = 0;
        for (int plane = 0; plane < p.width; ++plane) {
            for (int i = 0; i < ACT_BLOCK; ++i) {
                if (!codes[i]) continue;
                const int k = act_skip(codes[i]);
                const uint32_t u = p.mode == ACT_SPARSE ? (uint32_t)k : (uint32_t)(k >= 0 ? 2 * k : -2 * k - 1);
                out[bit >> 3] |= (uint8_t)((u >> plane & 1u) << (bit & 7));
                ++bit;
            }
        }
        return;
    }
    const int base = p.base * (1 << act_unit(p.width));
    const int first = dense ? act_skip(codes[0]) : codes[0];
    if (delta) {
        act_put64(out, (uint64_t)(uint16_t)first, 2);
        out += 2;
    }
    // The first difference, which decoding does not look at, repeats the second.
    const int before = 2 * first - (dense ? act_skip(codes[1]) : codes[1]);
    for (int plane = 0; plane < p.width; ++plane) {
        uint64_t word = 0;
        int last = before;
        for (int i = 0; i < ACT_BLOCK; ++i) {
            const int code = dense ? act_skip(codes[i]) : codes[i];
            const uint32_t u = (uint32_t)((delta ? code - last : code) - base);
            last = code;
            word |= (uint64_t)(u >> plane & 1u) << i;
        }
        act_put64(out + 8 * plane, word, 8);
    }
}
// Sixteen bits, as in vectors: only what is malformed leaves them.
APS_FN int act_wrap(int code) { return (short)(uint16_t)(uint32_t)code; }
// Codes of a block that was not stored raw, from any p.size bytes; returns whether a mask has the promised count.
APS_FN int act_read(const uint8_t* in, const ActPlan& p, int* codes) {
    const int delta = p.mode == ACT_DENSE_DELTA || p.mode == ACT_ZEROS_DELTA;
    const int dense = p.mode == ACT_DENSE || p.mode == ACT_DENSE_DELTA;
    if (p.mode == ACT_SPARSE || p.mode == ACT_SPARSE_SIGNED) {
        const uint64_t mask = act_get64(in, 8);
        in += 8;
        int count = 0;
        for (int i = 0; i < ACT_BLOCK; ++i) {
            codes[i] = 0;
            if (!(mask >> i & 1u)) continue;
            uint32_t u = 0;
            if (count < p.n_kept) {
                for (int plane = 0; plane < p.width; ++plane) {
                    const int bit = plane * p.n_kept + count;
                    u |= (uint32_t)(in[bit >> 3] >> (bit & 7) & 1u) << plane;
                }
            }
            const int k = p.mode == ACT_SPARSE ? (int)u : u & 1u ? -(int)(u >> 1) - 1 : (int)(u >> 1);
            codes[i] = act_wrap(act_unskip(k));
            ++count;
        }
        return count == p.n_kept;
    }
    const int base = p.base * (1 << act_unit(p.width));
    int last = 0;
    if (delta) {
        last = (short)act_get64(in, 2);
        in += 2;
    }
    for (int i = 0; i < ACT_BLOCK; ++i) {
        uint32_t u = 0;
        for (int plane = 0; plane < p.width; ++plane) {
            u |= (uint32_t)(in[8 * plane + (i >> 3)] >> (i & 7) & 1u) << plane;
        }
        int code = (int)u + base;
        if (delta) code = i ? code + last : last;
        last = act_wrap(code);
        codes[i] = dense ? act_wrap(act_unskip(last)) : last;
    }
    return 1;
}
APS_FN void act_restore(const uint8_t* in, const ActPlan& p, const int* codes, const ActQuantizer& q, void* out,
                        int64_t begin, int64_t n) {
    const int size = aps_dtype_size(q.dtype);
    for (int i = 0; i < ACT_BLOCK && begin + i < n; ++i) {
        aps_store(out, q.dtype, begin + i, p.mode == ACT_RAW ? act_get64(in + i * size, size) : act_value(codes[i], q));
    }
}

// ---------------------------------------------------------------------------------------------- guided blocks
struct ActGuide {
    ActQuantizer on, off;
    int predicts, dithers;
};
APS_FN ActGuide act_guide(float bound, double eb, int dtype, int coarse, int predicts) {
    ActGuide g;
    const float times = (float)(1 << coarse);
    g.on = act_quantizer(bound, eb, dtype);
    g.off = act_quantizer(bound * times, eb * (double)times, dtype);
    g.predicts = predicts;
    g.dithers = coarse > 0;
    if (g.dithers && bound > 0.0f) {  // room for the rounding of values
        g.off.middle = bound * times * 0.9375f;
        g.off.inverse = 0.5f / g.off.middle;
    }
    return g;
}
// Where the second bin of value i begins; the first is below.
APS_FN float act_shift(int64_t i, const ActQuantizer& q) {
    return ((float)((uint32_t)i * 2654435769u >> 24) + 0.5f) * (q.middle * 0.0078125f);
}
APS_FN uint32_t act_dithered_value(int code, float shift, const ActQuantizer& q) {
    const int c = code < 0 ? -code : code;
    if (!c) return 0;
    const float y = c == 1 ? 0.5f * shift : (float)(2 * c - 3) * q.middle + shift;
    return act_narrow(y, q.dtype) | (code < 0 ? q.dtype == APS_F32 ? 0x80000000u : 0x8000u : 0u);
}
APS_FN int act_dithered_code(float x, float shift, const ActQuantizer& q, int* good) {
    if (x == 0.0f) return 0;
    const float a = aps_float(aps_bits(x) & 0x7fffffffu);
    float t = (a - shift) * q.inverse;
    t = t < (float)(ACT_MAX_CODE - 1) ? t : (float)(ACT_MAX_CODE - 1);  // NaN too
    t = t > 0.0f ? t : 0.0f;
    int c = (int)t;
    c += t > (float)c;
    ++c;
    const float y = act_widen(act_dithered_value(c, shift, q), q.dtype);
    if (!act_is_near(a, y, q)) *good = 0;
    return x < 0.0f ? -c : c;
}
// 64 bits of a mask of n; ones if there is none.
APS_FN uint64_t act_mask_word(const uint8_t* mask, int64_t begin, int64_t n) {
    if (!mask) return ~0ull;
    const int64_t left = (n + 7) / 8 - begin / 8;
    return left < 8 ? act_get64(mask + begin / 8, (int)left) : act_get64(mask + begin / 8, 8);  // eight: one load
}
// p is a value of the dtype that is not NaN; it does not count where the mask is off.
APS_FN int act_guided_code(float x, float p, int on, int64_t i, const ActGuide& g, int* good) {
    const ActQuantizer& q = on ? g.on : g.off;
    if (g.dithers && !on) return act_dithered_code(x, act_shift(i, q), q, good);
    if (!g.predicts) return act_code(x, q, good);
    if (!on) p = 0.0f;
    if (act_is_near(x, p, q) && (x > 0.0f) == (p > 0.0f) && (x < 0.0f) == (p < 0.0f)) return 0;
    int ignored = 1;
    const int code = act_code(x, q, good) - act_code(p, q, &ignored);
    if (code >= ACT_MAX_CODE || code <= -ACT_MAX_CODE) *good = 0;
    return act_unskip(code);
}
APS_FN uint32_t act_guided_value(int code, float p, int on, int64_t i, const ActGuide& g) {
    const ActQuantizer& q = on ? g.on : g.off;
    if (g.dithers && !on) return act_dithered_value(code, act_shift(i, q), q);
    if (!g.predicts) return act_value(code, q);
    if (!on) p = 0.0f;
    if (!code) return act_narrow(p, q.dtype);
    int ignored = 1;
    return act_value(act_wrap(act_code(p, q, &ignored) + act_skip(code)), q);
}
// `predicted` holds the block's 64 values.
APS_FN int act_guided_codes(const void* data, int64_t begin, int64_t n, const ActGuide& g, uint64_t mask,
                            const float* predicted, int* codes) {
    int good = 1;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        const float p = predicted ? act_widen(act_narrow(predicted[i], g.on.dtype), g.on.dtype) : 0.0f;
        const int on = (int)(mask >> i & 1u);
        codes[i] =
            begin + i < n ? act_guided_code(act_load(data, g.on.dtype, begin + i), p, on, begin + i, g, &good) : 0;
    }
    return good;
}
APS_FN void act_split_codes(const int* codes, uint64_t mask, ActPlan* p) {
    int low[2] = {0, 0}, high[2] = {0, 0}, count[2] = {0, 0}, n_kept = 0;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        const int k = (int)(mask >> i & 1u);
        n_kept += codes[i] != 0;
        low[k] = !count[k] || codes[i] < low[k] ? codes[i] : low[k];
        high[k] = !count[k] || codes[i] > high[k] ? codes[i] : high[k];
        ++count[k];
    }
    act_plan_split(low[1], high[1], low[0], high[0], count[1], n_kept, p);
}
APS_FN void act_write_within(const int* codes, uint64_t mask, const ActPlan& p, uint8_t* out) {
    for (int k = 0; k < p.size; ++k) out[k] = 0;
    int bit = 0;
    for (int plane = -1; plane < p.width; ++plane) {
        for (int i = 0; i < ACT_BLOCK; ++i) {
            if (plane < 0 ? !(mask >> i & 1u) : !codes[i]) continue;
            const int k = act_skip(codes[i]);
            const uint32_t u = (uint32_t)(k >= 0 ? 2 * k : -2 * k - 1);
            const uint32_t set = plane < 0 ? codes[i] != 0 : u >> plane & 1u;
            out[bit >> 3] |= (uint8_t)(set << (bit & 7));
            ++bit;
        }
    }
}
APS_FN void act_write_split(const int* codes, uint64_t mask, const ActPlan& p, uint8_t* out) {
    if (p.off_width == ACT_WITHIN) {
        act_write_within(codes, mask, p, out);
        return;
    }
    act_put64(out, (uint64_t)(uint16_t)p.base, 2);
    out += 2;
    for (int k = 0; k < p.size - 2; ++k) out[k] = 0;
    int bit = 0;
    for (int on = 1; on >= 0; --on) {
        for (int plane = 0; plane < (on ? p.width : p.off_width); ++plane) {
            for (int i = 0; i < ACT_BLOCK; ++i) {
                if ((int)(mask >> i & 1u) != on) continue;
                const uint32_t u = (uint32_t)(codes[i] - (on ? p.base : p.off_base));
                out[bit >> 3] |= (uint8_t)((u >> plane & 1u) << (bit & 7));
                ++bit;
            }
        }
    }
}
// Returns whether there are as many codes as promised.
APS_FN int act_read_within(const uint8_t* in, uint64_t mask, const ActPlan& p, int* codes) {
    int bit = 0, count = 0;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        codes[i] = 0;
        if (!(mask >> i & 1u)) continue;
        codes[i] = in[bit >> 3] >> (bit & 7) & 1;
        count += codes[i];
        ++bit;
    }
    if (count != p.off_base + 1) return 0;
    const int first = bit;
    int rank = 0;
    for (int i = 0; i < ACT_BLOCK; ++i) {
        if (!codes[i]) continue;
        uint32_t u = 0;
        for (int plane = 0; plane < p.width; ++plane) {
            bit = first + plane * count + rank;
            u |= (uint32_t)(in[bit >> 3] >> (bit & 7) & 1u) << plane;
        }
        codes[i] = act_wrap(act_unskip(u & 1u ? -(int)(u >> 1) - 1 : (int)(u >> 1)));
        ++rank;
    }
    return 1;
}
APS_FN int act_read_split(const uint8_t* in, uint64_t mask, const ActPlan& p, int* codes) {
    if (p.off_width == ACT_WITHIN) return act_read_within(in, mask, p, codes);
    const int base = (short)act_get64(in, 2);
    in += 2;
    int bit = 0;
    for (int i = 0; i < ACT_BLOCK; ++i) codes[i] = 0;
    for (int on = 1; on >= 0; --on) {
        for (int plane = 0; plane < (on ? p.width : p.off_width); ++plane) {
            for (int i = 0; i < ACT_BLOCK; ++i) {
                if ((int)(mask >> i & 1u) != on) continue;
                codes[i] |= (in[bit >> 3] >> (bit & 7) & 1) << plane;
                ++bit;
            }
        }
    }
    for (int i = 0; i < ACT_BLOCK; ++i) codes[i] = act_wrap(codes[i] + (mask >> i & 1u ? base : p.off_base));
    return 1;
}
// The tensor's values from `origin` on are in out.
APS_FN void act_guided_restore(const int* codes, const ActGuide& g, uint64_t mask, const float* predicted, void* out,
                               int64_t begin, int64_t origin, int64_t n) {
    for (int i = 0; i < ACT_BLOCK && begin + i < n; ++i) {
        const float p = predicted ? act_widen(act_narrow(predicted[i], g.on.dtype), g.on.dtype) : 0.0f;
        const int on = (int)(mask >> i & 1u);
        aps_store(out, g.on.dtype, begin - origin + i, act_guided_value(codes[i], p, on, begin + i, g));
    }
}

#endif
