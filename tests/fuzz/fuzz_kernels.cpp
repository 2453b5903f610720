// Fuzz target over the C interface of the CPU kernel library: any table, any message, any exponent.
//
// Every array has exactly the bytes that the interface was told of, so that the address sanitizer sees one byte too
// many. Oracles beside the sanitizers: the loops of all instruction sets give the same bytes, a refused table leaves
// everything as it was, and a table with a segment outside its message is refused.
// Built with -fsanitize=fuzzer it is a libFuzzer target; with -DAPS_FUZZ_DRIVER it has a main() of its own that feeds
// it random inputs, the same ones for the same seed.
#ifdef __clang__
// clang 14 knows no "f16c" here, nor GCC's target pragma: the build asks for what the processor has.
#define __builtin_cpu_supports(feature) 1
#endif
#include "aps_cpu.cpp"

#include <math.h>
#include <stdio.h>

#include <memory>
#include <vector>

namespace {

// Mostly short, for speed; sometimes longer than the kernels' blocks of 2048 elements.
const int64_t SHORT_LENGTH = 300, MAX_LENGTH = 3000, MAX_ELEMENTS = 4096;

struct Bytes {  // the fuzzer's input, read from the front; zeros after its end
    const uint8_t* data;
    size_t size, used = 0;
    uint8_t byte() { return used < size ? data[used++] : 0; }
    uint64_t word(int n_bytes) {
        uint64_t value = 0;
        for (int k = 0; k < n_bytes; ++k) value |= (uint64_t)byte() << (8 * k);
        return value;
    }
    int64_t below(int64_t limit) { return (int64_t)(word(2) % (uint64_t)limit); }
};

// A heap block of exactly n bytes, filled from what is left of the input, over and over.
std::unique_ptr<uint8_t[]> block(int64_t n, const Bytes& in, size_t skip) {
    std::unique_ptr<uint8_t[]> memory(new uint8_t[(size_t)n]);
    size_t rest = in.size - in.used;
    for (int64_t k = 0; k < n; ++k) memory[k] = rest ? in.data[in.used + ((size_t)k + skip) % rest] : 0;
    return memory;
}

struct Case {
    int op, n_in, accumulate, keep, stochastic;
    uint64_t seed;
    int64_t length;
    std::vector<ApsSegment> table;
    std::vector<int64_t> n_data;  // bytes behind each segment's address
};

// Bits of a code, bytes of the scales of a bucket and how many of them are float32, by the definitions of the families.
int width_of(const ApsSegment& s) {
    const int by_family[] = {1 + s.exp_bits + s.man_bits, 32, 1 + s.man_bits, 1, s.codec == 1 ? 2 : 8,
                             1 + s.exp_bits + s.man_bits};
    return by_family[s.family < 6 ? s.family : 0];
}
int n_floats(const ApsSegment& s) {
    return s.family == APS_FAMILY_ONEBIT ? 2 : s.family == APS_FAMILY_QSGD || s.family == APS_FAMILY_TABLE;
}
int64_t n_buckets(const ApsSegment& s) { return s.block ? (s.n + s.block - 1) / s.block : s.n > 0; }
__int128 bytes_of(const ApsSegment& s) {
    const __int128 n = s.n, block = s.block;
    const __int128 buckets = block ? (n + block - 1) / block : n > 0;
    const int side = s.family == APS_FAMILY_MX ? 1 : 4 * n_floats(s);
    return (n * width_of(s) + 7) / 8 + buckets * side;
}

// Two tables: 256 numbers, and 3.
void register_tables() {
    static const bool done = [] {
        float values[256], least[256];
        for (int k = 0; k < 256; ++k) values[k] = (float)(k - 128) / 127.0f;
        for (int k = 0; k < 255; ++k) least[k] = (values[k] + values[k + 1]) / 2;
        const float few[] = {-1.0f, 0.0f, 1.0f}, middles[] = {-0.5f, 0.5f};
        if (aps_register_table(values, least, 256) != 0 || aps_register_table(few, middles, 3) != 1) return false;
        for (int k = 128; k < 255; ++k) least[k] = nextafterf(least[k], 2.0f);  // the same on both sides of zero
        return aps_register_table(values + 1, least + 1, 255) == 2;
    }();
    if (!done) abort();
}

// Fields of a family as its formats set them.
void make_sensible(ApsSegment& s, uint8_t pick) {
    s.codec = (pick >> 4) % (s.family == APS_FAMILY_TABLE ? 3 : 2);
    s.block = 0;
    if (s.family == APS_FAMILY_QSGD) s.man_bits = (uint8_t)(1 + s.man_bits % 7), s.block = 1u + pick * 5u;
    if (s.family == APS_FAMILY_ONEBIT) s.block = pick % 3 * 27u;
    if (s.family == APS_FAMILY_MX) {
        s.exp_bits = (uint8_t)(1 + s.exp_bits % 7);
        s.man_bits = (uint8_t)(s.man_bits % (8 - s.exp_bits));
        s.block = 8u << pick % 9;
    }
}

Case read_case(Bytes& in) {
    Case c;
    c.op = in.byte() % 7;
    uint8_t flags = in.byte();
    c.n_in = 1 + (flags & 3);
    c.accumulate = (flags >> 2) % 3;
    c.keep = flags >> 6 & 1;
    c.stochastic = flags >> 7;
    c.seed = in.word(4);
    uint8_t shape = in.byte();
    c.table.resize((size_t)(shape % 5));
    c.length = in.below(shape < 240 ? SHORT_LENGTH : MAX_LENGTH);
    int64_t offset = 0;
    for (ApsSegment& s : c.table) {
        memset(&s, 0, sizeof s);
        uint8_t odd = in.byte();  // which fields are anything at all, instead of sensible
        s.exp_bits = odd & 1 ? in.byte() : (uint8_t)(1 + in.byte() % 8);
        s.man_bits = odd & 2 ? in.byte() : (uint8_t)(in.byte() % 24);
        s.flags = in.byte() & (odd & 4 ? 0xff : APS_SPECIALS);
        const uint8_t pick = in.byte();
        s.family = odd & 4 ? pick : (uint8_t)(pick % 3 ? 0 : pick / 3 % APS_N_FAMILIES);
        if (!(odd & 4)) make_sensible(s, in.byte());
        s.dtype = odd & 8 ? in.byte() : (uint8_t)(in.byte() % 4);
        s.exponent = odd & 16 ? (int32_t)in.word(4) : (int32_t)(int16_t)in.word(2) % 160;
        s.n = odd & 32 ? (int64_t)in.word(8) : in.below(MAX_ELEMENTS);
        s.offset = odd & 64 ? (int64_t)in.word(8) : offset;
        s.factor = odd & 128 ? aps_float((uint32_t)in.word(4)) : 0.5f;
        uint8_t nudge = in.byte();  // to the edges of what is allowed, and one over
        s.uid = nudge;
        s.first = in.below(1000);
        int width = width_of(s);
        if (!(odd & 32) && !(odd & 64) && width <= 32) {  // fit it in, as layouts do
            int64_t room = (c.length - offset) * 8 / width;
            ApsSegment filled = s;
            for (filled.n = room; filled.n > 0 && bytes_of(filled) > c.length - offset;) --filled.n;
            room = filled.n;
            s.n = s.n < room && nudge >= 64 ? s.n : room + (nudge == 1);
            if (nudge == 2) s.offset = c.length - (int64_t)bytes_of(s) + 1;
            if (nudge == 3) s.offset = -1;
            offset += (int64_t)bytes_of(s);
        }
        // No length bounds a scan, so its caller vouches for n; nor is any message wide enough for more than this.
        const int64_t most = c.op == 0 ? MAX_ELEMENTS : 8 * MAX_LENGTH;
        if (c.op == 0 && s.n > most) s.n = most;
        int64_t n = s.n < 0 ? 0 : s.n > most ? 0 : s.n;
        c.n_data.push_back(s.dtype > 3 ? 0 : n * aps_dtype_size(s.dtype));
    }
    return c;
}

// Make every NaN of an array the same: which one a sum of two NaNs gives is up to the compiler.
void one_nan(uint8_t* p, int dtype, int64_t n) {
    const int man_bits = aps_dtype_man_bits(dtype), exp_bits = aps_dtype_exp_bits(dtype);
    for (int64_t k = 0; k < n; ++k) {
        uint64_t bits = 0;
        memcpy(&bits, p + k * aps_dtype_size(dtype), (size_t)aps_dtype_size(dtype));
        const uint64_t top = ((1ull << exp_bits) - 1) << man_bits,
                       magnitude = bits & ((1ull << (exp_bits + man_bits)) - 1);
        if (magnitude > top) memset(p + k * aps_dtype_size(dtype), 0xff, (size_t)aps_dtype_size(dtype));
    }
}

bool overlap(const Case& c) {
    int64_t end = 0;
    for (const ApsSegment& s : c.table) {
        if (s.offset < end) return true;
        end = s.offset + (int64_t)bytes_of(s);
    }
    return false;
}

struct Outcome {
    int64_t status = 0;
    std::vector<uint8_t> bytes;  // everything that the call may have written
};

Outcome run(const Case& c, const Bytes& in, int vectors) {
    aps_use_vectors(vectors);
    std::vector<ApsSegment> table = c.table;
    std::vector<std::unique_ptr<uint8_t[]>> data, messages;
    for (size_t k = 0; k < table.size(); ++k) {
        data.push_back(block(c.n_data[k], in, k));
        table[k].data = (uint64_t)data.back().get();
    }
    std::vector<const uint8_t*> inputs;
    for (int j = 0; j < c.n_in; ++j) {
        messages.push_back(block(c.length, in, 7 * (size_t)j));
        inputs.push_back(messages.back().get());
    }
    std::unique_ptr<uint8_t[]> out = block(c.length, in, 3);
    std::vector<double> sums(4 * table.size(), 0.5);
    const int64_t n = (int64_t)table.size();
    Outcome o;
    if (c.op == 0) o.status = aps_scan(table.data(), n, c.stochastic);
    if (c.op == 1) o.status = aps_encode_segments(table.data(), n, out.get(), c.length, c.stochastic, c.seed);
    if (c.op == 2) o.status = aps_decode_segments(table.data(), n, inputs.data(), c.n_in, c.length, c.accumulate);
    if (c.op == 3) {
        o.status = aps_reduce_segments(table.data(), n, inputs.data(), c.n_in, c.accumulate, c.keep, out.get(),
                                       c.length, c.stochastic, c.seed);
    }
    if (c.op == 4) o.status = aps_residual_segments(table.data(), n, inputs[0], c.length);
    if (c.op == 5) o.status = aps_measure_segments(table.data(), n, inputs[0], c.length, sums.data());
    if (c.op == 6) o.status = aps_check_segments(table.data(), n, 1, c.length);
    for (size_t k = 0; k < table.size(); ++k) {
        const ApsSegment& s = table[k];
        const uint8_t* p = (const uint8_t*)&s.exponent;
        o.bytes.insert(o.bytes.end(), p, p + sizeof s.exponent);
        if (o.status) continue;
        if (s.family == APS_FAMILY_RAW && c.op != 0) one_nan(out.get() + s.offset, APS_F32, s.n);
        if (c.op != 0) one_nan(out.get() + s.offset, APS_F32, n_floats(s) * n_buckets(s));
        one_nan(data[k].get(), s.dtype, c.n_data[k] / aps_dtype_size(s.dtype));
    }
    for (size_t k = 0; k < table.size(); ++k) o.bytes.insert(o.bytes.end(), data[k].get(), data[k].get() + c.n_data[k]);
    o.bytes.insert(o.bytes.end(), out.get(), out.get() + c.length);
    const uint8_t* p = (const uint8_t*)sums.data();
    o.bytes.insert(o.bytes.end(), p, p + 8 * sums.size());
    return o;
}

void demand(bool holds, const char* what, const Case& c) {
    if (holds) return;
    fprintf(stderr, "fuzz_kernels: %s\n  op %d n_in %d accumulate %d keep %d stochastic %d seed %llu length %lld\n",
            what, c.op, c.n_in, c.accumulate, c.keep, c.stochastic, (unsigned long long)c.seed, (long long)c.length);
    for (const ApsSegment& s : c.table) {
        fprintf(stderr,
                "  segment family %d e%d m%d flags %d dtype %d exponent %d factor %g n %lld offset %lld codec %d block "
                "%u\n",
                s.family, s.exp_bits, s.man_bits, s.flags, s.dtype, s.exponent, (double)s.factor, (long long)s.n,
                (long long)s.offset, s.codec, s.block);
    }
    abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    register_tables();
    Bytes in{data, size};
    const Case c = read_case(in);
    const Outcome plain = run(c, in, BASELINE);
    const bool comparable = plain.status != 0 || c.op == 0 || !overlap(c);  // else NaNs are cut to pieces
    for (int vectors = AVX2; vectors <= best_vectors(); ++vectors) {
        const Outcome other = run(c, in, vectors);
        demand(plain.status == other.status && (!comparable || plain.bytes == other.bytes),
               vectors == AVX2 ? "AVX2 and baseline differ" : "AVX-512 and baseline differ", c);
    }
    bool outside = false;
    for (const ApsSegment& s : c.table) {
        if (s.n < 0 || s.offset < 0 || s.offset + bytes_of(s) > c.length) outside = true;
    }
    demand(c.op == 0 || !outside || plain.status != 0, "a segment outside its message was accepted", c);
    if (plain.status != 0) {
        Case untouched = c;
        untouched.op = 6;
        demand(run(untouched, in, BASELINE).bytes == plain.bytes, "a refused table changed something", c);
    }
    return 0;
}

#ifdef APS_FUZZ_DRIVER
#include "driver.h"

int main(int argc, char** argv) {
    return drive(argc, argv, 400, [](std::vector<uint8_t>& bytes, auto& random) {
        // Mostly sensible tables: `odd` is one random byte per segment, so thin the set bits out by position.
        if (random() % 4) {
            for (size_t k = 9; k < bytes.size() && k < 90; ++k) bytes[k] &= random() % 3 ? 0xff : (uint8_t)random();
        }
    });
}
#endif
