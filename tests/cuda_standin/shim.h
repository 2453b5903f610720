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
// g++ may copy these member by member, a GPU does it in one access, whose address must be aligned.
void standin_vector(const void* where, uint64_t size, bool is_write);
struct uint2 {
    uint32_t x, y;
    uint2() = default;
    uint2(const uint2& v) : x((standin_vector(&v, 8, false), v.x)), y(v.y) {}
    uint2& operator=(const uint2& v) {
        standin_vector(this, 8, true);
        x = v.x, y = v.y;
        return *this;
    }
};
struct uint4 {
    uint32_t x, y, z, w;
    uint4() = default;
    uint4(const uint4& v) : x((standin_vector(&v, 16, false), v.x)), y(v.y), z(v.z), w(v.w) {}
    uint4& operator=(const uint4& v) {
        standin_vector(this, 16, true);
        x = v.x, y = v.y, z = v.z, w = v.w;
        return *this;
    }
};
extern Dim3 blockIdx, threadIdx, blockDim, gridDim;

unsigned long long atomicMax(unsigned long long* where, unsigned long long value);
uint64_t standin_exchange(uint64_t value, int step);
template <class T>
static inline T __shfl_xor_sync(unsigned int, T value, int step) {
    return (T)standin_exchange((uint64_t)value, step);
}
