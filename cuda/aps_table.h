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
    int steps;  // how many codes an entry may be behind
};
struct ApsCpuTable {
    ApsTable table;
    ApsCells cells;  // for scale 1
};
static const ApsCpuTable* aps_tables[1 << 16];
static int aps_n_tables = 0;
APS_FN const ApsTable& aps_table_of(const ApsSegment& s) { return aps_tables[s.codec]->table; }

// Entries for elements that are at most `scale` in magnitude. Floats are counted in their order: -0 is -1, +0 is 0.
static void aps_fill_cells(const ApsTable& table, float scale, ApsCells& cells) {
    const int32_t most = (int32_t)aps_bits(scale);
    int32_t first[APS_TABLE_SIZE], last[APS_TABLE_SIZE];  // where a code begins: at or behind, at or before
    for (int k = 0; k < APS_TABLE_SIZE; ++k) first[k] = ~most, last[k] = most + 1;
    for (int step = 0; step < 32; ++step) {
        for (int k = 0; k < APS_TABLE_SIZE; ++k) {
            const int32_t middle = (first[k] & last[k]) + ((first[k] ^ last[k]) >> 1);
            const float x = aps_float((uint32_t)(middle ^ (middle >> 31 & 0x7fffffff)));
            const bool is_in = x / scale >= table.least[k];
            const int32_t behind = middle < last[k] ? middle + 1 : middle;
            first[k] = is_in ? first[k] : behind;
            last[k] = is_in ? middle : last[k];
        }
    }
    auto fill = [&](int begin, int end, int code) {  // cells without a next code, counted as floats are
        for (int c = begin; c < end && c < 0; ++c) cells.entries[(c ^ 0x7fff) & 0xffff] = -256 | code;
        for (int c = begin < 0 ? 0 : begin; c < end; ++c) cells.entries[c] = 0xffff << 8 | code;
    };
    int next = -(1 << 15), code = 0;
    cells.steps = 0;
    int k = 0;
    while (k < table.n - 1 && last[k] == ~most) ++k, ++code;  // no element is before it
    while (k < table.n - 1 && last[k] <= most) {
        const int c = last[k] >> 16, low = last[k] & 0xffff;
        fill(next, c, code);
        int steps = 1;
        while (k + steps < table.n - 1 && last[k + steps] >> 16 == c && last[k + steps] <= most) ++steps;
        const int key = (c < 0 ? c ^ 0x7fff : c) & 0xffff, begin = c < 0 ? low ^ 0xffff : low - 1;
        cells.entries[key] = (int32_t)((uint32_t)begin << 8 | (uint32_t)code);
        cells.steps = steps > cells.steps ? steps : cells.steps;
        k += steps, code += steps, next = c + 1;
    }
    fill(next, 1 << 15, code);
}
// Those of the scale that this thread has asked for last.
static const ApsCells& aps_cells_of(const ApsCpuTable& table, float scale) {
    static thread_local struct {
        const ApsCpuTable* table;
        float scale;
        ApsCells cells;
    } kept;
    if (kept.table != &table || kept.scale != scale) {
        aps_fill_cells(table.table, scale, kept.cells);
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
