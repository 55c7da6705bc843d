// Few rows of queries: decodes. Their time is the time it takes to read the cache, so nothing is packed: a key's row is multiplied
// where it lies, for all rows of queries at once. All heads of a tile of keys are visited before the next tile: whole pages are read.
#pragma once
#include "tile.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr int64_t FEW = 16;        // rows at most
constexpr int64_t FEW_KEYS = 64;   // of a tile here
constexpr int64_t AT_ONCE = 4;     // rows in one go; 1 and 2 have a way of their own

// Units of a row of stored elements, in steps that suit its type.
template <class F, int T>
struct Reader {
    static constexpr int VECTORS = F::PER_UNIT == 2 && SIZE<T> == 1 ? 2 : 1;
    static constexpr int64_t STEP = VECTORS * W * F::PER_UNIT;

    static INLINE void read(const uint8_t* p, int64_t left, vi (&to)[VECTORS]) {
#if QUIRE_BF16
        if constexpr (VECTORS == 2) {
            __m512i codes = left >= 64 ? load<__m512i>(p) : _mm512_maskz_loadu_epi8((1ull << left) - 1, p);
            bytes_as_bf16<T>(codes, to[0], to[1]);
            return;
        }
#endif
        to[0] = F::template units<T>(p, left);
    }
};

// Rows that will be wanted soon, so many bytes of each; none if `at` is null.
struct Ahead {
    const uint8_t* const* at;
    int64_t bytes;

    INLINE void fetch(int64_t j) const {
        if (at) for (int64_t b = 0; b < bytes; b += 64) prefetch(at[j] + b);
    }
};

// scores[r][j] of ROWS rows of queries over keys; W of them are summed up at a time.
template <class F, int T, int ROWS>
static void scores_of(const int32_t* q, int64_t q_stride, const uint8_t* const* key, Ahead ahead, int64_t count, int64_t dim,
                      float* scores) {
    using R = Reader<F, T>;
    constexpr int AT_ONCE = W / ROWS;
    for (int64_t j = 0; j < count; j += AT_ONCE) {
        const uint8_t* row[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            int64_t at = least(j + i, count - 1);
            row[i] = key[at];
            ahead.fetch(at);
        }
        vf sum[W] = {};
        auto step = [&](int64_t d, int64_t left) __attribute__((always_inline)) {
            vi units[AT_ONCE][R::VECTORS];
            UNROLL for (int i = 0; i < AT_ONCE; i++) R::read(row[i] + d * SIZE<T>, left, units[i]);
            UNROLL for (int n = 0; n < R::VECTORS; n++) UNROLL for (int r = 0; r < ROWS; r++) {
                vi mine = load<vi>(q + r * q_stride + d / F::PER_UNIT + n * W);
                UNROLL for (int i = 0; i < AT_ONCE; i++) sum[r * AT_ONCE + i] = F::dot(sum[r * AT_ONCE + i], mine, units[i][n]);
            }
        };
        int64_t d = 0;
        for (; d + R::STEP <= dim; d += R::STEP) step(d, R::STEP);
        if (d < dim) step(d, dim - d);
        float found[W];
        store(found, sums(sum));
        UNROLL for (int r = 0; r < ROWS; r++) memcpy(scores + r * FEW_KEYS + j, found + r * AT_ONCE, AT_ONCE * 4);
    }
}

// values[r] = values[r] * keep[r] + weights[r] V, a few vectors of dims at a time.
template <class F, int T, int ROWS>
static void values_of(const int32_t* weights, const uint8_t* const* value, Ahead ahead, int64_t count, int64_t dim,
                      const float* keep, float* values, int64_t stride) {
    constexpr int PER = F::PER_UNIT, VECTORS = VECTORS_AT_ONCE;
    constexpr int64_t DIMS = VECTORS * W;
    using R = Reader<F, T>;
    int64_t units = (count + PER - 1) / PER;
    auto some_dims = [&](int64_t d, auto full) __attribute__((always_inline)) {
        vf sum[ROWS][VECTORS] = {};
        for (int64_t u = 0; u < units; u++) {
            if (d == 0) UNROLL for (int p = 0; p < PER; p++) ahead.fetch(least(u * PER + p, count - 1));
            vi unit[VECTORS] = {};
            UNROLL for (int n = 0; n < VECTORS; n += R::STEP / W) {
                // As many vectors of lanes as a step has elements: bf16 makes two of each, for two keys at once.
                int64_t at = d + n * W, left = full ? R::STEP : dim - at;
                if (!full && left <= 0) break;
                vi first[R::VECTORS], second[R::VECTORS];
                R::read(value[u * PER] + at * SIZE<T>, left, first);
                if (PER == 2) R::read(value[u * PER + PER - 1] + at * SIZE<T>, left, second);
                UNROLL for (int i = 0; i < R::VECTORS; i++) {
                    if (PER == 2) F::mingle(first[i], second[i]);
                    unit[n + i * PER] = first[i];
                    if (PER == 2) unit[n + i * PER + PER - 1] = second[i];
                }
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                vi weight = splat(weights[r * (FEW_KEYS / PER) + u]);
                UNROLL for (int n = 0; n < VECTORS; n++) sum[r][n] = F::dot(sum[r][n], weight, unit[n]);
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int n = 0; n < VECTORS; n++) {
            float* to = values + r * stride + d + n * W;
            store(to, fma(load(to), splat(keep[r]), sum[r][n]));
        }
    };
    int64_t d = 0;
    for (; d + DIMS <= dim; d += DIMS) some_dims(d, std::true_type());
    if (d < dim) some_dims(d, std::false_type());
}

template <class F>
struct Few {
    const Attend& call;
    int64_t k_units, v_lanes;
    int32_t *q, *weights;
    float *values, *scores, *keep, *k_scale, *v_scale;
    Gathered* have;
    Sight* sights;
    Tile* tiles;
    Rows* rows;
    uint8_t* gathered;
    int32_t* decoded;
    int64_t strip;

    Few(const Attend& call, Room& room) : call(call) {
        int64_t count = call.cache.heads * FEW;
        k_units = round_up((call.cache.k.dim + F::PER_UNIT - 1) / F::PER_UNIT, 2 * W);
        v_lanes = round_up(call.cache.v.dim, VECTORS_AT_ONCE * W);
        q = room.take<int32_t>(count * k_units);
        values = room.take<float>(count * v_lanes);
        scores = room.take<float>(FEW * FEW_KEYS);
        weights = F::PER_UNIT == 1 ? (int32_t*)scores : room.take<int32_t>(FEW * FEW_KEYS / 2);
        keep = room.take<float>(MOST_ROWS);
        k_scale = room.take<float>(KEYS);
        v_scale = room.take<float>(KEYS);
        have = room.take<Gathered>(count);
        sights = room.take<Sight>(count);
        tiles = room.take<Tile>(2);
        rows = room.take<Rows>(4);
        gathered = room.take<uint8_t>(4 * FEW_KEYS * 512 * 4);
        decoded = room.take<int32_t>(FEW_KEYS * 512);
    }

    void run(const Unit& unit) {
        const Sequence s(call, unit.seq);
        int64_t heads = unit.heads, group = call.group, k_dim = call.cache.k.dim, size = size_of(call.q.type);
        strip = unit.rows < 3 ? unit.rows : AT_ONCE;
        int64_t padded_rows = round_up(unit.rows, strip);
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < padded_rows; i++) {
                int64_t at = h * padded_rows + i, token = (unit.row + i) / group;
                int32_t* to = q + at * k_units;
                if (i >= unit.rows) {
                    memset(to, 0, k_units * 4);
                    continue;
                }
                int64_t q_head = (unit.head + h) * group + (unit.row + i) % group;
                const uint8_t* from = call.q.data + ((s.token + token) * call.q.token + q_head * call.q.head) * size;
                if (call.q.dim != 1) {
                    from = quire::QUIRE_LEVEL::gathered(from, size, k_dim, gathered, [&](int64_t d) { return d * call.q.dim; });
                }
                as_units<F>(from, call.q.type, k_dim, to, k_units);
                sights[at] = sight_of(call, s, token, q_head);
                have[at] = Gathered{-__builtin_inff(), 0.0f};
            }
        }
        memset(values, 0, heads * padded_rows * v_lanes * 4);
        const Logits logits(call);
        bool bad = false;
        // A tile ends where the cache does: its rows are of one type.
        int64_t turn = s.fresh ? most(unit.low, least(unit.high, s.context)) : unit.high;
        auto end_of = [&](int64_t low) { return least(low + FEW_KEYS, low < turn ? turn : unit.high); };
        int64_t low = unit.low, which = 0;
        if (low < unit.high) found(s, low, end_of(low), tiles[0]);
        while (low < unit.high) {
            Tile &tile = tiles[which], &after = tiles[1 - which];
            int64_t next = end_of(low);
            if (next < unit.high) found(s, next, end_of(next), after);
            bad |= tile.bad;
            visit(unit, tile, next < unit.high ? &after : nullptr, logits, padded_rows);
            low = next, which = 1 - which;
        }
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < unit.rows; i++) {
                int64_t at = h * padded_rows + i;
                if (bad) have[at].total = __builtin_nanf("");
                leave(call, s, unit, unit.head + h, unit.row + i, have[at], values + at * v_lanes);
            }
        }
    }

    void found(const Sequence& s, int64_t low, int64_t high, Tile& tile) { find(call, s, low, low, high, nullptr, tile); }

    void visit(const Unit& unit, const Tile& tile, const Tile* after, const Logits& logits, int64_t padded_rows) {
        int64_t count = tile.count, padded = round_up(count, 2 * W);
        Rows *k = rows, *v = rows + 1, *next_k = rows + 2, *next_v = rows + 3;
        int64_t part = FEW_KEYS * 512 * 4;
        rows_of(call.cache.k, call.new_k, tile.k, tile, unit.head, gathered, *k);
        rows_of(call.cache.v, call.new_v, tile.v, tile, unit.head, gathered + part, *v);
        bool whole = call.cache.k.whole_rows() && call.cache.v.whole_rows();
        if (call.new_k.data) whole = whole && call.new_k.dim == 1 && call.new_v.dim == 1;
        bool scaled = call.cache.k.scale != nullptr;
        for (int64_t h = 0; h < unit.heads; h++) {
            // What comes next is on its way while this is worked on: another head of the tile, or the first of the next one.
            const Tile* coming = h + 1 < unit.heads ? &tile : whole ? after : nullptr;
            if (coming) {
                int64_t head = coming == &tile ? unit.head + h + 1 : unit.head;
                uint8_t* room = gathered + (h % 2 ? 0 : 2 * part);
                rows_of(call.cache.k, call.new_k, coming->k, *coming, head, room, *next_k);
                rows_of(call.cache.v, call.new_v, coming->v, *coming, head, room + part, *next_v);
            }
            bool ahead = coming && whole && coming->count >= count;
            Ahead k_ahead{ahead ? next_k->at : nullptr, ahead ? call.cache.k.dim * size_of(next_k->type_of(0)) : 0};
            Ahead v_ahead{ahead ? next_v->at : nullptr, ahead ? call.cache.v.dim * size_of(next_v->type_of(0)) : 0};
            if (scaled) {
                scales_of(call.cache.k, tile.k, tile, unit.head + h, k_scale);
                scales_of(call.cache.v, tile.v, tile, unit.head + h, v_scale);
            }
            int64_t base = h * padded_rows;
            score(*k, k_ahead, base, padded_rows);
            Scores seen{scores, FEW_KEYS, padded, scaled ? k_scale : nullptr, scaled ? v_scale : nullptr, nullptr,
                        call.alibi != nullptr, {}, {}, {}, {}};
            for (int64_t i = 0; i < unit.rows; i++) {
                const Sight& sight = sights[base + i];
                seen.first[i] = most<int64_t>(0, sight.low - tile.first);
                seen.last[i] = most<int64_t>(0, least(count, sight.high - tile.first));
                seen.slope[i] = sight.slope, seen.distance[i] = (float)(sight.at - tile.first);
            }
            weigh<F>(seen, unit.rows, weights, FEW_KEYS / F::PER_UNIT, logits, have + base, keep);
            for (int64_t i = unit.rows; i < padded_rows; i++) {
                memset(weights + i * (FEW_KEYS / F::PER_UNIT), 0, FEW_KEYS / F::PER_UNIT * 4);
                keep[i] = 1.0f;
            }
            gather(*v, v_ahead, base, padded_rows);
            if (coming == &tile) {
                Rows* swap = k;
                k = next_k, next_k = swap;
                swap = v;
                v = next_v, next_v = swap;
            }
        }
    }

    // Rows as the products take them, and their type. Where several strips of rows meet the same keys, these are decoded once.
    int64_t ready(Rows& from, int64_t dim, int64_t padded_rows) {
        int64_t type = from.type_of(0), units = round_up((dim + F::PER_UNIT - 1) / F::PER_UNIT, W);
        if (padded_rows == strip || type == F::TYPE) return type;
        for (int64_t j = 0; j < round_up(from.count, 2); j++) {
            int32_t* to = decoded + j * (512 / F::PER_UNIT);
            as_units<F>(from.at[j], type, dim, to, units);
            from.at[j] = (const uint8_t*)to;
        }
        return F::TYPE;
    }

    // Calls f with the type and the number of rows as constants, strip after strip.
    template <class Each>
    INLINE void by_strip(int64_t type, int64_t padded_rows, Each f) {
        with_type(type, [&](auto t) {
            if constexpr (FITS<F, t.value>) {
                for (int64_t r = 0; r < padded_rows; r += strip) {
                    if (strip == 1) f(t, std::integral_constant<int, 1>(), r);
                    else if (strip == 2) f(t, std::integral_constant<int, 2>(), r);
                    else f(t, std::integral_constant<int, 4>(), r);
                }
            }
        });
    }

    void score(Rows& keys, Ahead ahead, int64_t base, int64_t padded_rows) {
        int64_t dim = call.cache.k.dim;
        by_strip(ready(keys, dim, padded_rows), padded_rows, [&](auto t, auto count, int64_t r) {
            scores_of<F, t.value, count.value>(q + (base + r) * k_units, k_units, keys.at, r ? Ahead{} : ahead, keys.count, dim,
                                               scores + r * FEW_KEYS);
        });
    }

    void gather(Rows& rows, Ahead ahead, int64_t base, int64_t padded_rows) {
        int64_t dim = call.cache.v.dim;
        by_strip(ready(rows, dim, padded_rows), padded_rows, [&](auto t, auto count, int64_t r) {
            values_of<F, t.value, count.value>(weights + r * (FEW_KEYS / F::PER_UNIT), rows.at, r ? Ahead{} : ahead, rows.count, dim,
                                               keep + r, values + (base + r) * v_lanes, v_lanes);
        });
    }
};

}  // namespace QUIRE_LEVEL
}  // namespace quire
