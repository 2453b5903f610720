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
struct ApsCpuTable {
    ApsTable table;
    int steps;  // how many codes the lookup may be behind
    // For the upper 16 bits of a ratio: in the low byte the code of the least ratio that has them, above it where the
    // next code begins, if there is one: behind (ratios from zero on) or up to (others) these lower 16 bits.
    int32_t entries[1 << 16];
};
static const ApsCpuTable* aps_tables[1 << 16];
static int aps_n_tables = 0;
APS_FN const ApsTable& aps_table_of(const ApsSegment& s) { return aps_tables[s.codec]->table; }
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
