// What kernels need of CUDA, for g++. The kernels are compiled with -fsanitize=thread but without its library: the calls
// that g++ puts in front of every load and store are in runtime.cpp, beside what runs the threads.
#pragma once
#include <stdint.h>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

struct Dim3 {
    unsigned int x, y, z;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
extern Dim3 blockIdx, threadIdx, blockDim, gridDim;

unsigned long long atomicMax(unsigned long long* where, unsigned long long value);
uint64_t standin_exchange(uint64_t value, int step);
template <class T>
static inline T __shfl_xor_sync(unsigned int, T value, int step) {
    return (T)standin_exchange((uint64_t)value, step);
}
