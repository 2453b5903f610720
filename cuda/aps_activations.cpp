// CPU side of horovod_aps.activations: streams of blocks, masks and indices, called through ctypes (which releases the
// GIL). The arithmetic of a block is in aps_activations.h, its AVX2 twin in aps_activations_avx2.inc.
//
// Functions return a size or 0, and a negative number for an error: -1 an argument, -2 no memory, -3 a malformed stream.
#include "aps_activations.h"

#include <stdlib.h>

#include <memory>
#include <new>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#define ACT_X86 1
#endif

bool aps_is_forked();  // aps_cpu.cpp: OpenMP would hang
extern "C" int aps_uses_vectors();

enum { ACT_BAD_ARGUMENT = -1, ACT_NO_MEMORY = -2, ACT_MALFORMED = -3 };

namespace {

struct RoundingToNearest {  // and subnormal numbers count, whatever the calling thread's settings are
#ifdef ACT_X86
    unsigned int saved = _mm_getcsr();
    RoundingToNearest() { _mm_setcsr((saved & ~0xe040u) | 0x1f80u); }
    ~RoundingToNearest() { _mm_setcsr(saved); }
#else
    RoundingToNearest() {}
#endif
};

struct Job {
    const void* data;
    void* out;
    int64_t n;
    ActQuantizer q;
    int64_t origin = 0;  // what of the tensor out begins with
    bool is_guided = false;
    ActGuide guide;
    const uint8_t* mask = nullptr;
    const float* predicted = nullptr;  // of the chunk at work
    const float* predicted_at(int64_t begin) const { return predicted ? predicted + begin % ACT_CHUNK : nullptr; }
};
int aps_popcount(uint64_t word) { return __builtin_popcountll(word); }

// ---------------------------------------------------------------------------------------------- chunks
// One chunk of blocks; the two instruction sets differ in what does a whole block.
struct Baseline {
    static ActPlan encode(const Job& job, int64_t begin, uint8_t* out) {
        int codes[ACT_BLOCK];
        if (job.is_guided) {
            const uint64_t mask = act_mask_word(job.mask, begin, job.n);
            const int good = act_guided_codes(job.data, begin, job.n, job.guide, mask, job.predicted_at(begin), codes);
            ActPlan p = act_plan_codes(codes, good, job.q.dtype);
            if (good && job.mask) act_split_codes(codes, mask, &p);
            if (p.mode == ACT_SPLIT) {
                act_write_split(codes, mask, p, out);
            } else {
                act_write(job.data, begin, job.n, codes, p, job.q.dtype, out);
            }
            return p;
        }
        const int good = act_codes(job.data, begin, job.n, job.q, codes);
        const ActPlan p = act_plan_codes(codes, good, job.q.dtype);
        act_write(job.data, begin, job.n, codes, p, job.q.dtype, out);
        return p;
    }
    static bool decode(const Job& job, const uint8_t* in, int64_t, const ActPlan& p, int64_t begin) {
        int codes[ACT_BLOCK];
        const uint64_t mask = job.is_guided ? act_mask_word(job.mask, begin, job.n) : 0;
        if (p.mode == ACT_SPLIT) {
            if (!act_read_split(in, mask, p, codes)) return false;
        } else if (p.mode != ACT_RAW && !act_read(in, p, codes)) {
            return false;
        }
        const int64_t at = begin - job.origin, n = job.n - job.origin;
        if (job.is_guided && p.mode != ACT_RAW) {
            act_guided_restore(codes, job.guide, mask, job.predicted_at(begin), job.out, begin, job.origin, job.n);
        } else {
            act_restore(in, p, codes, job.q, job.out, at, n);
        }
        return true;
    }
};

}  // namespace

#ifdef ACT_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi2,popcnt,lzcnt")
namespace {
namespace act_avx2 {
#include "aps_activations_avx2.inc"
#include "aps_activations_chunks.inc"

template <int DTYPE>
struct Avx2 {
    static inline __attribute__((always_inline)) ActPlan encode(const Job& job, int64_t begin, uint8_t* out) {
        if (begin + ACT_BLOCK > job.n || job.q.inverse == 0.0f) return Baseline::encode(job, begin, out);
        if (job.is_guided) {
            const uint64_t mask = act_mask_word(job.mask, begin, job.n);
            return encode_guided<DTYPE>(job.data, begin, mask, job.mask != nullptr, job.predicted_at(begin),
                                        GuideConstants(job.guide), out);
        }
        return encode_block<DTYPE>(job.data, begin, Constants(job.q), out);
    }
    static inline __attribute__((always_inline)) bool decode(const Job& job, const uint8_t* in, int64_t room,
                                                             const ActPlan& p, int64_t begin) {
        if (begin + ACT_BLOCK > job.n || (job.is_guided && job.q.inverse == 0.0f)) {
            return Baseline::decode(job, in, room, p, begin);
        }
        uint8_t copy[ACT_BLOCK * 4 + 16];
        if (room < p.size + 16) {
            memcpy(copy, in, (size_t)p.size);
            memset(copy + p.size, 0, 16);
            in = copy;
        }
        if (job.is_guided) {
            const uint64_t mask = act_mask_word(job.mask, begin, job.n);
            return decode_guided<DTYPE>(in, p, mask, job.predicted_at(begin), GuideConstants(job.guide), job.out, begin,
                                        job.origin);
        }
        return decode_block<DTYPE>(in, p, Constants(job.q), job.out, begin - job.origin);
    }
};
int64_t encode_chunk_vector(const Job& job, int64_t chunk, uint8_t* out) {
    if (job.q.dtype == APS_F32) return encode_chunk<Avx2<APS_F32>>(job, chunk, out);
    if (job.q.dtype == APS_F16) return encode_chunk<Avx2<APS_F16>>(job, chunk, out);
    return encode_chunk<Avx2<APS_BF16>>(job, chunk, out);
}
bool decode_chunk_vector(const Job& job, int64_t chunk, const uint8_t* in, int64_t size, int64_t room) {
    if (job.q.dtype == APS_F32) return decode_chunk<Avx2<APS_F32>>(job, chunk, in, size, room);
    if (job.q.dtype == APS_F16) return decode_chunk<Avx2<APS_F16>>(job, chunk, in, size, room);
    return decode_chunk<Avx2<APS_BF16>>(job, chunk, in, size, room);
}
}  // namespace act_avx2
using act_avx2::decode_chunk_vector;
using act_avx2::encode_chunk_vector;
}  // namespace
#pragma GCC pop_options
#endif

namespace {

namespace act_baseline {
#include "aps_activations_chunks.inc"
}
int64_t encode_chunk_baseline(const Job& job, int64_t chunk, uint8_t* out) {
    return act_baseline::encode_chunk<Baseline>(job, chunk, out);
}
bool decode_chunk_baseline(const Job& job, int64_t chunk, const uint8_t* in, int64_t size, int64_t room) {
    return act_baseline::decode_chunk<Baseline>(job, chunk, in, size, room);
}

}  // namespace

namespace {

bool use_vectors() {
#ifdef ACT_X86
    static const bool able = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    return able && aps_uses_vectors();
#else
    return false;
#endif
}

bool is_valid(int64_t n, int dtype) {
    return n >= 0 && n <= ((int64_t)1 << 40) && (dtype == APS_F32 || dtype == APS_F16 || dtype == APS_BF16);
}
int64_t chunks_of(int64_t n) { return (n + ACT_CHUNK - 1) / ACT_CHUNK; }
int64_t chunk_room(int dtype) { return 2 * ACT_CHUNK_BLOCKS + (int64_t)ACT_CHUNK * aps_dtype_size(dtype) + 16; }

int64_t encode_one(const Job& job, int64_t chunk, uint8_t* out, bool vectors) {
#ifdef ACT_X86
    if (vectors) return encode_chunk_vector(job, chunk, out);
#endif
    (void)vectors;
    return encode_chunk_baseline(job, chunk, out);
}
bool decode_one(const Job& job, int64_t chunk, const uint8_t* in, int64_t size, int64_t room, bool vectors) {
#ifdef ACT_X86
    if (vectors) return decode_chunk_vector(job, chunk, in, size, room);
#endif
    (void)vectors;
    return decode_chunk_baseline(job, chunk, in, size, room);
}

}  // namespace

// How a guided stream was made; as in codec.py. A prediction is the sum of its sources where that is positive, else
// zero; a source is a stream of as many values, times a scale and plus a shift of its channel if these are there.
struct ActHints;
struct ActSource {
    const uint8_t* stream;
    int64_t size;
    const ActHints* hints;  // of the stream, or none
    const float* scale;
    const float* shift;
    int64_t n_channels, plane;  // value i belongs to channel i / plane % n_channels
    int64_t dtype;
};
struct ActHints {
    const uint8_t* mask;  // (n + 7) / 8 bytes, or none
    int64_t n_sources;
    const ActSource* sources;
};

namespace {

int flags_of(const ActHints* hints) {
    return (hints && hints->mask ? ACT_MASKED : 0) | (hints && hints->n_sources ? ACT_PREDICTED : 0);
}
enum { ACT_MAX_SOURCES = 2, ACT_MAX_DEPTH = 16 };

class Reader;
// The prediction of one chunk after the other.
class Predictor {
public:
    int64_t open(const ActHints& hints, int64_t n, int depth, bool vectors);
    bool read(int64_t chunk);
    const float* values() const { return values_.get(); }

private:
    const ActSource* sources_ = nullptr;
    int64_t n_ = 0;
    std::unique_ptr<float[]> values_, decoded_;
    std::unique_ptr<uint16_t[]> halves_;
    std::vector<std::unique_ptr<Reader>> readers_;
};
// A stream, read chunk by chunk, forwards.
class Reader {
public:
    int64_t open(const uint8_t* stream, int64_t size, int64_t n, int dtype, const ActHints* hints, int depth,
                 bool vectors);
    bool read(int64_t chunk, void* out, int64_t origin);

private:
    const uint8_t* stream_ = nullptr;
    int64_t size_ = 0, at_ = 0, next_ = 0;
    bool vectors_ = false;
    Job job_;
    std::unique_ptr<Predictor> predictor_;
};

int64_t Predictor::open(const ActHints& hints, int64_t n, int depth, bool vectors) {
    if (hints.n_sources < 1 || hints.n_sources > ACT_MAX_SOURCES || !hints.sources || depth > ACT_MAX_DEPTH) {
        return ACT_BAD_ARGUMENT;
    }
    sources_ = hints.sources;
    n_ = n;
    values_.reset(new (std::nothrow) float[ACT_CHUNK]);
    decoded_.reset(new (std::nothrow) float[ACT_CHUNK]);
    halves_.reset(new (std::nothrow) uint16_t[ACT_CHUNK]);
    if (!values_ || !decoded_ || !halves_) return ACT_NO_MEMORY;
    for (int64_t k = 0; k < hints.n_sources; ++k) {
        const ActSource& s = sources_[k];
        if (s.scale && (!s.shift || s.n_channels < 1 || s.plane < 1)) return ACT_BAD_ARGUMENT;
        readers_.emplace_back(new (std::nothrow) Reader);
        if (!readers_.back()) return ACT_NO_MEMORY;
        const int64_t status = readers_.back()->open(s.stream, s.size, n, (int)s.dtype, s.hints, depth + 1, vectors);
        if (status) return status;
    }
    return 0;
}
bool Predictor::read(int64_t chunk) {
    const int64_t first = chunk * ACT_CHUNK;
    const int count = n_ - first < ACT_CHUNK ? (int)(n_ - first) : (int)ACT_CHUNK;
    float* values = values_.get();
    for (int i = 0; i < ACT_CHUNK; ++i) values[i] = 0.0f;
    for (size_t k = 0; k < readers_.size(); ++k) {
        const ActSource& s = sources_[k];
        const int dtype = (int)s.dtype;
        float* x = decoded_.get();
        void* out = dtype == APS_F32 ? (void*)x : halves_.get();
        if (!readers_[k]->read(chunk, out, first)) return false;
        for (int i = 0; i < count && dtype != APS_F32; ++i) x[i] = act_load(out, dtype, i);
        if (!s.scale) {
            for (int i = 0; i < count; ++i) values[i] += x[i];
            continue;
        }
        int64_t channel = first / s.plane % s.n_channels, left = s.plane - first % s.plane;
        for (int i = 0; i < count;) {
            const int end = left < count - i ? i + (int)left : count;
            const float a = s.scale[channel], b = s.shift[channel];
            for (; i < end; ++i) values[i] += a * x[i] + b;
            left = s.plane;
            channel = channel + 1 < s.n_channels ? channel + 1 : 0;
        }
    }
    for (int i = 0; i < count; ++i) {
        const float v = values[i] > 0.0f ? values[i] : 0.0f;
        values[i] = v < 3e38f ? v : 3e38f;
    }
    return true;
}

int64_t Reader::open(const uint8_t* stream, int64_t size, int64_t n, int dtype, const ActHints* hints, int depth,
                     bool vectors) {
    if (!is_valid(n, dtype) || size < 0 || !stream) return ACT_BAD_ARGUMENT;
    ActHeader header;
    if (size < (int64_t)sizeof header) return ACT_MALFORMED;
    memcpy(&header, stream, sizeof header);
    const int64_t n_chunks = chunks_of(n);
    const int flags = flags_of(hints);
    if (header.magic != ACT_MAGIC || header.dtype != dtype || header.n != n || header.size != size ||
        header.n_chunks != n_chunks || !(header.bound >= 0.0f) || !(header.bound <= 2e30f) || header.flags != flags ||
        header.coarse > ACT_MAX_COARSE || (header.coarse && flags != ACT_MASKED)) {
        return ACT_MALFORMED;
    }
    const int64_t table = (int64_t)sizeof header;
    if (size - table < 4 * n_chunks) return ACT_MALFORMED;
    int64_t end = table + 4 * n_chunks;
    for (int64_t chunk = 0; chunk < n_chunks; ++chunk) {
        const int64_t bytes = (int64_t)act_get64(stream + table + 4 * chunk, 4);
        if (bytes > size - end) return ACT_MALFORMED;
        end += bytes;
    }
    if (end != size) return ACT_MALFORMED;
    stream_ = stream;
    size_ = size;
    at_ = table + 4 * n_chunks;
    vectors_ = vectors;
    job_.data = nullptr;
    job_.n = n;
    job_.q = act_quantizer(header.bound, 0.0, dtype);
    job_.is_guided = flags != 0;
    if (!flags) return 0;
    job_.guide = act_guide(header.bound, 0.0, dtype, header.coarse, flags & ACT_PREDICTED);
    job_.mask = hints->mask;
    if (!(flags & ACT_PREDICTED)) return 0;
    predictor_.reset(new (std::nothrow) Predictor);
    if (!predictor_) return ACT_NO_MEMORY;
    job_.predicted = nullptr;
    return predictor_->open(*hints, n, depth, vectors);
}
bool Reader::read(int64_t chunk, void* out, int64_t origin) {
    const uint8_t* table = stream_ + sizeof(ActHeader);
    for (; next_ < chunk; ++next_) at_ += (int64_t)act_get64(table + 4 * next_, 4);
    if (predictor_) {
        if (!predictor_->read(chunk)) return false;
        job_.predicted = predictor_->values();
    }
    job_.out = out;
    job_.origin = origin;
    const int64_t bytes = (int64_t)act_get64(table + 4 * chunk, 4);
    const bool good = decode_one(job_, chunk, stream_ + at_, bytes, size_ - at_, vectors_);
    at_ += bytes;
    next_ = chunk + 1;
    return good;
}

// What the last encode of this thread has left for aps_act_fetch: parts with room for the worst case, of which only
// the pages that are written become resident.
struct Made {
    uint8_t* memory = nullptr;
    int64_t room = 0;
    ActHeader header;
    uint32_t* sizes = nullptr;
    int64_t n_sizes = 0;
    int64_t share = 0;  // chunks per part
    int64_t part_room = 0;
    ~Made() {
        free(memory);
        free(sizes);
    }
    bool reserve(int64_t bytes, int64_t n_chunks) {
        if (bytes > room) {
            free(memory);
            memory = (uint8_t*)malloc((size_t)bytes);
            room = memory ? bytes : 0;
        }
        if (n_chunks > n_sizes) {
            free(sizes);
            sizes = (uint32_t*)malloc(sizeof(uint32_t) * (size_t)n_chunks);
            n_sizes = sizes ? n_chunks : 0;
        }
        return memory && sizes;
    }
};
thread_local Made t_made;

template <class Body>
void for_parts(int n_parts, const Body& body) {
#ifdef _OPENMP
    if (n_parts > 1 && !aps_is_forked()) {
#pragma omp parallel for num_threads(n_parts) schedule(static, 1)
        for (int part = 0; part < n_parts; ++part) body(part);
        return;
    }
#endif
    for (int part = 0; part < n_parts; ++part) body(part);
}
int parts_for(int64_t n_chunks, int n_threads) {
    if (n_threads < 1 || n_chunks < 16) return 1;
    return n_threads < n_chunks ? n_threads : (int)n_chunks;
}

}  // namespace

// ---------------------------------------------------------------------------------------------- C interface
extern "C" {

// Compress n values within eb; returns the size of the stream, which aps_act_fetch of the same thread then writes. The
// stream does not depend on the number of threads. hints, or none: what decoding will be given too; where their mask is
// off the bound is eb·2^coarse.
int64_t aps_act_encode(const void* data, int64_t n, int dtype, double eb, const ActHints* hints, int coarse,
                       int n_threads) {
    if (!is_valid(n, dtype) || (n && !data) || !(eb >= 0) || coarse < 0 || coarse > ACT_MAX_COARSE) {
        return ACT_BAD_ARGUMENT;
    }
    const int flags = flags_of(hints);
    if (coarse && flags != ACT_MASKED) return ACT_BAD_ARGUMENT;
    Job job;
    job.data = data;
    job.out = nullptr;
    job.n = n;
    const float bound = act_bound(eb, dtype);
    job.q = act_quantizer(bound, eb, dtype);
    job.is_guided = flags != 0;
    if (flags) {
        job.guide = act_guide(bound, eb, dtype, coarse, flags & ACT_PREDICTED);
        job.mask = hints->mask;
    }
    const int64_t n_chunks = chunks_of(n);
    const int parts = parts_for(n_chunks, n_threads);
    Made& made = t_made;
    made.share = (n_chunks + parts - 1) / parts;
    made.part_room = made.share * chunk_room(dtype) + 16;
    if (!made.reserve(parts * made.part_room + 16, n_chunks + 1)) return ACT_NO_MEMORY;
    const bool vectors = use_vectors();
    int64_t failed = 0;
    for_parts(parts, [&](int part) {
        RoundingToNearest environment;
        uint8_t* out = made.memory + part * made.part_room;
        const int64_t end = (part + 1) * made.share < n_chunks ? (part + 1) * made.share : n_chunks;
        Predictor predictor;
        Job own = job;
        int64_t status = flags & ACT_PREDICTED ? predictor.open(*hints, n, 0, vectors) : 0;
        for (int64_t chunk = part * made.share; chunk < end && !status; ++chunk) {
            if (flags & ACT_PREDICTED) {
                if (!predictor.read(chunk)) status = ACT_MALFORMED;
                own.predicted = predictor.values();
            }
            const int64_t size = encode_one(own, chunk, out, vectors);
            made.sizes[chunk] = (uint32_t)size;
            out += size;
        }
        if (status) __atomic_store_n(&failed, status, __ATOMIC_RELAXED);
    });
    if (failed) return failed;
    int64_t total = (int64_t)sizeof(ActHeader) + 4 * n_chunks;
    for (int64_t chunk = 0; chunk < n_chunks; ++chunk) total += made.sizes[chunk];
    memset(&made.header, 0, sizeof made.header);
    made.header.magic = ACT_MAGIC;
    made.header.dtype = (uint8_t)dtype;
    made.header.flags = (uint8_t)flags;
    made.header.coarse = (uint8_t)coarse;
    made.header.n = n;
    made.header.bound = bound;
    made.header.n_chunks = (uint32_t)n_chunks;
    made.header.size = total;
    return total;
}

// Copy what the thread's last aps_act_encode made; `size` must be what that returned.
int64_t aps_act_fetch(uint8_t* out, int64_t size) {
    Made& made = t_made;
    if (!out || !made.memory || made.header.magic != ACT_MAGIC || size != made.header.size) return ACT_BAD_ARGUMENT;
    const int64_t n_chunks = made.header.n_chunks;
    memcpy(out, &made.header, sizeof made.header);
    out += sizeof made.header;
    memcpy(out, made.sizes, 4 * (size_t)n_chunks);
    out += 4 * n_chunks;
    for (int64_t first = 0, part = 0; first < n_chunks; first += made.share, ++part) {
        int64_t bytes = 0;
        for (int64_t chunk = first; chunk < n_chunks && chunk < first + made.share; ++chunk) bytes += made.sizes[chunk];
        memcpy(out, made.memory + part * made.part_room, (size_t)bytes);
        out += bytes;
    }
    return 0;
}

// Restore n values of a dtype from any `size` bytes, with the hints that they were made with. What a malformed stream
// has written to out by then stays there.
int64_t aps_act_decode(const uint8_t* stream, int64_t size, void* out, int64_t n, int dtype, const ActHints* hints,
                       int n_threads) {
    if (!is_valid(n, dtype) || (n && !out)) return ACT_BAD_ARGUMENT;
    const int64_t n_chunks = chunks_of(n);
    const int parts = parts_for(n_chunks, n_threads);
    const int64_t share = (n_chunks + parts - 1) / parts;
    const bool vectors = use_vectors();
    int64_t failed = 0;
    for_parts(parts, [&](int part) {
        RoundingToNearest environment;
        Reader reader;
        int64_t status = reader.open(stream, size, n, dtype, hints, 0, vectors);
        const int64_t last = (part + 1) * share < n_chunks ? (part + 1) * share : n_chunks;
        for (int64_t chunk = part * share; chunk < last && !status; ++chunk) {
            if (!reader.read(chunk, out, 0)) status = ACT_MALFORMED;
        }
        if (status) __atomic_store_n(&failed, status, __ATOMIC_RELAXED);
    });
    return failed;
}

// ---- one bit per value

// Whether all values (as bits of item_size bytes) are zero or one other value, which goes to *other.
int aps_act_two_valued(const void* data, int64_t n, int item_size, uint64_t* other) {
    if (n < 0 || (n && !data) || !other || (item_size != 1 && item_size != 2 && item_size != 4)) return 0;
    const uint8_t* p = (const uint8_t*)data;
    *other = 0;
    for (int64_t begin = 0; begin < n; begin += ACT_CHUNK) {
        const int64_t end = begin + ACT_CHUNK < n ? begin + ACT_CHUNK : n;
        for (int64_t i = begin; i < end && !*other; ++i) *other = act_get64(p + i * item_size, item_size);
        uint32_t wrong = 0;
        const uint32_t value = (uint32_t)*other;
        if (item_size == 4) {
            for (int64_t i = begin; i < end; ++i) {
                const uint32_t u = ((const uint32_t*)data)[i];
                wrong |= u & (u ^ value ? 0xffffffffu : 0u);
            }
        } else if (item_size == 2) {
            for (int64_t i = begin; i < end; ++i) {
                const uint32_t u = ((const uint16_t*)data)[i];
                wrong |= u & (u ^ value ? 0xffffffffu : 0u);
            }
        } else {
            for (int64_t i = begin; i < end; ++i) wrong |= p[i] & (p[i] ^ value ? 0xffu : 0u);
        }
        if (wrong) return 0;
    }
    return 1;
}

// Bit i of out: value i is not zero, or for a float dtype with `positive`, not <= 0 (so NaN counts). dtype -1: bytes.
int64_t aps_act_mask(const void* data, int64_t n, int dtype, int positive, uint8_t* out) {
    if (n < 0 || (n && (!data || !out)) || (dtype != -1 && !is_valid(n, dtype))) return ACT_BAD_ARGUMENT;
    for (int64_t begin = 0; begin < n; begin += 64) {
        const int count = n - begin < 64 ? (int)(n - begin) : 64;
        uint8_t set[64];
        if (dtype == -1) {
            for (int i = 0; i < count; ++i) set[i] = ((const uint8_t*)data)[begin + i] != 0;
        } else if (dtype == APS_F32) {
            const float* x = (const float*)data + begin;
            if (positive)
                for (int i = 0; i < count; ++i) set[i] = !(x[i] <= 0.0f);
            else
                for (int i = 0; i < count; ++i) set[i] = x[i] != 0.0f;
        } else {  // the bits tell as well: sign, and whether anything but the sign is set; NaN has something set
            const uint16_t* x = (const uint16_t*)data + begin;
            const uint32_t top = dtype == APS_F16 ? 0x7c00u : 0x7f80u;
            for (int i = 0; i < count; ++i) {
                const uint32_t magnitude = x[i] & 0x7fffu;
                set[i] = magnitude != 0 && (!positive || !(x[i] >> 15) || magnitude > top);
            }
        }
        uint64_t word = 0;
        for (int i = 0; i < count; i += 8) {
            uint64_t eight = 0;
            const int some = count - i < 8 ? count - i : 8;
            for (int k = 0; k < some; ++k) eight |= (uint64_t)set[i + k] << (8 * k);
            // Gather the lowest bit of eight bytes into one.
            word |= ((eight * 0x0102040810204080ull) >> 56) << i;
        }
        act_put64(out + begin / 8, word, (count + 7) / 8);
    }
    return 0;
}
// The opposite: value i becomes `other` (item_size bytes) where bit i is set, else zero. bits: exactly (n + 7) / 8 bytes.
int64_t aps_act_unmask(const uint8_t* bits, int64_t n, int item_size, uint64_t other, void* out) {
    if (n < 0 || (n && (!bits || !out))) return ACT_BAD_ARGUMENT;
    if (item_size == 4) {
        uint32_t* x = (uint32_t*)out;
        for (int64_t i = 0; i < n; ++i) x[i] = (uint32_t)other & (0u - (bits[i >> 3] >> (i & 7) & 1u));
    } else if (item_size == 2) {
        uint16_t* x = (uint16_t*)out;
        for (int64_t i = 0; i < n; ++i) x[i] = (uint16_t)((uint32_t)other & (0u - (bits[i >> 3] >> (i & 7) & 1u)));
    } else if (item_size == 1) {
        uint8_t* x = (uint8_t*)out;
        for (int64_t i = 0; i < n; ++i) x[i] = (uint8_t)((uint32_t)other & (0u - (bits[i >> 3] >> (i & 7) & 1u)));
    } else {
        return ACT_BAD_ARGUMENT;
    }
    return 0;
}

// ---- indices of max-pooling: where in its window, instead of where in the picture

struct ActPool {  // 48 bytes: planes of out_height x out_width indices into height x width
    int64_t n_planes;
    int32_t height, width, out_height, out_width;
    int32_t step_down, step_right;  // of the windows
    int32_t first_down, first_right, n_right, n_bits;
};

static bool is_valid_pool(const ActPool& p) {
    return p.n_planes >= 0 && p.height > 0 && p.width > 0 && p.out_height > 0 && p.out_width > 0 &&
           (int64_t)p.height * p.width < INT32_MAX && (int64_t)p.out_height * p.out_width < INT32_MAX &&
           p.n_planes < ((int64_t)1 << 40) / ((int64_t)p.out_height * p.out_width);
}
// Find steps, first positions and bits for the indices; 0 if they do not look like pooling (8 bits or fewer).
int64_t aps_act_pool_plan(const int64_t* index, ActPool* pool) {
    if (!pool || !is_valid_pool(*pool) || (pool->n_planes && !index)) return ACT_BAD_ARGUMENT;
    ActPool& p = *pool;
    const int64_t area = (int64_t)p.height * p.width;
    p.step_down = (p.height + p.out_height / 2) / p.out_height;
    p.step_right = (p.width + p.out_width / 2) / p.out_width;
    int64_t low_down = area, low_right = area, high_down = -area, high_right = -area;
    for (int64_t plane = 0; plane < p.n_planes; ++plane) {
        for (int32_t row = 0; row < p.out_height; ++row) {
            for (int32_t column = 0; column < p.out_width; ++column) {
                const int64_t at = *index++;
                if (at < 0 || at >= area) return 0;
                const uint32_t r = (uint32_t)at / (uint32_t)p.width, c = (uint32_t)at - r * (uint32_t)p.width;
                const int64_t down = (int64_t)r - (int64_t)row * p.step_down;
                const int64_t right = (int64_t)c - (int64_t)column * p.step_right;
                low_down = down < low_down ? down : low_down;
                high_down = down > high_down ? down : high_down;
                low_right = right < low_right ? right : low_right;
                high_right = right > high_right ? right : high_right;
            }
        }
        if ((high_down - low_down + 1) * (high_right - low_right + 1) > 256) return 0;
    }
    if (!p.n_planes) return 0;
    p.first_down = (int32_t)low_down;
    p.first_right = (int32_t)low_right;
    p.n_right = (int32_t)(high_right - low_right + 1);
    p.n_bits = act_bits((uint32_t)((high_down - low_down + 1) * p.n_right - 1));
    return 1;
}
int64_t aps_act_pool_size(const ActPool* pool) {
    if (!pool || !is_valid_pool(*pool) || pool->n_bits < 0 || pool->n_bits > 8) return ACT_BAD_ARGUMENT;
    const int64_t n = pool->n_planes * pool->out_height * pool->out_width;
    return (n * pool->n_bits + 7) / 8;
}
int64_t aps_act_pool_encode(const int64_t* index, const ActPool* pool, uint8_t* out) {
    if (aps_act_pool_size(pool) < 0) return ACT_BAD_ARGUMENT;
    const ActPool& p = *pool;
    uint32_t word = 0;
    int filled = 0;
    for (int64_t plane = 0; plane < p.n_planes; ++plane) {
        for (int32_t row = 0; row < p.out_height; ++row) {
            for (int32_t column = 0; column < p.out_width; ++column) {
                const uint32_t at = (uint32_t)*index++;
                const uint32_t r = at / (uint32_t)p.width, c = at - r * (uint32_t)p.width;
                const int32_t down = (int32_t)r - row * p.step_down - p.first_down;
                const int32_t right = (int32_t)c - column * p.step_right - p.first_right;
                word |= (uint32_t)(down * p.n_right + right) << filled;
                filled += p.n_bits;
                if (filled >= 8) {
                    *out++ = (uint8_t)word;
                    word >>= 8;
                    filled -= 8;
                }
            }
        }
    }
    if (filled) *out = (uint8_t)word;
    return 0;
}
// bits: exactly aps_act_pool_size bytes, of any content; what lies outside the picture is malformed.
int64_t aps_act_pool_decode(const uint8_t* bits, const ActPool* pool, int64_t* index) {
    if (aps_act_pool_size(pool) < 0 || pool->n_right < 1 || pool->n_right > 256) return ACT_BAD_ARGUMENT;
    const ActPool& p = *pool;
    const int64_t area = (int64_t)p.height * p.width;
    uint32_t word = 0;
    int filled = 0;
    for (int64_t plane = 0; plane < p.n_planes; ++plane) {
        for (int32_t row = 0; row < p.out_height; ++row) {
            for (int32_t column = 0; column < p.out_width; ++column) {
                if (filled < p.n_bits) {
                    word |= (uint32_t)*bits++ << filled;
                    filled += 8;
                }
                const uint32_t code = word & ((1u << p.n_bits) - 1u);
                word >>= p.n_bits;
                filled -= p.n_bits;
                const int64_t r = (int64_t)row * p.step_down + p.first_down + code / (uint32_t)p.n_right;
                const int64_t c = (int64_t)column * p.step_right + p.first_right + code % (uint32_t)p.n_right;
                const int64_t at = r * p.width + c;
                if (at < 0 || at >= area) return ACT_MALFORMED;
                *index++ = at;
            }
        }
    }
    return 0;
}

}  // extern "C"
