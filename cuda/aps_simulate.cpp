// CPU side of horovod_aps.simulate: cast and GEMM with a low-precision accumulator, called through ctypes.
#include "aps_simulate.h"

#include <cstdint>

bool aps_is_forked();  // aps_cpu.cpp: OpenMP would hang

// The same code for AVX2, AVX-512 and the baseline, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MULTIVERSION __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MULTIVERSION
#endif

namespace {

constexpr int64_t kColumns = 64;  // accumulators of one block live in registers and L1

bool valid(int exp_bits, int man_bits) { return exp_bits >= 1 && exp_bits <= 8 && man_bits >= 0 && man_bits <= 23; }

}  // namespace

// ---- kernels

MULTIVERSION static void quantize_kernel(const float* x, float* out, int64_t n, CastFormat f) {
    for (int64_t i = 0; i < n; ++i) out[i] = aps_sim_cast(x[i], f);
}

// One row of A against all columns of B. K stays sequential, as the arithmetic demands; columns are the vector lanes.
MULTIVERSION static void row_kernel(const float* a, const float* b, float* c, int64_t n_cols, int64_t depth,
                                    CastFormat f) {
    for (int64_t first = 0; first < n_cols; first += kColumns) {
        float acc[kColumns] = {};
        const int64_t width = n_cols - first < kColumns ? n_cols - first : kColumns;
        for (int64_t k = 0; k < depth; ++k) {
            const float* row = b + k * n_cols + first;
            if (width == kColumns) {
                for (int64_t j = 0; j < kColumns; ++j) aps_sim_fma(a[k], row[j], f, &acc[j]);
            } else {
                for (int64_t j = 0; j < width; ++j) aps_sim_fma(a[k], row[j], f, &acc[j]);
            }
        }
        for (int64_t j = 0; j < width; ++j) c[first + j] = acc[j];
    }
}

MULTIVERSION static void row_kahan_kernel(const float* a, const float* b, float* c, int64_t n_cols, int64_t depth,
                                          CastFormat f) {
    for (int64_t first = 0; first < n_cols; first += kColumns) {
        float acc[kColumns] = {}, rest[kColumns] = {};
        const int64_t width = n_cols - first < kColumns ? n_cols - first : kColumns;
        for (int64_t k = 0; k < depth; ++k) {
            const float* row = b + k * n_cols + first;
            if (width == kColumns) {
                // Step by step for all columns: one column's five casts in a row would wait for each other.
                float y[kColumns], t[kColumns];
                for (int64_t j = 0; j < kColumns; ++j) y[j] = aps_sim_kahan_term(a[k], row[j], rest[j], f);
                for (int64_t j = 0; j < kColumns; ++j) t[j] = aps_sim_cast(acc[j] + y[j], f);
                for (int64_t j = 0; j < kColumns; ++j) {
                    rest[j] = aps_sim_kahan_rest(acc[j], y[j], t[j], f);
                    acc[j] = t[j];
                }
            } else {
                for (int64_t j = 0; j < width; ++j) aps_sim_fma_kahan(a[k], row[j], f, &acc[j], &rest[j]);
            }
        }
        for (int64_t j = 0; j < width; ++j) c[first + j] = acc[j];
    }
}

// ---- launchers: 0, or 1 for a format that does not exist, 2 for a size that is negative

extern "C" int aps_simulate_quantize(const float* x, float* out, int64_t n, int exp_bits, int man_bits) {
    if (!valid(exp_bits, man_bits)) return 1;
    if (n < 0) return 2;
    quantize_kernel(x, out, n, aps_sim_format(exp_bits, man_bits));
    return 0;
}

// c (n_rows, n_cols) = a (n_rows, depth) @ b (depth, n_cols), all row-major and contiguous.
extern "C" int aps_simulate_gemm(const float* a, const float* b, float* c, int64_t n_rows, int64_t n_cols,
                                 int64_t depth, int exp_bits, int man_bits, int kahan, int n_threads) {
    if (!valid(exp_bits, man_bits)) return 1;
    if (n_rows < 0 || n_cols < 0 || depth < 0) return 2;
    const CastFormat f = aps_sim_format(exp_bits, man_bits);
    if (n_threads < 1 || aps_is_forked()) n_threads = 1;
#pragma omp parallel for schedule(static) num_threads(n_threads) if (n_threads > 1)
    for (int64_t i = 0; i < n_rows; ++i) {
        if (kahan) {
            row_kahan_kernel(a + i * depth, b, c + i * n_cols, n_cols, depth, f);
        } else {
            row_kernel(a + i * depth, b, c + i * n_cols, n_cols, depth, f);
        }
    }
    return 0;
}
