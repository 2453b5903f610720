// CUDA side of horovod_aps.activations, compiled at run time by CuPy; the arithmetic of a block is aps_activations.h,
// shared with the CPU, so streams are the same bytes. One thread does one block of 64 values.
#include "aps_activations.h"

#define ACT_FOR_BLOCKS(b, n_blocks)                                                                                   \
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x, stride_ = (long long)gridDim.x * blockDim.x; \
         b < (n_blocks); b += stride_)

// First pass: how every block is stored, and the bytes that it takes behind its chunk's table.
extern "C" __global__ void activations_plan_kernel(const void* data, long long n, int dtype, uint64_t eb_bits,
                                                   uint16_t* plans, int* sizes) {
    const double eb = aps_double(eb_bits);
    const ActQuantizer q = act_quantizer(act_bound(eb, dtype), eb, dtype);
    ACT_FOR_BLOCKS(b, (n + ACT_BLOCK - 1) / ACT_BLOCK) {
        int codes[ACT_BLOCK];
        const int good = act_codes(data, b * ACT_BLOCK, n, q, codes);
        const ActPlan p = act_plan_codes(codes, good, dtype);
        plans[b] = (uint16_t)act_pack_plan(p);
        sizes[b] = p.size;
    }
}

// Second pass: offsets[b] is where block b's bytes begin, tables[chunk] where its chunk does.
extern "C" __global__ void activations_write_kernel(const void* data, long long n, int dtype, uint64_t eb_bits,
                                                    const uint16_t* plans, const long long* offsets,
                                                    const long long* tables, uint8_t* stream) {
    const double eb = aps_double(eb_bits);
    const ActQuantizer q = act_quantizer(act_bound(eb, dtype), eb, dtype);
    ACT_FOR_BLOCKS(b, (n + ACT_BLOCK - 1) / ACT_BLOCK) {
        int codes[ACT_BLOCK];
        act_codes(data, b * ACT_BLOCK, n, q, codes);
        ActPlan p = act_unpack_plan(plans[b], dtype);
        act_write(data, b * ACT_BLOCK, n, codes, p, dtype, stream + offsets[b]);
        act_put64(stream + tables[b / ACT_CHUNK_BLOCKS] + 2 * (b % ACT_CHUNK_BLOCKS), plans[b], 2);
    }
}

// tables has one entry more than there are chunks: where the last one ends. *wrong is set by a chunk that is malformed.
extern "C" __global__ void activations_decode_kernel(const uint8_t* stream, const long long* tables, long long n,
                                                     int dtype, uint32_t bound_bits, void* out, int* wrong) {
    const ActQuantizer q = act_quantizer(aps_float(bound_bits), 0.0, dtype);
    const long long n_blocks = (n + ACT_BLOCK - 1) / ACT_BLOCK;
    ACT_FOR_BLOCKS(b, n_blocks) {
        const long long chunk = b / ACT_CHUNK_BLOCKS, first = chunk * ACT_CHUNK_BLOCKS;
        const long long count = n_blocks - first < ACT_CHUNK_BLOCKS ? n_blocks - first : (long long)ACT_CHUNK_BLOCKS;
        const uint8_t* in = stream + tables[chunk];
        const long long size = tables[chunk + 1] - tables[chunk];
        long long used = 2 * count;
        int good = used <= size;
        for (long long k = 0; good && k < b - first; ++k) {
            const ActPlan before = act_unpack_plan((uint32_t)act_get64(in + 2 * k, 2), dtype);
            good = before.size >= 0;
            used += before.size;
        }
        if (good) {
            const ActPlan p = act_unpack_plan((uint32_t)act_get64(in + 2 * (b - first), 2), dtype);
            int codes[ACT_BLOCK];
            good = p.size >= 0 && used <= size && p.size <= size - used;
            if (good && b - first == count - 1) good = used + p.size == size;
            if (good && p.mode != ACT_RAW) good = act_read(in + used, p, codes);
            if (good) act_restore(in + used, p, codes, q, out, b * ACT_BLOCK, n);
        }
        if (!good) *wrong = 1;
    }
}
