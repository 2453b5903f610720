// Fuzz target over the C interface of the activations' codec: any values, any bound, any bytes as a stream.
//
// Every array has exactly the bytes that the interface was told of, so that the address sanitizer sees one byte too
// many. Oracles beside the sanitizers: AVX2 and baseline give the same bytes and accept the same streams, what is
// decoded is within the bound, zeros and what is not finite stay.
#ifdef __clang__
#define __builtin_cpu_supports(feature) 1
#endif
static int g_vectors = 1;
bool aps_is_forked() { return false; }
extern "C" int aps_uses_vectors() { return g_vectors; }
#include "aps_activations.cpp"

#include <math.h>
#include <stdio.h>

#include <memory>
#include <vector>

namespace {

struct Bytes {  // the fuzzer's input, read from the front; zeros after its end
    const uint8_t* data;
    size_t size, used = 0;
    uint8_t byte() { return used < size ? data[used++] : 0; }
    uint64_t word(int n_bytes) {
        uint64_t value = 0;
        for (int k = 0; k < n_bytes; ++k) value |= (uint64_t)byte() << (8 * k);
        return value;
    }
};

void demand(bool holds, const char* what, int64_t n, int dtype, double eb) {
    if (holds) return;
    fprintf(stderr, "fuzz_activations: %s\n  n %lld dtype %d eb %a\n", what, (long long)n, dtype, eb);
    abort();
}
typedef std::unique_ptr<uint8_t[]> Block;
Block exactly(int64_t n) { return Block(new uint8_t[(size_t)n]()); }

// Values that the rest of the input describes, over and over: small numbers on a grid, so that blocks compress, or bits.
Block values(Bytes& in, int64_t n, int dtype, int kind) {
    const int size = aps_dtype_size(dtype);
    Block out = exactly(n * size);
    const size_t rest = in.size > in.used ? in.size - in.used : 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = 0;
        for (int k = 0; k < 4; ++k) {
            bits |= (uint32_t)(rest ? in.data[in.used + (size_t)(4 * i + k + i / 7) % rest] : 0) << (8 * k);
        }
        if (kind == 1) bits = act_narrow((float)(int8_t)bits * 0.0625f, dtype);
        if (kind == 2) bits = bits & 1 ? act_narrow((float)(bits >> 1 & 63u), dtype) : 0;
        if (kind == 3) bits = act_narrow((float)i * 0.25f + (float)(bits & 3u), dtype);
        memcpy(out.get() + i * size, &bits, (size_t)size);
    }
    return out;
}

struct Beside {  // what a stream is decoded beside, or nothing
    Block mask, source;
    float scale[3], shift[3];
    ActSource sources[2];
    ActHints hints = {nullptr, 0, nullptr};
    int coarse = 0;
    const ActHints* get() const { return hints.mask || hints.n_sources ? &hints : nullptr; }
    bool is_off(int64_t i) const { return hints.mask && !(mask[(size_t)(i / 8)] >> (i % 8) & 1); }
};
void choose(Bytes& in, int64_t n, int dtype, double eb, Beside* beside) {
    const int kind = in.byte() % 4;
    if (kind & 1) {
        beside->mask = exactly((n + 7) / 8);
        const uint8_t seed = in.byte();
        for (int64_t k = 0; k < (n + 7) / 8; ++k) beside->mask[(size_t)k] = (uint8_t)(seed * (k + 1) ^ k >> 2);
        beside->hints.mask = beside->mask.get();
        if (kind == 1) beside->coarse = in.byte() % 16;
    }
    if (kind & 2) {
        const Block x = values(in, n, dtype, in.byte() % 4);
        const int64_t size = aps_act_encode(x.get(), n, dtype, eb, nullptr, 0, 1);
        beside->source = exactly(size);
        aps_act_fetch(beside->source.get(), size);
        for (int k = 0; k < 3; ++k) beside->scale[k] = (float)k - 0.5f, beside->shift[k] = 0.25f * (float)k;
        beside->sources[0] = {beside->source.get(), size, nullptr, beside->scale, beside->shift, 3, 1 + n % 50, dtype};
        beside->sources[1] = {beside->source.get(), size, nullptr, nullptr, nullptr, 0, 0, dtype};
        beside->hints.sources = beside->sources;
        beside->hints.n_sources = 1 + in.byte() % 2;
    }
}

void round_trip(Bytes& in, int64_t n, int dtype, double eb, const Beside& beside, Block* stream, int64_t* size) {
    const Block x = values(in, n, dtype, in.byte() % 4);
    const ActHints* hints = beside.get();
    g_vectors = 0;
    *size = aps_act_encode(x.get(), n, dtype, eb, hints, beside.coarse, 1);
    demand(*size >= 0, "a valid call was refused", n, dtype, eb);
    *stream = exactly(*size);
    demand(aps_act_fetch(stream->get(), *size) == 0, "fetch was refused", n, dtype, eb);
    g_vectors = 1;
    demand(aps_act_encode(x.get(), n, dtype, eb, hints, beside.coarse, 1) == *size, "AVX2 and baseline differ in size",
           n, dtype, eb);
    const Block other = exactly(*size);
    aps_act_fetch(other.get(), *size);
    demand(!memcmp(other.get(), stream->get(), (size_t)*size), "AVX2 and baseline differ", n, dtype, eb);
    const int item = aps_dtype_size(dtype);
    const Block y = exactly(n * item);
    demand(aps_act_decode(stream->get(), *size, y.get(), n, dtype, hints, 1) == 0, "a stream was refused", n, dtype,
           eb);
    for (int64_t i = 0; i < n; ++i) {
        const double a = act_load(x.get(), dtype, i), b = act_load(y.get(), dtype, i);
        const double limit = beside.is_off(i) ? ldexp(eb, beside.coarse) : eb;
        if (isfinite(a)) demand(fabs(a - b) <= limit && (a != 0 || b == 0), "the bound is exceeded", n, dtype, eb);
        else demand(!memcmp(x.get() + i * item, y.get() + i * item, (size_t)item), "not kept", n, dtype, eb);
    }
}

void decode_any(const Block& stream, int64_t size, int64_t n, int dtype, const ActHints* hints) {
    const int64_t bytes = n * aps_dtype_size(dtype);
    const Block a = exactly(bytes), b = exactly(bytes);
    g_vectors = 0;
    const int64_t plain = aps_act_decode(stream.get(), size, a.get(), n, dtype, hints, 1);
    g_vectors = 1;
    const int64_t vector = aps_act_decode(stream.get(), size, b.get(), n, dtype, hints, 1);
    demand(plain == vector, "AVX2 and baseline accept different streams", n, dtype, 0);
    demand(plain || !memcmp(a.get(), b.get(), (size_t)bytes), "AVX2 and baseline decode differently", n, dtype, 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length) {
    Bytes in{data, length};
    const uint8_t op = in.byte();
    const int dtype = (const int[]){APS_F32, APS_F16, APS_BF16}[in.byte() % 3];
    const int64_t n = (int64_t)(in.word(2) % (op & 1 ? 9000 : 300));
    if (op % 4 == 3) {
        ActPool pool;
        memset(&pool, 0, sizeof pool);
        pool.n_planes = in.byte() % 4;
        pool.height = 1 + in.byte() % 20;
        pool.width = 1 + in.byte() % 20;
        pool.out_height = 1 + in.byte() % 12;
        pool.out_width = 1 + in.byte() % 12;
        pool.step_down = (int8_t)in.byte();
        pool.step_right = (int8_t)in.byte();
        pool.first_down = (int8_t)in.byte();
        pool.first_right = (int8_t)in.byte();
        pool.n_right = (int8_t)in.byte();
        pool.n_bits = in.byte() % 12;
        const int64_t size = aps_act_pool_size(&pool);
        if (size < 0) return 0;
        Block bits = exactly(size);
        for (int64_t k = 0; k < size; ++k) bits[(size_t)k] = in.byte();
        const int64_t count = pool.n_planes * pool.out_height * pool.out_width;
        std::unique_ptr<int64_t[]> index(new int64_t[(size_t)count]());
        if (aps_act_pool_decode(bits.get(), &pool, index.get()) == 0 && count) {
            ActPool again = pool;
            if (aps_act_pool_plan(index.get(), &again) == 1) {
                Block packed = exactly(aps_act_pool_size(&again));
                std::unique_ptr<int64_t[]> same(new int64_t[(size_t)count]());
                aps_act_pool_encode(index.get(), &again, packed.get());
                demand(aps_act_pool_decode(packed.get(), &again, same.get()) == 0, "indices refused", count, 0, 0);
                demand(!memcmp(same.get(), index.get(), 8 * (size_t)count), "indices differ", count, 0, 0);
            }
        }
        return 0;
    }
    const double eb =
        op & 8 ? fabs((double)aps_float((uint32_t)in.word(4))) : ldexp(1.0 + in.byte() / 256.0, -(in.byte() % 12));
    if (!(eb >= 0)) return 0;
    Block stream;
    int64_t size;
    Beside beside;
    choose(in, n, dtype, eb, &beside);
    round_trip(in, n, dtype, eb, beside, &stream, &size);
    if (op % 4 == 0) return 0;
    // Damage it: some bytes, or its end.
    const int n_changes = 1 + in.byte() % 4;
    for (int k = 0; k < n_changes && size; ++k) {
        // Mostly behind the header, whose fields are checked one by one.
        const int64_t from = size > 32 && in.byte() % 8 ? 32 : 0;
        stream[(size_t)(from + (int64_t)(in.word(2) % (uint64_t)(size - from)))] = in.byte();
    }
    decode_any(stream, size, n, dtype, beside.get());
    if (op % 4 == 2 && size > 32) {
        const int64_t cut = (int64_t)(in.word(2) % (uint64_t)size);
        Block shorter = exactly(cut);
        memcpy(shorter.get(), stream.get(), (size_t)cut);
        if (cut >= 32 && in.byte() % 2) memcpy(shorter.get() + 24, &cut, 8);  // and it says so
        decode_any(shorter, cut, n, dtype, beside.get());
    }
    return 0;
}

#ifdef APS_FUZZ_DRIVER
#include "driver.h"

int main(int argc, char** argv) {
    return drive(argc, argv, 200, [](std::vector<uint8_t>&, auto&) {});
}
#endif
