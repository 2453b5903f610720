// CUDA kernels of the families with buckets. Included by aps_kernels.cu; the same bits as aps_cpu_buckets.inc.
//
// Two launches write a message: one the scales of the buckets, the next the codes, which read them there. The tiles of
// the first are whole buckets: as many as fill a tile, at least one. Eight lanes of a warp add up a chunk, in the
// order that the CPU keeps; a warp takes four chunks at a time of a bucket that has several.

// Call a template over the codec of a segment's family, named Codec in the call.
#define APS_BY_BUCKETS(s, ...)            \
    switch ((s).family) {                 \
        case APS_FAMILY_QSGD: {           \
            typedef ApsQsgdCodec Codec;   \
            __VA_ARGS__;                  \
            break;                        \
        }                                 \
        case APS_FAMILY_TABLE: {          \
            typedef ApsTableCodec Codec;  \
            __VA_ARGS__;                  \
            break;                        \
        }                                 \
        case APS_FAMILY_MX: {             \
            typedef ApsMxCodec Codec;     \
            __VA_ARGS__;                  \
            break;                        \
        }                                 \
        default: {                        \
            typedef ApsOneBitCodec Codec; \
            __VA_ARGS__;                  \
        }                                 \
    }

// ---------------------------------------------------------------------------------------------- where values come from
// The sides of the bucket of one element after the other.
template <class Codec>
struct Cursor {
    const uint8_t* base;
    int64_t size, bucket, next;
    float sides[Codec::n_sides];
    __device__ __forceinline__ Cursor(const ApsSegment& s, const uint8_t* base, int64_t i)
        : base(base), size(aps_bucket_size(s)), bucket(i / size), next((bucket + 1) * size) {
        aps_load_sides<Codec>(base, bucket, sides);
    }
    // Whether i, the element after the last, begins a bucket.
    __device__ __forceinline__ bool moves_to(int64_t i) {
        if (i != next) return false;
        ++bucket, next += size;
        aps_load_sides<Codec>(base, bucket, sides);
        return true;
    }
};

template <class Codec>
struct DataValues {
    const ApsSegment& s;
    __device__ __forceinline__ DataValues(const ApsSegment& s, const Codec&, const uint64_t*, int) : s(s) {}
    __device__ __forceinline__ float operator()(int64_t i) const { return aps_load_float(s, i); }
    __device__ __forceinline__ void group(int64_t i, int64_t count, uint32_t* bits) const {
        if (s.dtype != APS_F64) return load_floats(s, i, count, bits);
        APS_UNROLL bits[k] = k < count ? aps_bits(aps_load_float(s, i + k)) : 0u;
    }
};

// Sums of the inputs, in their order.
template <class Codec>
struct SumValues {
    const ApsSegment& s;
    const Codec& codec;
    const uint64_t* inputs;
    int n_in;
    __device__ __forceinline__ SumValues(const ApsSegment& s, const Codec& codec, const uint64_t* inputs, int n_in)
        : s(s), codec(codec), inputs(inputs), n_in(n_in) {}
    __device__ __forceinline__ float operator()(int64_t i) const {
        float acc = 0.0f;
        for (int j = 0; j < n_in; ++j) {
            const float v = aps_bucket_value(s, codec, (const uint8_t*)inputs[j] + s.offset, i);
            acc = j ? acc + v : v;
        }
        return acc;
    }
    __device__ __forceinline__ void group(int64_t i, int64_t count, uint32_t* bits) const {
        const int64_t side = aps_side_bytes<Codec>(s);
        float acc[APS_GROUP];
        for (int j = 0; j < n_in; ++j) {
            const uint8_t* base = (const uint8_t*)inputs[j] + s.offset;
            load_codes(base + side, i, count, codec.width, bits);
            Cursor<Codec> cursor(s, base, i);
            typename Codec::Scale scale = codec.scale(cursor.sides);
            APS_UNROLL if (k < count) {
                if (cursor.moves_to(i + k)) scale = codec.scale(cursor.sides);
                const float v = scale.value(bits[k]);
                acc[k] = j ? acc[k] + v : v;
            }
        }
        APS_UNROLL bits[k] = k < count ? aps_bits(acc[k]) : 0u;
    }
};

// ---------------------------------------------------------------------------------------------- scales
template <class T>
static __device__ __forceinline__ T shuffled(const T& value, int step) {
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (unsigned k = 0; k < sizeof(T) / 4; ++k) words[k] = __shfl_xor_sync(0xffffffffu, words[k], step);
    T result;
    memcpy(&result, words, sizeof(T));
    return result;
}
// A chunk by eight lanes; all lanes of a warp come here. The first of the eight has the result.
template <class Codec, class Values>
static __device__ __forceinline__ typename Codec::Tally tally_by_lanes(const Codec& codec, const Values& values,
                                                                       int64_t begin, int64_t end) {
    typename Codec::Tally tally;
    for (int64_t i = begin + threadIdx.x % APS_LANES; i < end; i += APS_LANES) codec.add(tally, values(i));
    for (int step = APS_LANES / 2; step; step /= 2) tally.join(shuffled(tally, step));
    return tally;
}

template <class Codec, class Values>
static __device__ __forceinline__ void write_sides(const ApsSegment& s, const Values& values, const Codec& codec,
                                                   int64_t begin, uint8_t* base, int mode) {
    const int64_t size = aps_bucket_size(s), n_buckets = aps_n_buckets(s), first = begin / size;
    const int64_t wanted = first + (APS_TILE + size - 1) / size, last = wanted < n_buckets ? wanted : n_buckets;
    const int lanes = size <= APS_CHUNK ? APS_LANES : 32;  // that share a bucket
    const int64_t n_groups = blockDim.x / lanes, mine = threadIdx.x / lanes;
    const int64_t part = threadIdx.x % lanes / APS_LANES * APS_CHUNK, stride = lanes / APS_LANES * APS_CHUNK;
    const bool is_zero = aps_is_constant(s);
    for (int64_t round = first; round < last; round += n_groups) {
        const int64_t bucket = round + mine;
        const bool is_mine = bucket < last;
        const int64_t low = is_mine ? bucket * size : 0, end = low + size < s.n ? low + size : s.n;
        const int64_t high = is_mine && !is_zero ? end : low;
        typename Codec::Tally total;
        for (int64_t at = 0; at < size && !is_zero; at += stride) {
            const int64_t from = low + at + part, to = from + APS_CHUNK < high ? from + APS_CHUNK : high;
            const typename Codec::Tally tally = tally_by_lanes(codec, values, from, to);
            total.join(tally);
            for (int step = APS_LANES; step < lanes; step += APS_LANES) total.join(shuffled(tally, step));
        }
        if (is_mine && threadIdx.x % lanes == 0) {
            float sides[Codec::n_sides];
            for (int k = 0; k < Codec::n_sides; ++k) sides[k] = 0.0f;
            if (!is_zero) codec.sides(total, end - low, mode, sides);
            aps_store_sides<Codec>(base, bucket, sides);
        }
    }
}

// ---------------------------------------------------------------------------------------------- codes
template <class Codec, class Values>
static __device__ __forceinline__ void write_codes(const ApsSegment& s, const Values& values, const Codec& codec,
                                                   int64_t begin, uint8_t* base, int mode, uint64_t seed) {
    const ApsKey key = aps_key(seed, s.uid);
    uint8_t* codes = base + aps_side_bytes<Codec>(s);
    uint32_t bits[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        if (aps_is_constant(s)) {
            APS_UNROLL bits[k] = 0u;
        } else {
            values.group(i, count, bits);
            Cursor<Codec> cursor(s, base, i);
            typename Codec::Plan plan = codec.plan(cursor.sides);
            APS_UNROLL if (k < count) {
                if (cursor.moves_to(i + k)) plan = codec.plan(cursor.sides);
                bits[k] = plan.code(bits[k], Codec::draw(key, mode, (uint64_t)(s.first + i + k)));
            }
        }
        store_codes(codes, i, count, codec.width, bits);
    }
}

template <class Codec>
static __device__ __forceinline__ void decode_buckets(const ApsSegment& s, int64_t begin, const uint64_t* inputs,
                                                      int n_in) {
    const Codec codec(s);
    const SumValues<Codec> sums(s, codec, inputs, n_in);
    uint32_t bits[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        if (!aps_is_constant(s)) sums.group(i, count, bits);
        if (s.dtype == APS_F64) {
            APS_FOR_ELEMENTS(k, 0, count) {
                uint64_t result = aps_special(0, s.exponent == APS_EXP_ZERO ? APS_KIND_ZERO : APS_KIND_NAN, APS_F64);
                if (!aps_is_constant(s)) result = aps_bucket_finish(aps_float(bits[k]), s.factor, APS_F64);
                aps_store((void*)s.data, APS_F64, i + k, result);
            }
            continue;
        }
        if (aps_is_constant(s)) {
            APS_UNROLL bits[k] = s.exponent == APS_EXP_ZERO ? 0u : 0x7fc00000u;
        } else {
            APS_UNROLL bits[k] = aps_bits(aps_float(bits[k]) * s.factor);
        }
        store_floats(s, i, count, bits);
    }
}

template <class Codec>
static __device__ __forceinline__ void scan_sums(const ApsSegment& s, int64_t begin, const uint64_t* inputs, int n_in,
                                                 ull* top) {
    const Codec codec(s);
    const SumValues<Codec> sums(s, codec, inputs, n_in);
    uint32_t best = 0, bits[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        sums.group(i, count, bits);
        APS_UNROLL best = (bits[k] & 0x7fffffffu) > best ? bits[k] & 0x7fffffffu : best;
    }
    best = warp_max(best);
    raise_to(top, best ? aps_convert(best, APS_F32, APS_F64) : 0);
}

template <class Codec>
static __device__ __forceinline__ void subtract_buckets(const ApsSegment& s, int64_t begin, const uint8_t* message) {
    if (s.exponent == APS_EXP_ZERO) return;
    const Codec codec(s);
    const uint64_t inputs[1] = {(uint64_t)message};
    const SumValues<Codec> own(s, codec, inputs, 1);
    uint32_t values[APS_GROUP];
    APS_FOR_GROUPS(i, count, begin, tile_end(s, begin)) {
        const bool is_zero = s.exponent == APS_EXP_NONFINITE;
        if (!is_zero) own.group(i, count, values);
        APS_FOR_ELEMENTS(k, 0, count) {
            const uint64_t bits = aps_load((const void*)s.data, s.dtype, i + k);
            uint64_t rest = is_zero ? 0 : aps_bucket_residual(bits, aps_float(values[k]), s.dtype);
            aps_store((void*)s.data, s.dtype, i + k, rest);
        }
    }
}

// ---------------------------------------------------------------------------------------------- kernels
extern "C" {

__global__ void encode_sides_kernel(APS_TABLE, uint8_t* message, int mode, uint64_t) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, {
            const Codec codec(s);
            write_sides(s, DataValues<Codec>(s, codec, 0, 0), codec, begin, message + s.offset, aps_mode(s, mode));
        })
    }
}
__global__ void encode_bucket_kernel(APS_TABLE, uint8_t* message, int mode, uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, {
            const Codec codec(s);
            const DataValues<Codec> values(s, codec, 0, 0);
            write_codes(s, values, codec, begin, message + s.offset, aps_mode(s, mode), seed);
        })
    }
}

__global__ void decode_bucket_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, decode_buckets<Codec>(s, begin, inputs, n_in))
    }
}

__global__ void reduce_scan_bucket_kernel(APS_TABLE, const uint64_t* inputs, int n_in, ull* top) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, scan_sums<Codec>(s, begin, inputs, n_in, &top[tiles[t].segment]))
    }
}
__global__ void reduce_sides_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int, uint8_t* message, int mode,
                                    uint64_t) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, {
            const Codec codec(s);
            write_sides(s, SumValues<Codec>(s, codec, inputs, n_in), codec, begin, message + s.offset,
                        aps_mode(s, mode));
        })
    }
}
// The scales of tables, whose largest magnitudes a scan has found: bits of the segment's dtype, or of the double of a sum.
__global__ void table_sides_kernel(APS_TABLE, const ull* top, uint8_t* message, int is_sum) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        if (threadIdx.x || begin) continue;
        ApsTableCodec::Tally tally;
        if (!aps_is_constant(s)) {
            const ull found = top[tiles[t].segment];
            tally.top = (uint32_t)aps_convert(found, is_sum ? (int)APS_F64 : s.dtype, APS_F32);
        }
        float side;
        ApsTableCodec(s).sides(tally, s.n, APS_NEAREST, &side);
        aps_store_sides<ApsTableCodec>(message + s.offset, 0, &side);
    }
}
__global__ void reduce_bucket_kernel(APS_TABLE, const uint64_t* inputs, int n_in, int, uint8_t* message, int mode,
                                     uint64_t seed) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, {
            const Codec codec(s);
            const SumValues<Codec> values(s, codec, inputs, n_in);
            write_codes(s, values, codec, begin, message + s.offset, aps_mode(s, mode), seed);
        })
    }
}

__global__ void residual_bucket_kernel(APS_TABLE, const uint8_t* message) {
    APS_FOR_TILES(t) {
        APS_SEGMENT(t)
        APS_BY_BUCKETS(s, subtract_buckets<Codec>(s, begin, message))
    }
}

__global__ void measure_bucket_kernel(const ApsSegment* segs, const int32_t* exponents, const ApsTile* tiles,
                                      int64_t n_chunks, const uint8_t* message, double* out) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; c < n_chunks; c += step) {
        APS_SEGMENT(c)
        if (!aps_has_buckets(s)) continue;
        const int64_t end = begin + APS_MEASURE_CHUNK < s.n ? begin + APS_MEASURE_CHUNK : s.n;
        APS_BY_BUCKETS(s, aps_measure_buckets<Codec>(s, message + s.offset, begin, end, out + 4 * c))
    }
}

}  // extern "C"
