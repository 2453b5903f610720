// One-element arithmetic of packed floats, shared by the CPU library, the CUDA kernels and the simulator; it knows
// nothing of segments and families of formats, which are in aps_codecs.h.
//
// Flow: the scan reduces |x| to its largest bit pattern, aps_exponent() turns that into the layer's exponent E,
// encode rounds x * 2^(emax - E) to a code, decode turns codes into float32 values in the accumulation domain
// (top near 2^100, so that neither a value nor a sum is ever subnormal), aps_finish() scales back to true units.
// The exact functions work on integers, so they depend neither on flush-to-zero nor on the range of float32.
// The *_fast functions give the same bits under the conditions that the plans check, in a form that vectorises.
#ifndef APS_SCALAR_H
#define APS_SCALAR_H

#ifdef __CUDACC_RTC__  // NVRTC has no system headers
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

#ifdef __CUDACC__
#define APS_METHOD __host__ __device__ __forceinline__
#else
#define APS_METHOD inline __attribute__((always_inline))
#endif
#define APS_FN static APS_METHOD

enum { APS_EXP_ZERO = -32768, APS_EXP_NONFINITE = 32767 };
enum { APS_F32 = 0, APS_F64 = 1, APS_F16 = 2, APS_BF16 = 3 };
enum { APS_NEAREST = 0, APS_STOCHASTIC = 1, APS_UP = 2 };
enum { APS_SUM_FLOAT = 0, APS_SUM_FORMAT = 1, APS_SUM_KAHAN = 2 };
enum { APS_ACC_EXP = 100 };  // binade of the format's top value in the accumulation domain

struct ApsFormat {
    int exp_bits, man_bits, specials, width, emin, emax;
    uint32_t max_code, inf_code;  // magnitudes: largest finite, infinity (only with specials)
};

struct ApsParts {  // |x| = sig / 2^63 * 2^exp with bit 63 of sig set
    uint64_t sig;
    int exp;
    uint32_t sign;
    int kind;
};
enum { APS_KIND_ZERO = 0, APS_KIND_FINITE = 1, APS_KIND_INF = 2, APS_KIND_NAN = 3 };

// ---------------------------------------------------------------------------------------------- bits
APS_FN uint32_t aps_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    return u;
#endif
}
APS_FN float aps_float(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
#endif
}
APS_FN uint64_t aps_bits64(double x) {
#ifdef __CUDA_ARCH__
    return (uint64_t)__double_as_longlong(x);
#else
    uint64_t u;
    __builtin_memcpy(&u, &x, 8);
    return u;
#endif
}
APS_FN double aps_double(uint64_t u) {
#ifdef __CUDA_ARCH__
    return __longlong_as_double((long long)u);
#else
    double x;
    __builtin_memcpy(&x, &u, 8);
    return x;
#endif
}
APS_FN int aps_clz(uint64_t x) {
#ifdef __CUDA_ARCH__
    return __clzll((long long)x);
#else
    return __builtin_clzll(x);
#endif
}
APS_FN double aps_pow2(int p) { return aps_double((uint64_t)(p + 1023) << 52); }  // p in -1022..1023

// ---------------------------------------------------------------------------------------------- formats
APS_FN ApsFormat aps_format(int exp_bits, int man_bits, int specials) {
    ApsFormat f;
    f.exp_bits = exp_bits;
    f.man_bits = man_bits;
    f.specials = specials;
    f.width = 1 + exp_bits + man_bits;
    int bias = (1 << (exp_bits - 1)) - 1;
    int top = (1 << exp_bits) - 1 - specials;
    f.emin = 1 - bias;
    f.emax = (top > 0 ? top : 1) - bias;  // e = 1 with specials: subnormals only
    f.inf_code = (uint32_t)(((1u << exp_bits) - 1u) << man_bits);
    f.max_code = specials ? f.inf_code - 1u : (uint32_t)((1ull << (exp_bits + man_bits)) - 1ull);
    return f;
}
APS_FN int aps_dtype_exp_bits(int dtype) { return dtype == APS_F64 ? 11 : dtype == APS_F16 ? 5 : 8; }
APS_FN int aps_dtype_man_bits(int dtype) {
    return dtype == APS_F32 ? 23 : dtype == APS_F64 ? 52 : dtype == APS_F16 ? 10 : 7;
}
APS_FN int aps_dtype_size(int dtype) { return dtype == APS_F32 ? 4 : dtype == APS_F64 ? 8 : 2; }

APS_FN uint64_t aps_load(const void* data, int dtype, int64_t i) {
    if (dtype == APS_F32) return ((const uint32_t*)data)[i];
    if (dtype == APS_F64) return ((const uint64_t*)data)[i];
    return ((const uint16_t*)data)[i];
}
APS_FN void aps_store(void* data, int dtype, int64_t i, uint64_t bits) {
    if (dtype == APS_F32) ((uint32_t*)data)[i] = (uint32_t)bits;
    else if (dtype == APS_F64) ((uint64_t*)data)[i] = bits;
    else ((uint16_t*)data)[i] = (uint16_t)bits;
}

// Take a number with exp_bits and man_bits apart; specials = 0 reads every code as finite.
APS_FN ApsParts aps_split(uint64_t bits, int exp_bits, int man_bits, int specials) {
    ApsParts p;
    uint64_t man = bits & ((1ull << man_bits) - 1ull);
    int field = (int)((bits >> man_bits) & ((1u << exp_bits) - 1u));
    int emin = 2 - (1 << (exp_bits - 1));
    p.sign = (uint32_t)(bits >> (exp_bits + man_bits)) & 1u;
    p.sig = 0;
    p.exp = 0;
    if (specials && field == (1 << exp_bits) - 1) {
        p.kind = man ? APS_KIND_NAN : APS_KIND_INF;
    } else if (field) {
        p.kind = APS_KIND_FINITE;
        p.sig = (man | (1ull << man_bits)) << (63 - man_bits);
        p.exp = field - 1 + emin;
    } else if (man) {
        int zeros = aps_clz(man);
        p.kind = APS_KIND_FINITE;
        p.sig = man << zeros;
        p.exp = emin - man_bits + 63 - zeros;
    } else {
        p.kind = APS_KIND_ZERO;
    }
    return p;
}
APS_FN ApsParts aps_split_dtype(uint64_t bits, int dtype) {
    return aps_split(bits, aps_dtype_exp_bits(dtype), aps_dtype_man_bits(dtype), 1);
}

// Round sig / 2^63 * 2^exp to man_bits with least normal exponent emin; returns the magnitude code as if exponents
// had no upper end (a carry moves to the next binade by itself). rnd: 31 uniform bits for APS_STOCHASTIC.
APS_FN uint64_t aps_round(uint64_t sig, int exp, int man_bits, int emin, int mode, uint32_t rnd) {
    if (exp > 1100) return ~0ull;  // beyond every format, and the shift below could overflow
    int lift = exp > emin ? exp - emin : 0;
    int drop = 63 - man_bits + (exp < emin ? emin - exp : 0);
    uint64_t k;
    if (mode == APS_STOCHASTIC) {
        int pre = drop - 31;  // man_bits <= 23 here, so drop >= 40
        uint64_t fixed = pre > 63 ? 0 : sig >> pre;
        k = (fixed + rnd) >> 31;
    } else if (drop >= 64) {
        if (mode == APS_UP) k = 1;
        else k = drop == 64 && sig > (1ull << 63);
    } else {
        uint64_t rest = sig << (64 - drop);
        k = sig >> drop;
        if (mode == APS_UP) k += rest != 0;
        else k += rest > (1ull << 63) || (rest == (1ull << 63) && (k & 1));
    }
    return ((uint64_t)lift << man_bits) + k;
}

// A number of the given IEEE dtype nearest to sig / 2^63 * 2^exp; overflow gives Inf.
APS_FN uint64_t aps_join(uint32_t sign, uint64_t sig, int exp, int dtype) {
    int e = aps_dtype_exp_bits(dtype), m = aps_dtype_man_bits(dtype);
    uint64_t inf = ((1ull << e) - 1ull) << m;
    uint64_t mag = aps_round(sig, exp, m, 2 - (1 << (e - 1)), APS_NEAREST, 0);
    return (mag > inf ? inf : mag) | ((uint64_t)sign << (e + m));
}
APS_FN uint64_t aps_special(uint32_t sign, int kind, int dtype) {  // zero, infinity or quiet NaN
    int e = aps_dtype_exp_bits(dtype), m = aps_dtype_man_bits(dtype);
    uint64_t inf = ((1ull << e) - 1ull) << m;
    uint64_t mag = kind == APS_KIND_ZERO ? 0 : kind == APS_KIND_INF ? inf : inf | (1ull << (m - 1));
    return mag | ((uint64_t)sign << (e + m));
}
APS_FN uint64_t aps_convert(uint64_t bits, int from, int to) {
    if (from == to) return bits;
    ApsParts p = aps_split_dtype(bits, from);
    if (p.kind != APS_KIND_FINITE) return aps_special(p.sign, p.kind, to);
    return aps_join(p.sign, p.sig, p.exp, to);
}
// A NaN as aps_convert makes it: quiet, with its sign.
APS_FN uint32_t aps_quiet(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
}
// float16 and bfloat16 to float32 and back, as aps_convert, in 32 bits.
APS_FN uint32_t aps_widen(uint32_t bits, int dtype) {
    uint32_t sign = (bits & 0x8000u) << 16, mag = bits & 0x7fffu, wide;
    if (dtype == APS_BF16) {
        wide = mag > 0x7f80u ? 0x7fc00000u : mag << 16;
    } else if (mag >= 0x7c00u) {
        wide = mag > 0x7c00u ? 0x7fc00000u : 0x7f800000u;
    } else if (mag >= 0x0400u) {
        wide = (mag << 13) + (112u << 23);
    } else {
        wide = aps_bits((float)(int)mag * 5.9604644775390625e-8f);  // 2^-24
    }
    return wide | sign;
}
APS_FN uint32_t aps_narrow(uint32_t bits, int dtype) {
    uint32_t sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu, code;
    if (dtype == APS_BF16) {
        code = mag > 0x7f800000u ? 0x7fc0u : (mag + 0x7fffu + (mag >> 16 & 1u)) >> 16;
    } else if (mag >= 0x47800000u) {
        code = mag > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (mag >= 0x38800000u) {
        code = (mag - (112u << 23) + 0xfffu + (mag >> 13 & 1u)) >> 13;
    } else {  // the last place of 0.5 is that of float16's subnormal numbers
        code = aps_bits(aps_float(mag) + 0.5f) - 0x3f000000u;
    }
    return code | sign;
}
APS_FN double aps_to_double(uint64_t bits, int dtype) { return aps_double(aps_convert(bits, dtype, APS_F64)); }

// ---------------------------------------------------------------------------------------------- random bits
// Counter-based: the bits depend on (seed, uid, index) alone, so on no thread, tile or device.
struct ApsKey {
    uint32_t a, b;
};
APS_FN uint64_t aps_mix64(uint64_t x) {
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 32);
}
APS_FN ApsKey aps_key(uint64_t seed, uint32_t uid) {
    uint64_t x = aps_mix64(aps_mix64(seed + 0x9e3779b97f4a7c15ull) ^ (0x51ed270b00000000ull | uid));
    ApsKey k;
    k.a = (uint32_t)x;
    k.b = (uint32_t)(x >> 32);
    return k;
}
APS_FN uint32_t aps_mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
APS_FN uint32_t aps_random32_low(ApsKey k, uint32_t low) { return aps_mix32(aps_mix32(low ^ k.a) + k.b); }
APS_FN uint32_t aps_random31_low(ApsKey k, uint32_t low) { return aps_random32_low(k, low) >> 1; }
APS_FN ApsKey aps_key_high(ApsKey k, uint32_t high) {  // fold in the upper half of a 64-bit index
    k.b += high ? aps_mix32(high ^ 0x68bc21ebu) : 0u;
    return k;
}
APS_FN uint32_t aps_random31(ApsKey k, uint64_t index) {
    return aps_random31_low(aps_key_high(k, (uint32_t)(index >> 32)), (uint32_t)index);
}
// 16 bits, half the work: of 16 elements the first 8 have the lower halves of 8 numbers, the others the upper halves.
APS_FN uint32_t aps_random16(ApsKey k, uint64_t index) {
    const uint64_t at = index >> 4 << 3 | (index & 7u);
    const uint32_t both = aps_random32_low(aps_key_high(k, (uint32_t)(at >> 32)), (uint32_t)at);
    return index & 8u ? both >> 16 : both & 0xffffu;
}

// ---------------------------------------------------------------------------------------------- scan
// E of a layer from the bits of its largest |x|: the least exponent at which the rounded value (APS_NEAREST) or the
// value itself (APS_UP, for stochastic rounding) does not exceed the format's largest finite number.
APS_FN int aps_exponent(uint64_t abs_bits, int dtype, ApsFormat f, int mode) {
    ApsParts p = aps_split_dtype(abs_bits, dtype);
    if (p.kind == APS_KIND_ZERO) return APS_EXP_ZERO;
    if (p.kind != APS_KIND_FINITE) return APS_EXP_NONFINITE;
    int e = p.exp;
    while (aps_round(p.sig, p.exp + f.emax - e, f.man_bits, f.emin, mode, 0) > f.max_code) ++e;
    return e;
}

// ---------------------------------------------------------------------------------------------- encode
enum { APS_OVERFLOW_IEEE = 0, APS_OVERFLOW_WIRE = 1 };

// Code of x * 2^shift. IEEE: overflow and Inf give Inf if the format has it, else the largest finite number; NaN stays
// NaN if the format has one, else it becomes Inf, or without specials zero of the opposite sign as in ml_dtypes.
// WIRE: everything that is too large saturates, NaN too.
APS_FN uint32_t aps_encode(uint64_t bits, int dtype, int shift, ApsFormat f, int overflow, int mode, uint32_t rnd) {
    ApsParts p = aps_split_dtype(bits, dtype);
    uint32_t high = overflow == APS_OVERFLOW_IEEE && f.specials ? f.inf_code : f.max_code;
    uint32_t mag;
    if (p.kind == APS_KIND_FINITE) {
        uint64_t k = aps_round(p.sig, p.exp + shift, f.man_bits, f.emin, mode, rnd);
        mag = k > f.max_code ? high : (uint32_t)k;
    } else if (p.kind == APS_KIND_ZERO) {
        mag = 0;
    } else if (p.kind == APS_KIND_NAN && overflow != APS_OVERFLOW_WIRE && f.specials) {
        mag = f.inf_code | (f.man_bits ? 1u << (f.man_bits - 1) : 0u);
    } else if (p.kind == APS_KIND_NAN && overflow != APS_OVERFLOW_WIRE) {
        mag = 0;
        p.sign ^= 1u;
    } else {
        mag = high;
    }
    return mag | (p.sign << (f.exp_bits + f.man_bits));
}

struct ApsEncodePlan {
    ApsFormat format;
    int shift;           // emax - E
    int fast;            // aps_encode_fast gives the same bits for float32 input
    float scale, limit;  // 2^shift, the largest finite value
    uint32_t emin_bits;  // exponent field of the least normal value
};
// True when a power of two and every value that can round to nonzero are normal float32 numbers.
APS_FN ApsEncodePlan aps_encode_plan(ApsFormat f, int exponent, int mode) {
    ApsEncodePlan p;
    int spread = f.emax - f.emin + f.man_bits + (mode == APS_NEAREST ? 2 : 33);
    p.format = f;
    p.shift = f.emax - exponent;
    p.fast = f.exp_bits <= 7 && f.man_bits <= 21 && p.shift >= -126 && p.shift <= 127 && exponent - spread >= -126;
    p.scale = p.fast ? aps_float((uint32_t)(p.shift + 127) << 23) : 0.0f;
    p.emin_bits = (uint32_t)(f.emin + 127) << 23;
    ApsParts top = aps_split(f.max_code, f.exp_bits, f.man_bits, 0);
    p.limit = p.fast ? aps_float((uint32_t)aps_join(0, top.sig, top.exp, APS_F32)) : 0.0f;
    return p;
}
// Adding a power of two whose last place is the format's spacing at y rounds y to nearest even; the bits above that
// power of two are then the significand, subnormals included.
APS_FN uint32_t aps_encode_fast(uint32_t bits, float scale, float limit, uint32_t emin_bits, int man_bits,
                                int mag_bits) {
    float y = aps_float(bits & 0x7fffffffu) * scale;
    y = y < limit ? y : limit;
    uint32_t field = aps_bits(y) & 0x7f800000u;
    field = field > emin_bits ? field : emin_bits;
    uint32_t magic = field + ((uint32_t)(23 - man_bits) << 23);
    uint32_t mag = aps_bits(y + aps_float(magic)) - magic + ((field - emin_bits) >> (23 - man_bits));
    return mag | ((bits >> 31) << mag_bits);
}
APS_FN uint32_t aps_encode_fast_stochastic(uint32_t bits, float scale, float limit, uint32_t emin_bits, int man_bits,
                                           int mag_bits, uint32_t rnd) {
    float y = aps_float(bits & 0x7fffffffu) * scale;
    y = y < limit ? y : limit;
    uint32_t u = aps_bits(y);
    uint32_t field = u >> 23, least = emin_bits >> 23;
    uint32_t sig = field ? (u & 0x7fffffu) | 0x800000u : 0u;
    uint32_t drop = (uint32_t)(23 - man_bits) + (field < least ? least - field : 0u);
    uint32_t pre = drop > 31u ? drop - 31u : 0u;
    pre = pre < 31u ? pre : 31u;
    drop = drop < 31u ? drop : 31u;
    uint32_t k = ((sig >> pre) + (rnd >> (31u - drop))) >> drop;
    uint32_t mag = ((field > least ? field - least : 0u) << man_bits) + k;
    return mag | ((bits >> 31) << mag_bits);
}

// ---------------------------------------------------------------------------------------------- decode
// Value of a code times 2^(top_exp - emax) in float32; every nonzero result must be a normal float32.
APS_FN float aps_decode_float(uint32_t code, uint32_t emin_bits, int man_bits, int mag_bits) {
    uint32_t mag = code & ((1u << mag_bits) - 1u);
    uint32_t sign = (code >> mag_bits) << 31;
    uint32_t subnormal = mag < (1u << man_bits) ? 0xffffffffu : 0u;
    uint32_t u = (mag << (23 - man_bits)) + emin_bits - (~subnormal & 0x800000u);
    float v = aps_float(u) - aps_float(subnormal & emin_bits);
    return aps_float(aps_bits(v) | sign);
}
APS_FN uint32_t aps_decode_emin_bits(ApsFormat f, int top_exp) {
    return (uint32_t)(f.emin + top_exp - f.emax + 127) << 23;
}
APS_FN double aps_decode_double(uint32_t code, ApsFormat f) {  // the format's own domain, finite codes only
    uint32_t mag_bits = (uint32_t)(f.exp_bits + f.man_bits);
    uint32_t mag = code & (uint32_t)((1ull << mag_bits) - 1ull);
    uint32_t field = mag >> f.man_bits, man = mag & ((1u << f.man_bits) - 1u);
    double v = field ? (double)(man + (1u << f.man_bits)) * aps_pow2((int)field - 1 + f.emin - f.man_bits)
                     : (double)man * aps_pow2(f.emin - f.man_bits);
    return (code >> mag_bits) & 1u ? -v : v;
}
// Bits in dtype of a decoded code, specials included; exact where dtype can hold it, else nearest.
APS_FN uint64_t aps_decode_bits(uint32_t code, ApsFormat f, int shift, int dtype) {
    ApsParts p = aps_split(code, f.exp_bits, f.man_bits, f.specials);
    if (p.kind != APS_KIND_FINITE) return aps_special(p.sign, p.kind, dtype);
    return aps_join(p.sign, p.sig, p.exp + shift, dtype);
}
APS_FN double aps_quantize_double(double x, ApsFormat f) {  // nearest even, saturating
    return aps_decode_double(aps_encode(aps_bits64(x), APS_F64, 0, f, APS_OVERFLOW_WIRE, APS_NEAREST, 0), f);
}

// One addition of the accumulation modes that re-round (the paper's arithmetic); in double, which holds a sum of two
// format values well enough that rounding twice equals rounding once.
APS_FN void aps_add(double* acc, double* lost, double x, ApsFormat f, int accumulate) {
    if (accumulate == APS_SUM_FORMAT) {
        *acc = aps_quantize_double(*acc + x, f);
    } else {
        double y = aps_quantize_double(x - *lost, f);
        double t = aps_quantize_double(*acc + y, f);
        *lost = aps_quantize_double(aps_quantize_double(t - *acc, f) - y, f);
        *acc = t;
    }
}

// Bits in dtype of acc * factor * 2^shift. The product is rounded to float32 precision (to double if wide), the scaling
// is exact, and a result that dtype cannot hold is rounded once more.
APS_FN uint64_t aps_finish(double acc, double factor, int shift, int wide, int dtype) {
    ApsParts p = aps_split_dtype(aps_bits64(acc * factor), APS_F64);
    if (p.kind != APS_KIND_FINITE) return aps_special(p.sign, p.kind, dtype);
    if (!wide) {
        uint64_t rest = p.sig << 24, half = 1ull << 63;
        uint64_t k = p.sig >> 40;
        k += rest > half || (rest == half && (k & 1));
        if (k >> 24) {
            k >>= 1;
            p.exp += 1;
        }
        p.sig = k << 40;
    }
    return aps_join(p.sign, p.sig, p.exp + shift, dtype);
}

// What sums n_in codes of one segment; built once per segment.
struct ApsDecodePlan {
    ApsFormat format;
    int exponent, wide, accumulate, dtype;
    int fast;            // sums at true scale in float32 give the same bits: top_exp = E instead of APS_ACC_EXP
    uint32_t emin_bits;  // for aps_decode_float
    double factor;
    float factor32;
};
APS_FN ApsDecodePlan aps_decode_plan(ApsFormat f, int exponent, float factor, int dtype, int n_in, int accumulate) {
    ApsDecodePlan p;
    p.format = f;
    p.exponent = exponent;
    p.accumulate = accumulate;
    p.dtype = dtype;
    p.wide = f.exp_bits == 8;
    p.factor32 = factor;
    p.factor = aps_to_double(aps_bits(factor), APS_F32);
    ApsParts s = aps_split_dtype(aps_bits(factor), APS_F32);
    int grow = s.exp > 0 ? s.exp : 0, shrink = s.exp < 0 ? -s.exp : 0, carry = 64 - aps_clz((uint64_t)n_in);
    p.fast = !p.wide && accumulate == APS_SUM_FLOAT && s.kind == APS_KIND_FINITE &&
             exponent - (f.emax - f.emin) - f.man_bits - shrink >= -125 && exponent + grow + carry + 2 <= 126;
    p.emin_bits = p.wide ? 0u : aps_decode_emin_bits(f, p.fast ? exponent : APS_ACC_EXP);
    return p;
}
// acc: true units if plan.fast, else the accumulation domain.
APS_FN uint64_t aps_finish_plan(double acc, const ApsDecodePlan& p) {
    int shift = p.fast ? 0 : p.exponent - APS_ACC_EXP;
    return aps_finish(acc, p.factor, shift, p.wide || p.dtype == APS_F64, p.dtype);
}

// ---------------------------------------------------------------------------------------------- bits in a message
// Code i of a segment that starts at base; reads only the bytes that hold it.
APS_FN uint32_t aps_get(const uint8_t* base, int64_t i, int width) {
    int64_t bit = i * width;
    const uint8_t* p = base + (bit >> 3);
    int low = (int)(bit & 7), n_bytes = (low + width + 7) >> 3;
    uint64_t word = 0;
    for (int k = 0; k < n_bytes; ++k) word |= (uint64_t)p[k] << (8 * k);
    return (uint32_t)((word >> low) & ((1ull << width) - 1ull));
}
// Write count <= 8 codes, the first at a byte boundary; the last byte is filled up with zeros.
APS_FN void aps_put8(uint8_t* p, const uint32_t* codes, int count, int width) {
    uint64_t word = 0;
    int filled = 0;
    for (int k = 0; k < count; ++k) {
        word |= (uint64_t)codes[k] << filled;
        filled += width;
        while (filled >= 8) {
            *p++ = (uint8_t)word;
            word >>= 8;
            filled -= 8;
        }
    }
    if (filled) *p = (uint8_t)word;
}

// ---------------------------------------------------------------------------------------------- error feedback
// x - d, rounded once to x's dtype; d: bits of a double.
APS_FN uint64_t aps_difference(uint64_t bits, uint64_t d, int dtype) {
    return aps_convert(aps_bits64(aps_to_double(bits, dtype) - aps_double(d)), APS_F64, dtype);
}
// Gradient plus carried-over error, in float32.
APS_FN float aps_add_error(float kept, uint64_t bits, int dtype) {
    uint64_t sum = aps_bits64(aps_to_double(aps_bits(kept), APS_F32) + aps_to_double(bits, dtype));
    return aps_float((uint32_t)aps_convert(sum, APS_F64, APS_F32));
}

#endif
