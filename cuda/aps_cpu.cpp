// The CPU kernel library: C functions over a table of segments, called through ctypes (which releases the GIL).
//
// This file checks the table, splits the work over threads and picks, once per range of a segment, the loops for its
// family of formats and the instruction set. The loops are in aps_cpu_*.inc, the arithmetic of one element in
// aps_codecs.h and aps_scalar.h. Every function returns 0, or 16 * (segment + 1) + reason.
#include "aps_codecs.h"
#include "aps_mx.h"
#include "aps_onebit.h"
#include "aps_qsgd.h"
#include "aps_table.h"

#include <limits.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define APS_X86 1
#endif

typedef const uint8_t* const* Inputs;

struct ReduceFound {  // of a range; the exponent is relative to that of the inputs
    int exponent;
    int64_t redo;  // what is before it was encoded with a lower exponent
};
// The loops of one family of formats, each over one range of one segment.
struct CpuCodec {
    bool (*is_valid)(const ApsSegment&);      // is this a format of the family?
    bool (*is_scaled)(const ApsSegment&);     // do sums get an exponent of their own?
    bool (*has_exponent)(const ApsSegment&);  // is the exponent one that can be decoded with?
    int64_t (*n_bytes)(const ApsSegment&);    // what the segment takes in a message
    int64_t (*unit)(const ApsSegment&);       // ranges begin at multiples of it, a multiple of 8 elements
    uint64_t (*scan)(const ApsSegment&, int64_t begin, int64_t end);
    int (*exponent)(const ApsSegment&, uint64_t top, int dtype, int mode);
    void (*encode)(const ApsSegment&, uint8_t* message, int64_t begin, int64_t end, int mode, uint64_t seed);
    void (*decode)(const ApsSegment&, Inputs, int n_in, int accumulate, int64_t begin, int64_t end);
    ReduceFound (*reduce)(const ApsSegment&, Inputs, int n_in, int accumulate, bool keep, uint8_t* message,
                          int64_t begin, int64_t end, int mode, uint64_t seed);
    // Encode the sums again at a known exponent; only where sums are scaled.
    void (*reduce_redo)(const ApsSegment&, Inputs, int n_in, int exponent, uint8_t* message, int64_t begin, int64_t end,
                        int mode, uint64_t seed);
    int (*sum_exponent)(const ApsSegment&, int found, bool keep);  // of the sums, from all that reduce has found
    void (*residual)(const ApsSegment&, const uint8_t* message, int64_t begin, int64_t end);
    void (*measure)(const ApsSegment&, const uint8_t* message, int64_t begin, int64_t end, double* out);
};

enum { MAX_EXPONENT = 4096 };  // float64's, and room for the sum of all ranks
static bool has_exponent(const ApsSegment& s) {
    return aps_is_constant(s) || (s.exponent >= -MAX_EXPONENT && s.exponent <= MAX_EXPONENT);
}

namespace aps_baseline {
#include "aps_cpu_kernels.inc"
}
#ifdef APS_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define APS_AVX2 1
namespace aps_avx2 {
#include "aps_cpu_kernels.inc"
}
#pragma GCC pop_options
// clang has no such pragma: its command line says what all loops may use.
#if !defined(APS_NO_AVX512) && (defined(__clang__) ? defined(__AVX512VBMI2__) : __GNUC__ >= 8)
#define APS_AVX512 1
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 means its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
namespace aps_avx512 {
#include "aps_cpu_kernels.inc"
}
#pragma GCC diagnostic pop
#pragma GCC pop_options
#undef APS_AVX512
#define APS_HAS_AVX512 1
#endif
#undef APS_AVX2
#endif

// ---------------------------------------------------------------------------------------------- settings
static int g_threads = 1;
enum { BASELINE, AVX2, AVX512 };
static int g_vectors = -1;  // which of them is in use; -1: not asked yet

static int best_vectors() {
#ifdef APS_X86
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return BASELINE;
#ifdef APS_HAS_AVX512
    if (__builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        return AVX512;
#endif
    return AVX2;
#endif
    return BASELINE;
}

// The codecs of all families, for this machine.
static const CpuCodec* const* active() {
    if (g_vectors < 0) g_vectors = best_vectors();
#ifdef APS_HAS_AVX512
    if (g_vectors == AVX512) return aps_avx512::codecs;
#endif
#ifdef APS_X86
    if (g_vectors == AVX2) return aps_avx2::codecs;
#endif
    return aps_baseline::codecs;
}

// Subnormal numbers count, whatever the calling thread's flush-to-zero setting is.
struct FloatEnvironment {
#if defined(APS_X86)
    unsigned int saved = _mm_getcsr();
    FloatEnvironment() { _mm_setcsr((saved & ~0xe040u) | 0x1f80u); }  // clear FTZ, DAZ and the rounding mode
    ~FloatEnvironment() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
    FloatEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
        uint64_t plain = saved & ~((1ull << 24) | (3ull << 22));
        __asm__ volatile("msr fpcr, %0" ::"r"(plain));
    }
    ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#else
    FloatEnvironment() {}
#endif
};

// ---------------------------------------------------------------------------------------------- checks
enum { BAD_BITS = 1, BAD_DTYPE = 2, BAD_POINTER = 3, BAD_RANGE = 4, BAD_COUNT = 5, BAD_EXPONENT = 6, BAD_FAMILY = 7 };

static int reason_against(const ApsSegment& g, bool uses_data, int64_t length) {
    if (g.family >= APS_N_FAMILIES || !active()[g.family]) return BAD_FAMILY;
    const CpuCodec& codec = *active()[g.family];
    if (!codec.is_valid(g)) return BAD_BITS;
    if (g.dtype > 3) return BAD_DTYPE;
    if (g.n < 0 || g.n > (INT64_MAX >> 6)) return BAD_COUNT;
    if (uses_data && g.n > 0 && !g.data) return BAD_POINTER;
    if (length < 0) return 0;
    if (g.offset < 0 || g.offset > length || codec.n_bytes(g) > length - g.offset) return BAD_RANGE;
    return codec.has_exponent(g) ? 0 : BAD_EXPONENT;
}
static int64_t check(const ApsSegment* s, int64_t n_segs, bool uses_data, int64_t length) {
    for (int64_t k = 0; k < n_segs; ++k) {
        const int reason = reason_against(s[k], uses_data, length);
        if (reason) return 16 * (k + 1) + reason;
    }
    return 0;
}
static int64_t check_inputs(Inputs in, int n_in) {
    if (n_in < 1) return BAD_COUNT;
    for (int j = 0; j < n_in; ++j) {
        if (!in[j]) return BAD_POINTER;
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------- threads
// OpenMP's threads do not come along into a forked child (a DataLoader's worker), which would wait for them for ever.
static const pid_t g_loaded_by = getpid();
bool aps_is_forked() { return getpid() != g_loaded_by; }

// Call body(segment, begin, end, part) over all elements, part = 0..n_parts-1; a part is one contiguous stretch of the
// bucket, cut at whole units of its family within a segment so that no two threads write the same byte. The cuts depend
// on the table and the number of threads only.
static int n_parts(const ApsSegment* s, int64_t n_segs) {
    int64_t total = 0;
    for (int64_t k = 0; k < n_segs; ++k) total += s[k].n;
    return total < 1 << 15 ? 1 : g_threads;
}
template <class Body>
static void for_ranges(ApsSegment* s, int64_t n_segs, const Body& body) {
    int parts = n_parts(s, n_segs);
    if (parts == 1) {
        FloatEnvironment environment;
        for (int64_t k = 0; k < n_segs; ++k) {
            if (s[k].n) body(k, (int64_t)0, s[k].n, 0);
        }
        return;
    }
    int64_t total = 0;
    for (int64_t k = 0; k < n_segs; ++k) total += s[k].n;
    int64_t share = total / parts + 1;
    auto run = [&](int part) {
        FloatEnvironment environment;
        int64_t low = share * part, high = low + share, start = 0;
        for (int64_t k = 0; k < n_segs; start += s[k].n, ++k) {
            int64_t n = s[k].n;
            if (start >= high || start + n <= low) continue;
            const int64_t unit = active()[s[k].family]->unit(s[k]);
            int64_t begin = low > start ? (low - start + unit - 1) / unit * unit : 0;
            int64_t end = high < start + n ? (high - start + unit - 1) / unit * unit : n;
            if (end > n) end = n;
            if (begin < end) body(k, begin, end, part);
        }
    };
#ifdef _OPENMP
    if (!aps_is_forked()) {
#pragma omp parallel for num_threads(parts) schedule(static, 1)
        for (int part = 0; part < parts; ++part) run(part);
        return;
    }
#endif
    for (int part = 0; part < parts; ++part) run(part);  // the same cuts, so the same bits
}

static void atomic_max(uint64_t* where, uint64_t value) {
    uint64_t seen = __atomic_load_n(where, __ATOMIC_RELAXED);
    while (seen < value &&
           !__atomic_compare_exchange_n(where, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// Scratch that a calling thread keeps between calls.
struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    void* get(size_t bytes) {
        if (bytes > size) {
            free(memory);
            memory = malloc(bytes);
            size = memory ? bytes : 0;
        }
        return memory;
    }
};
static thread_local Scratch t_scratch;

// ---------------------------------------------------------------------------------------------- C interface
extern "C" {

#ifndef APS_SOURCES
#define APS_SOURCES ""
#endif
const char* aps_sources() { return APS_SOURCES; }  // a checksum of what this library was made from

int aps_set_num_threads(int n) {
    g_threads = n < 1 ? 1 : n;
    return g_threads;
}
int aps_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
// Selects the loops: 0 the baseline, 1 up to AVX2, 2 up to AVX-512, where present; returns what is in use.
int aps_use_vectors(int most) {
    const int best = best_vectors();
    g_vectors = most < BASELINE ? (int)BASELINE : most < best ? most : best;
    return g_vectors;
}
int aps_uses_vectors() {
    active();
    return g_vectors;
}
// For tests: set flush-to-zero and denormals-are-zero of the calling thread; returns the state before.
int aps_set_flush_to_zero(int on) {
#if defined(APS_X86)
    unsigned int csr = _mm_getcsr();
    _mm_setcsr(on ? csr | 0x8040u : csr & ~0x8040u);
    return (csr & 0x8040u) != 0;
#else
    (void)on;
    return 0;
#endif
}

// Keep a table of n numbers for the life of the process; returns what segments call it, or -1. One thread at a time.
// least[i]: the least number that belongs to code i + 1.
int64_t aps_register_table(const float* values, const float* least, int64_t n) {
    if (n < 2 || n > APS_TABLE_SIZE || aps_n_tables == 1 << 16) return -1;
    for (int64_t k = 1; k < n; ++k) {
        if (!(values[k] > values[k - 1])) return -1;
    }
    ApsCpuTable* made = (ApsCpuTable*)malloc(sizeof(ApsCpuTable));
    if (!made) return -1;
    ApsTable& t = made->table;
    t.n = (int32_t)n;
    for (t.width = 1; 1 << t.width < n; ++t.width) {}
    for (int k = 0; k < APS_TABLE_SIZE; ++k) {
        t.values[k] = values[k < n ? k : n - 1];
        t.least[k] = k < n - 1 ? least[k] : aps_float(0x7f800000u);
    }
    FloatEnvironment environment;
    aps_fill(t, 1.0f, made->cells);
    aps_fill(t, 1.0f, made->keys);
    made->zero = aps_mirror(t);
    aps_split_bytes(t.values, made->values);
    aps_tables[aps_n_tables] = made;
    __atomic_store_n(&aps_n_tables, aps_n_tables + 1, __ATOMIC_RELEASE);
    return aps_n_tables - 1;
}

// Exponents from the largest magnitudes that a scan found, CPU or CUDA.
void aps_finish_scan(ApsSegment* s, int64_t n_segs, const uint64_t* top, int stochastic) {
    const CpuCodec* const* codecs = active();
    const int mode = stochastic ? APS_UP : APS_NEAREST;
    for (int64_t k = 0; k < n_segs; ++k)
        s[k].exponent = codecs[s[k].family]->exponent(s[k], top[k], s[k].dtype, aps_mode(s[k], mode));
}
// The same for the sums of a reduce on the device: new exponents in s, acc_exp in the accumulation domain.
void aps_finish_reduce(ApsSegment* s, int64_t n_segs, const uint64_t* top, int keep, int stochastic, int32_t* acc_exp) {
    const CpuCodec* const* codecs = active();
    const int mode = stochastic ? APS_UP : APS_NEAREST;
    for (int64_t k = 0; k < n_segs; ++k) {
        const CpuCodec& codec = *codecs[s[k].family];
        acc_exp[k] = APS_EXP_ZERO;
        if (codec.is_scaled(s[k]))
            acc_exp[k] = keep ? (int)APS_ACC_EXP : codec.exponent(s[k], top[k], APS_F64, aps_mode(s[k], mode));
        const int found = acc_exp[k] == APS_EXP_ZERO ? (int)APS_EXP_ZERO : acc_exp[k] - APS_ACC_EXP;
        s[k].exponent = codec.sum_exponent(s[k], found, keep);
    }
}
// The checks alone, for launchers that run elsewhere.
int64_t aps_check_segments(const ApsSegment* s, int64_t n_segs, int uses_data, int64_t length) {
    return check(s, n_segs, uses_data, length);
}

int64_t aps_scan(ApsSegment* s, int64_t n_segs, int stochastic) {
    int64_t bad = check(s, n_segs, true, -1);
    if (bad) return bad;
    uint64_t* top = (uint64_t*)t_scratch.get((size_t)(n_segs + 1) * 8);
    memset(top, 0, (size_t)n_segs * 8);
    const CpuCodec* const* codecs = active();
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int) {
        atomic_max(&top[k], codecs[s[k].family]->scan(s[k], begin, end));
    });
    aps_finish_scan(s, n_segs, top, stochastic);
    return 0;
}

int64_t aps_encode_segments(ApsSegment* s, int64_t n_segs, uint8_t* message, int64_t length, int stochastic,
                            uint64_t seed) {
    int64_t bad = check(s, n_segs, true, length);
    if (bad) return bad;
    const CpuCodec* const* codecs = active();
    const int mode = stochastic ? APS_STOCHASTIC : APS_NEAREST;
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int) {
        codecs[s[k].family]->encode(s[k], message, begin, end, aps_mode(s[k], mode), seed);
    });
    return 0;
}

int64_t aps_decode_segments(ApsSegment* s, int64_t n_segs, Inputs in, int n_in, int64_t length, int accumulate) {
    int64_t bad = check(s, n_segs, true, length);
    if (!bad) bad = check_inputs(in, n_in);
    if (bad) return bad;
    const CpuCodec* const* codecs = active();
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int) {
        codecs[s[k].family]->decode(s[k], in, n_in, accumulate, begin, end);
    });
    return 0;
}

int64_t aps_reduce_segments(ApsSegment* s, int64_t n_segs, Inputs in, int n_in, int accumulate, int keep_exponent,
                            uint8_t* message, int64_t length, int stochastic, uint64_t seed) {
    int64_t bad = check(s, n_segs, false, length);
    if (!bad) bad = check_inputs(in, n_in);
    if (bad) return bad;
    const CpuCodec* const* codecs = active();
    const bool keep = keep_exponent || accumulate != APS_SUM_FLOAT;  // re-rounded sums stay within the format
    const int parts = n_parts(s, n_segs), mode = stochastic ? APS_STOCHASTIC : APS_NEAREST;
    ReduceFound* found = (ReduceFound*)t_scratch.get((size_t)(n_segs * parts + 1) * sizeof(ReduceFound));
    for (int64_t k = 0; k < n_segs * parts; ++k) found[k] = {APS_EXP_ZERO, 0};
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int part) {
        const CpuCodec& codec = *codecs[s[k].family];
        const int how = aps_mode(s[k], mode);
        found[k * parts + part] = codec.reduce(s[k], in, n_in, accumulate, keep, message, begin, end, how, seed);
    });
    auto exponent_of = [&](int64_t k) {
        int e = APS_EXP_ZERO;
        for (int part = 0; part < parts; ++part)
            e = found[k * parts + part].exponent > e ? found[k * parts + part].exponent : e;
        return e;
    };
    if (!keep) {
        for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int part) {
            const CpuCodec& codec = *codecs[s[k].family];
            if (!codec.is_scaled(s[k])) return;
            const ReduceFound& mine = found[k * parts + part];
            const int e = exponent_of(k);
            const int64_t stop = e == APS_EXP_ZERO || mine.exponent < e ? end : mine.redo;
            const int how = aps_mode(s[k], mode);
            if (begin < stop) codec.reduce_redo(s[k], in, n_in, e, message, begin, stop, how, seed);
        });
    }
    for (int64_t k = 0; k < n_segs; ++k) s[k].exponent = codecs[s[k].family]->sum_exponent(s[k], exponent_of(k), keep);
    return 0;
}

int64_t aps_residual_segments(ApsSegment* s, int64_t n_segs, const uint8_t* message, int64_t length) {
    int64_t bad = check(s, n_segs, true, length);
    if (bad) return bad;
    const CpuCodec* const* codecs = active();
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int) {
        codecs[s[k].family]->residual(s[k], message, begin, end);
    });
    return 0;
}

int64_t aps_add_segments(ApsSegment* s, int64_t n_segs, const uint64_t* targets) {
    int64_t bad = check(s, n_segs, true, -1);
    for (int64_t k = 0; !bad && k < n_segs; ++k) bad = s[k].n && !targets[k] ? 16 * (k + 1) + BAD_POINTER : 0;
    if (bad) return bad;
    for_ranges(s, n_segs, [&](int64_t k, int64_t begin, int64_t end, int) {
        float* kept = (float*)targets[k];
        if (s[k].dtype == APS_F32) {  // the same bits, faster
            const float* x = (const float*)s[k].data;
            for (int64_t i = begin; i < end; ++i) kept[i] = (float)((double)kept[i] + (double)x[i]);
            return;
        }
        for (int64_t i = begin; i < end; ++i) {
            kept[i] = aps_add_error(kept[i], aps_load((const void*)s[k].data, s[k].dtype, i), s[k].dtype);
        }
    });
    return 0;
}

int64_t aps_measure_segments(ApsSegment* s, int64_t n_segs, const uint8_t* message, int64_t length, double* out) {
    int64_t bad = check(s, n_segs, true, length);
    if (bad) return bad;
    FloatEnvironment environment;
    const CpuCodec* const* codecs = active();
    for (int64_t k = 0; k < n_segs; ++k) {
        double* total = out + 4 * k;
        total[0] = total[1] = total[2] = total[3] = 0.0;
        for (int64_t i = 0; i < s[k].n; i += APS_MEASURE_CHUNK) {
            int64_t end = i + APS_MEASURE_CHUNK < s[k].n ? i + APS_MEASURE_CHUNK : s[k].n;
            double part[4];
            codecs[s[k].family]->measure(s[k], message, i, end, part);
            for (int c = 0; c < 3; ++c) total[c] += part[c];
            if (part[3] > total[3] || part[3] != part[3]) total[3] = part[3];
        }
    }
    return 0;
}

// Flags in memory that processes share: whoever sees the value also sees what was written before it was set.
int64_t aps_least_flag(const int64_t* first, int64_t n, int64_t stride) {
    int64_t least = INT64_MAX;
    for (int64_t i = 0; i < n; ++i) {
        int64_t value = __atomic_load_n((const int64_t*)((const char*)first + i * stride), __ATOMIC_SEQ_CST);
        least = value < least ? value : least;
    }
    return least;
}
// Set one of n flags; if it was the last to reach the value, wake all processes that rest at the bell.
int64_t aps_set_flag(int64_t* first, int64_t n, int64_t stride, int64_t which, int64_t value, uint32_t* bell) {
    __atomic_store_n((int64_t*)((char*)first + which * stride), value, __ATOMIC_SEQ_CST);
    if (aps_least_flag(first, n, stride) < value) return 0;
    __atomic_add_fetch(bell, 1u, __ATOMIC_SEQ_CST);
#ifdef __linux__
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
    return 0;
}
int64_t aps_bell(const uint32_t* bell) { return __atomic_load_n(bell, __ATOMIC_SEQ_CST); }
// Sleep until the bell rings again after `heard`, or for so long.
int64_t aps_rest(uint32_t* bell, int64_t heard, int64_t nanoseconds) {
    const struct timespec limit = {(time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000)};
#ifdef __linux__
    syscall(SYS_futex, bell, FUTEX_WAIT, (uint32_t)heard, &limit, nullptr, 0);
#else
    if (aps_bell(bell) == heard) nanosleep(&limit, nullptr);
#endif
    return 0;
}

// Arrays in the format's own domain, no scaling; index i of the array is the position in the random stream of uid 0.
static ApsSegment array_segment(int64_t n, int e, int m, int specials, int dtype) {
    ApsSegment s;
    memset(&s, 0, sizeof s);
    s.n = n;
    s.exp_bits = (uint8_t)e;
    s.man_bits = (uint8_t)m;
    s.flags = specials ? APS_SPECIALS : 0;
    s.dtype = (uint8_t)dtype;
    return s;
}
static uint32_t get_code(const void* codes, int width, int64_t i) {
    return width <= 8    ? ((const uint8_t*)codes)[i]
           : width <= 16 ? ((const uint16_t*)codes)[i]
                         : ((const uint32_t*)codes)[i];
}
static void set_code(void* codes, int width, int64_t i, uint32_t code) {
    if (width <= 8) ((uint8_t*)codes)[i] = (uint8_t)code;
    else if (width <= 16) ((uint16_t*)codes)[i] = (uint16_t)code;
    else ((uint32_t*)codes)[i] = code;
}
static int64_t array_check(int64_t n, int e, int m, int dtype) {
    if (e < 1 || e > 8 || m < 0 || m > 23) return BAD_BITS;
    if (dtype < 0 || dtype > 3) return BAD_DTYPE;
    return n < 0 ? BAD_COUNT : 0;
}

int64_t aps_encode_array(const void* x, void* codes, int64_t n, int dtype, int e, int m, int specials, int stochastic,
                         uint64_t seed) {
    int64_t bad = array_check(n, e, m, dtype);
    if (bad) return bad;
    ApsSegment s = array_segment(n, e, m, specials, dtype);
    ApsFormat f = aps_format(e, m, specials != 0);
    ApsKey key = aps_key(seed, 0);
    int mode = stochastic ? APS_STOCHASTIC : APS_NEAREST;
    for_ranges(&s, 1, [&](int64_t, int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            uint32_t rnd = stochastic ? aps_random31(key, (uint64_t)i) : 0u;
            set_code(codes, f.width, i, aps_encode(aps_load(x, dtype, i), dtype, 0, f, APS_OVERFLOW_IEEE, mode, rnd));
        }
    });
    return 0;
}

int64_t aps_decode_array(const void* codes, void* out, int64_t n, int dtype, int e, int m, int specials) {
    int64_t bad = array_check(n, e, m, dtype);
    if (bad) return bad;
    ApsSegment s = array_segment(n, e, m, specials, dtype);
    ApsFormat f = aps_format(e, m, specials != 0);
    for_ranges(&s, 1, [&](int64_t, int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            aps_store(out, dtype, i, aps_decode_bits(get_code(codes, f.width, i), f, 0, dtype));
    });
    return 0;
}

int64_t aps_quantize_array(const void* x, void* out, int64_t n, int dtype, int e, int m, int specials, int stochastic,
                           uint64_t seed) {
    int64_t bad = array_check(n, e, m, dtype);
    if (bad) return bad;
    ApsSegment s = array_segment(n, e, m, specials, dtype);
    ApsFormat f = aps_format(e, m, specials != 0);
    ApsKey key = aps_key(seed, 0);
    int mode = stochastic ? APS_STOCHASTIC : APS_NEAREST;
    for_ranges(&s, 1, [&](int64_t, int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            uint32_t rnd = stochastic ? aps_random31(key, (uint64_t)i) : 0u;
            uint32_t code = aps_encode(aps_load(x, dtype, i), dtype, 0, f, APS_OVERFLOW_IEEE, mode, rnd);
            aps_store(out, dtype, i, aps_decode_bits(code, f, 0, dtype));
        }
    });
    return 0;
}

// The random bits that stochastic rounding gives the elements from `first` on of the layer uid, for codecs in Python.
int64_t aps_random_array(uint32_t* out, int64_t n, uint64_t seed, uint32_t uid, int64_t first) {
    const ApsKey key = aps_key(seed, uid);
    for (int64_t i = 0; i < n; ++i) out[i] = aps_random31(key, (uint64_t)(first + i));
    return 0;
}
// The same for QSGD: 16 bits.
int64_t aps_random16_array(uint32_t* out, int64_t n, uint64_t seed, uint32_t uid, int64_t first) {
    const ApsKey key = aps_key(seed, uid);
    for (int64_t i = 0; i < n; ++i) out[i] = aps_random16(key, (uint64_t)(first + i));
    return 0;
}

int64_t aps_pack_codes(const void* codes, int64_t n, int width, uint8_t* out) {
    if (width < 1 || width > 32) return BAD_BITS;
    uint32_t mask = (uint32_t)((1ull << width) - 1ull);
    for (int64_t i = 0; i < n; i += 8) {
        uint32_t group[8];
        int count = (int)(n - i < 8 ? n - i : 8);
        for (int k = 0; k < count; ++k) group[k] = get_code(codes, width, i + k) & mask;
        aps_put8(out + (i >> 3) * width, group, count, width);
    }
    return 0;
}

int64_t aps_unpack_codes(const uint8_t* bytes, int64_t n, int width, void* codes) {
    if (width < 1 || width > 32) return BAD_BITS;
    for (int64_t i = 0; i < n; ++i) set_code(codes, width, i, aps_get(bytes, i, width));
    return 0;
}

}  // extern "C"
