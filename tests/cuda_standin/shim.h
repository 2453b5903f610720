// What aps_kernels.cu needs of CUDA, for g++: indices that the launcher sets, and threads run one after another.
#pragma once
#include <stdint.h>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

struct Dim3 {
    unsigned int x, y, z;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static Dim3 blockIdx, threadIdx, blockDim, gridDim;

static inline unsigned long long atomicMax(unsigned long long* where, unsigned long long value) {
    unsigned long long old = *where;
    if (value > old) *where = value;
    return old;
}

// Every kernel argument is an integer or an address, so it travels in a 64-bit slot of the calling convention, and slots
// beyond a kernel's own arguments are ignored (true of x86-64 System V and of AArch64).
typedef void (*Kernel)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t);

extern "C" void standin_launch(Kernel kernel, unsigned int grid, unsigned int block, const uint64_t* a) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {
            kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
        }
    }
}
