// Codes that stand for the numbers of a table, times the largest magnitude; horovod_aps/formats/tables.py defines it.
// codec: which table. The CPU library has a list of them; the CUDA launcher puts a table's address in `first`, which
// counts for random bits only.
#ifndef APS_TABLE_H
#define APS_TABLE_H

#include "aps_buckets.h"

enum { APS_TABLE_SIZE = 256 };

struct ApsTable {
    int32_t n, width;
    float values[APS_TABLE_SIZE];  // the last one again behind the last
    float least[APS_TABLE_SIZE];   // least number that belongs to code i + 1; Inf behind the last
};

#ifdef APS_TABLES_BY_ADDRESS
APS_FN const ApsTable& aps_table_of(const ApsSegment& s) { return *(const ApsTable*)s.first; }
#else
// For the upper 16 bits of an element: in the low byte the code of the least number that has them, above it where the
// next code begins, if there is one: behind (numbers from zero on) or up to (others) these lower 16 bits.
struct ApsCells {
    int32_t entries[1 << 16];
    bool fits;  // no entry is more than one code behind
};
// The same in few bytes, for instructions that look up 64 of them at a time. A key of an element's magnitude, from its
// upper 16 bits h without the sign: max(h, lowest) >> shift + base, with the shift and base of its exponent, modulo 32.
struct ApsKeys {
    bool fits;
    int zero;  // see aps_mirror
    uint16_t lowest, shift[32], base[32];
    uint8_t codes[2][APS_TABLE_SIZE];   // of the least number with a sign and a key
    uint8_t starts[4][APS_TABLE_SIZE];  // the bytes, lowest first, of the least number of the next code
};
struct ApsCpuTable {
    ApsTable table;
    ApsCells cells;                     // for scale 1
    ApsKeys keys;                       // for scale 1
    int zero;                           // see aps_mirror
    uint8_t values[4][APS_TABLE_SIZE];  // their bytes, lowest first
};
static const ApsCpuTable* aps_tables[1 << 16];
static int aps_n_tables = 0;
APS_FN const ApsTable& aps_table_of(const ApsSegment& s) { return aps_tables[s.codec]->table; }

// Floats, counted in their order: -0 is -1, +0 is 0.
APS_FN int32_t aps_count(float x) { return (int32_t)aps_bits(x) ^ ((int32_t)aps_bits(x) >> 31 & 0x7fffffff); }
APS_FN float aps_counted(int32_t number) { return aps_float((uint32_t)(number ^ (number >> 31 & 0x7fffffff))); }

// The code on both sides of which numbers and where they begin are the same, or -1.
static int aps_mirror(const ApsTable& table) {
    const int zero = table.n % 2 ? table.n / 2 : -1;
    for (int k = 0; k <= zero; ++k) {
        if (table.values[zero + k] != -table.values[zero - k]) return -1;
        if (k < zero && aps_count(table.least[zero - 1 - k]) != -aps_count(table.least[zero + k])) return -1;
    }
    return zero;
}

// Where code k + 1 begins among the elements that are at most `scale` in magnitude, or behind them: next to where it
// does among numbers, times the scale, or else anywhere.
static void aps_find_starts(const ApsTable& table, float scale, int32_t* last) {
    const int32_t begin = ~(int32_t)aps_bits(scale), end = (int32_t)aps_bits(scale) + 1;
    int32_t first[APS_TABLE_SIZE];
    auto is_in = [&](int32_t number, int k) { return aps_counted(number) / scale >= table.least[k]; };
    bool is_near = true;
    for (int k = 0; k < APS_TABLE_SIZE; ++k) {
        const int32_t guess = aps_count(table.least[k] * scale);
        first[k] = guess - 4 < begin ? begin : guess - 4 > end ? end : guess - 4;
        last[k] = guess + 4 < begin ? begin : guess + 4 > end ? end : guess + 4;
        is_near = is_near && (first[k] == begin || !is_in(first[k] - 1, k)) && (last[k] == end || is_in(last[k], k));
    }
    for (int k = 0; k < APS_TABLE_SIZE && !is_near; ++k) first[k] = begin, last[k] = end;
    for (int step = 0; step < (is_near ? 4 : 32); ++step) {
        for (int k = 0; k < APS_TABLE_SIZE; ++k) {
            const int32_t middle = (first[k] & last[k]) + ((first[k] ^ last[k]) >> 1);
            const int32_t behind = middle < last[k] ? middle + 1 : middle;
            const bool found = is_in(middle, k);
            first[k] = found ? first[k] : behind;
            last[k] = found ? middle : last[k];
        }
    }
}
// Entries for elements that are at most `scale` in magnitude.
static void aps_fill(const ApsTable& table, float scale, ApsCells& cells) {
    const int32_t most = (int32_t)aps_bits(scale);
    int32_t last[APS_TABLE_SIZE];
    aps_find_starts(table, scale, last);
    auto fill = [&](int begin, int end, int code) {  // cells without a next code, counted as floats are
        for (int c = begin; c < end && c < 0; ++c) cells.entries[(c ^ 0x7fff) & 0xffff] = -256 | code;
        for (int c = begin < 0 ? 0 : begin; c < end; ++c) cells.entries[c] = 0xffff << 8 | code;
    };
    int next = -(1 << 15), code = 0;
    cells.fits = true;
    int k = 0;
    while (k < table.n - 1 && last[k] == ~most) ++k, ++code;  // no element is before it
    while (k < table.n - 1 && last[k] <= most) {
        const int c = last[k] >> 16, low = last[k] & 0xffff;
        fill(next, c, code);
        int steps = 1;
        while (k + steps < table.n - 1 && last[k + steps] >> 16 == c && last[k + steps] <= most) ++steps;
        const int key = (c < 0 ? c ^ 0x7fff : c) & 0xffff, begin = c < 0 ? low ^ 0xffff : low - 1;
        cells.entries[key] = (int32_t)((uint32_t)begin << 8 | (uint32_t)code);
        cells.fits = cells.fits && steps == 1;
        k += steps, code += steps, next = c + 1;
    }
    fill(next, 1 << 15, code);
}
static void aps_split_bytes(const float* values, uint8_t (*out)[APS_TABLE_SIZE]) {
    for (int k = 0; k < APS_TABLE_SIZE; ++k) {
        for (int byte = 0; byte < 4; ++byte) out[byte][k] = (uint8_t)(aps_bits(values[k]) >> (8 * byte));
    }
}
// Keys for elements that are at most `scale` in magnitude. No two codes begin at magnitudes with the same key: those of a
// power of two have as many upper bits of the mantissa in it as tell them apart, all below the second code have one key.
static void aps_fill(const ApsTable& table, float scale, ApsKeys& keys) {
    const int32_t most = (int32_t)aps_bits(scale);
    const int top = most >> 23;
    int32_t starts[APS_TABLE_SIZE];
    aps_find_starts(table, scale, starts);
    int begin = 0, zero, end;  // what begins at elements, and from zero on
    while (begin < APS_TABLE_SIZE && starts[begin] == ~most) ++begin;
    for (zero = begin; zero < APS_TABLE_SIZE && starts[zero] < 0;) ++zero;
    for (end = zero; end < APS_TABLE_SIZE && starts[end] <= most;) ++end;
    auto magnitude = [&](int k) { return starts[k] < 0 ? -starts[k] : starts[k]; };  // the least one beyond
    int lowest = top, bits[256] = {0};
    if (zero - begin > 1) lowest = magnitude(zero - 2) >> 23 <= lowest ? (magnitude(zero - 2) >> 23) - 1 : lowest;
    if (end - zero > 1) lowest = magnitude(zero + 1) >> 23 <= lowest ? (magnitude(zero + 1) >> 23) - 1 : lowest;
    keys.fits = lowest >= 0 && top - lowest < 32;
    for (int k = begin + 1; k < end; ++k) {
        const int32_t a = magnitude(k - 1), b = magnitude(k);
        if (k == zero || a >> 23 != b >> 23 || a >> 23 <= lowest) continue;
        const int needed = a == b ? 24 : 23 - (31 - __builtin_clz((uint32_t)(a ^ b)));
        bits[a >> 23] = needed > bits[a >> 23] ? needed : bits[a >> 23];
        keys.fits = keys.fits && needed <= 7;
    }
    if (!keys.fits) return;
    auto code = [&](int32_t number) {
        int found = 0;
        for (int step = APS_TABLE_SIZE / 2; step; step >>= 1) found += number >= starts[found + step - 1] ? step : 0;
        return (uint8_t)found;
    };
    int n = 0;
    for (int e = lowest; e <= top; ++e) {
        const int shift = 7 - bits[e];
        keys.shift[e & 31] = (uint16_t)shift;
        keys.base[e & 31] = (uint16_t)(n - (e << 7 >> shift));
        for (int k = 0; k < 1 << bits[e]; ++k) {
            const int32_t low = (e << 23) + (k << (16 + shift)), next = low + (1 << (16 + shift));
            if (low > most) break;
            if (n == APS_TABLE_SIZE) return (void)(keys.fits = false);
            keys.codes[0][n] = code(e == lowest ? 0 : low);
            keys.codes[1][n++] = code(next <= most ? -next : ~most);
        }
    }
    keys.lowest = (uint16_t)(lowest << 7);
    keys.zero = aps_mirror(table);
    float first[APS_TABLE_SIZE];
    for (int k = 0; k < APS_TABLE_SIZE; ++k) first[k] = aps_counted(starts[k]);
    aps_split_bytes(first, keys.starts);
}
// Those of the scale that this thread has asked for last.
template <class Cells>
static const Cells& aps_cells_for(const ApsCpuTable& table, float scale) {
    static thread_local struct {
        const ApsCpuTable* table;
        float scale;
        Cells cells;
    } kept;
    if (kept.table != &table || kept.scale != scale) {
        aps_fill(table.table, scale, kept.cells);
        kept.table = &table, kept.scale = scale;
    }
    return kept.cells;
}
#endif

// Code of y: how many of `least` are not above it.
APS_FN uint32_t aps_table_code(const float* least, float y) {
    int code = 0;
    for (int step = APS_TABLE_SIZE / 2; step; step >>= 1) code += y >= least[code + step - 1] ? step : 0;
    return (uint32_t)code;
}

struct ApsTableCodec {
    enum { n_sides = 1, side_size = 4 };
    const ApsTable& table;
    int width;
    explicit APS_METHOD ApsTableCodec(const ApsSegment& s) : table(aps_table_of(s)), width(table.width) {}
#ifndef APS_TABLES_BY_ADDRESS
    static bool is_valid(const ApsSegment& s) { return s.codec < aps_n_tables && s.block == 0; }
#endif

    typedef ApsTop Tally;
    APS_METHOD void add(Tally& tally, float x) const { tally.add(x); }
    APS_METHOD void sides(const Tally& tally, int64_t, int, float* out) const {
        out[0] = aps_float(tally.top < 0x7f800000u ? tally.top : 0x7fc00000u);
    }

    struct Plan {
        const float* least;
        float scale;
        APS_METHOD uint32_t code(uint32_t bits, uint32_t) const {
            if (scale != scale) return 0u;
            return aps_table_code(least, scale == 0.0f ? 0.0f : aps_float(bits) / scale);
        }
    };
    APS_METHOD Plan plan(const float* sides) const {
        Plan p;
        p.least = table.least;
        p.scale = sides[0];
        return p;
    }
    static APS_METHOD uint32_t draw(ApsKey, int, uint64_t) { return 0u; }

    struct Scale {
        const float* values;
        float scale;
        APS_METHOD float value(uint32_t code) const { return values[code] * scale; }
    };
    APS_METHOD Scale scale(const float* sides) const {
        Scale s;
        s.values = table.values;
        s.scale = sides[0];
        return s;
    }
};

#endif
