// CUDA side of horovod_aps.simulate, compiled at run time by CuPy; the arithmetic is aps_simulate.h, shared with the CPU.
#include "aps_simulate.h"

#define TILE 16

extern "C" __global__ void simulate_quantize_kernel(const float* x, float* out, long long n, int exp_bits,
                                                    int man_bits) {
    const CastFormat f = aps_sim_format(exp_bits, man_bits);
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        out[i] = aps_sim_cast(x[i], f);
    }
}

// One thread per element of C, TILE x TILE threads per block; K runs in order inside each thread, tile by tile.
extern "C" __global__ void simulate_gemm_kernel(const float* a, const float* b, float* c, long long n_rows,
                                                long long n_cols, long long depth, int exp_bits, int man_bits,
                                                int kahan) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];
    const CastFormat f = aps_sim_format(exp_bits, man_bits);
    // Rows go over x, whose grid may have 2^31 blocks; y is limited to 65535.
    const long long row = (long long)blockIdx.x * TILE + threadIdx.y;
    const long long col = (long long)blockIdx.y * TILE + threadIdx.x;
    float acc = 0.0f, rest = 0.0f;
    for (long long first = 0; first < depth; first += TILE) {
        const long long a_col = first + threadIdx.x, b_row = first + threadIdx.y;
        a_tile[threadIdx.y][threadIdx.x] = row < n_rows && a_col < depth ? a[row * depth + a_col] : 0.0f;
        b_tile[threadIdx.y][threadIdx.x] = b_row < depth && col < n_cols ? b[b_row * n_cols + col] : 0.0f;
        __syncthreads();
        // Stop at depth: a padded zero would still run Kahan's correction once more.
        const int steps = depth - first < TILE ? (int)(depth - first) : TILE;
        for (int k = 0; k < steps; ++k) {
            if (kahan) {
                aps_sim_fma_kahan(a_tile[threadIdx.y][k], b_tile[k][threadIdx.x], f, &acc, &rest);
            } else {
                aps_sim_fma(a_tile[threadIdx.y][k], b_tile[k][threadIdx.x], f, &acc);
            }
        }
        __syncthreads();
    }
    if (row < n_rows && col < n_cols) c[row * n_cols + col] = acc;
}
