// Arithmetic of the CPD simulator, one element at a time: cast a float to (exp_bits, man_bits) and accumulate in it.
// Shared by aps_simulate.cpp (CPU) and aps_simulate.cu (CUDA).
//
// The exact cast exists already (aps_encode with APS_OVERFLOW_IEEE, then aps_decode_bits) but goes through 64-bit
// integers and branches; this one gives the same bits (tests compare them) in a form that gcc vectorises inside a GEMM.
// It does not depend on flush-to-zero: the float addition below only sees sums that are normal numbers.
#ifndef APS_SIMULATE_H
#define APS_SIMULATE_H

#include "aps_scalar.h"

// Everything about a format that the cast needs, derived once per call.
struct CastFormat {
    uint32_t shift;       // mantissa bits that float32 has and the format does not
    uint32_t below_half;  // half a unit in the last place, less one
    uint32_t cap, odd;    // min(kept bits, cap) & odd is what a tie adds, see aps_sim_format
    uint32_t keep;        // mask of the kept bits
    uint32_t max_bits;    // largest finite value, as float32 bits
    uint32_t min_normal;  // smallest normal value, as float32 bits; 0 where float32's own subnormals serve (e = 8)
    float magic;          // adding it rounds a subnormal of the format to its fixed quantum
};

APS_FN CastFormat aps_sim_format(int exp_bits, int man_bits) {
    const int bias = (1 << (exp_bits - 1)) - 1;
    const int min_exponent = 1 - bias;
    const int max_exponent = (1 << exp_bits) - 2 - bias;  // the top code is Inf/NaN
    CastFormat f;
    f.shift = 23u - man_bits;
    // A tie goes to the even neighbour. With a one-digit significand both are odd and IEEE 754 (4.3.1) takes the larger,
    // as CPD does: the kept bits are then the exponent, and any exponent but zero's counts as odd.
    f.odd = man_bits < 23;
    f.cap = man_bits ? 0xFFFFFFFFu : 1u;
    f.below_half = man_bits < 23 ? (1u << (f.shift - 1)) - 1u : 0u;
    f.keep = ~((1u << f.shift) - 1u);
    if (exp_bits == 1) {  // subnormals only: the largest is all ones in the mantissa field
        // (2^m - 1) * 2^(1 - m), normalised; with m == 0 only zero is finite
        const float quantum = aps_float((uint32_t)(128 - man_bits) << 23);
        f.max_bits = aps_bits((float)((1 << man_bits) - 1) * quantum);
    } else {
        f.max_bits = ((uint32_t)(max_exponent + 127) << 23) | (0x7FFFFFu & f.keep);
    }
    f.min_normal = exp_bits == 8 ? 0u : (uint32_t)(min_exponent + 127) << 23;
    // 2^(quantum exponent + 23): a float of that size has exactly the quantum as its last place.
    f.magic = exp_bits == 8 ? 0.0f : aps_float((uint32_t)(min_exponent - man_bits + 23 + 127) << 23);
    return f;
}

// Round to nearest, ties to even; overflow to Inf, gradual underflow; NaN, Inf and signed zero unchanged.
APS_FN float aps_sim_cast(float x, CastFormat f) {
    const uint32_t bits = aps_bits(x);
    const uint32_t sign = bits & 0x80000000u;
    const uint32_t magnitude = bits ^ sign;
    const uint32_t kept = magnitude >> f.shift;
    const uint32_t odd = (kept < f.cap ? kept : f.cap) & f.odd;
    const uint32_t normal = (magnitude + f.below_half + odd) & f.keep;
    const uint32_t subnormal = aps_bits((aps_float(magnitude) + f.magic) - f.magic);
    // Compared as signed numbers, which AVX2 does in one instruction; a NaN's `normal` may be negative, and is not taken.
    uint32_t out = (int32_t)magnitude < (int32_t)f.min_normal ? subnormal : normal;
    out = (int32_t)out > (int32_t)f.max_bits ? 0x7F800000u : out;
    out = (int32_t)magnitude > 0x7F800000 ? magnitude : out;
    return aps_float(out | sign);
}

// One multiply-add of the GEMM, every operation rounded to the format.
APS_FN void aps_sim_fma(float a, float b, CastFormat f, float* acc) {
    *acc = aps_sim_cast(*acc + aps_sim_cast(a * b, f), f);
}

// The same with Kahan's correction: y = a * b - rest, t = acc + y, rest = what t has lost of y, acc = t.
APS_FN float aps_sim_kahan_term(float a, float b, float rest, CastFormat f) {
    return aps_sim_cast(aps_sim_cast(a * b, f) - rest, f);
}

// One that is not finite is dropped: with it the accumulator would go from Inf to NaN.
APS_FN float aps_sim_kahan_rest(float acc, float y, float t, CastFormat f) {
    const float lost = aps_sim_cast(aps_sim_cast(t - acc, f) - y, f);
    return (int32_t)(aps_bits(lost) & 0x7FFFFFFFu) >= 0x7F800000 ? 0.0f : lost;
}

APS_FN void aps_sim_fma_kahan(float a, float b, CastFormat f, float* acc, float* rest) {
    const float y = aps_sim_kahan_term(a, b, *rest, f);
    const float t = aps_sim_cast(*acc + y, f);
    *rest = aps_sim_kahan_rest(*acc, y, t, f);
    *acc = t;
}

#endif
