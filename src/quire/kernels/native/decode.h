// Sequences with few new tokens: decodes. Reading the cache limits them, so nothing is packed: a row of keys is multiplied in
// place, for all query rows at once. The order of memory accesses matters. A core has about two dozen cache lines in flight, which
// is not enough; the prefetcher of its second-level cache requests more if lines are read in order. So all heads of a key are read
// before the next key, alternating between several streams of a tile, and software prefetches follow the same order.
#pragma once
#include "tile.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr int64_t DECODE_ROWS = 16;       // the most query rows
constexpr int64_t DECODE_KEYS = 64;       // keys of a tile
constexpr int64_t AT_ONCE = 4;            // rows of a strip; units of 1 or 2 rows have strips of 1 or 2
constexpr int64_t STREAMS = 4;            // streams of a tile, which are read in turns
constexpr int64_t BYTES_AT_ONCE = 4096;   // bytes of the heads of a key that are read together

// Units of a row of stored elements, in steps that suit its type.
template <class F, int T>
struct Reader {
    static constexpr int VECTORS = F::PER_UNIT == 2 && SIZE<T> == 1 ? 2 : 1;
    static constexpr int64_t STEP = VECTORS * W * F::PER_UNIT;

    static INLINE void read(const uint8_t* p, int64_t left, vi (&to)[VECTORS], int64_t zero) {
#if QUIRE_BF16
        if constexpr (VECTORS == 2) return halves_as_bf16<T>(quartered<T>(p, left, zero), to[0], to[1]);
#endif
        to[0] = F::template units<T>(p, left, zero);
    }

    // One lane per element, of one row or of two, in an order that F::to_key_order reverts.
    static INLINE void read(const uint8_t* p, const uint8_t* other, int64_t left, vi (&to)[STEP / W], int64_t zero, int64_t other_zero) {
#if QUIRE_BF16
        if constexpr (VECTORS == 2) {
            return F::template interleave_groups_of_4<T>(quartered<T>(p, left, zero), quartered<T>(other, left, other_zero), to);
        }
#endif
        to[0] = F::template units<T>(p, left, zero);
        if constexpr (F::PER_UNIT == 2) {
            to[1] = F::template units<T>(other, left, other_zero);
            F::interleave_groups_of_4(to[0], to[1]);
        }
    }
};

// The rows of K or V of a tile, starting with some head; the rows of the next head are `head` bytes further. None if `at` is null.
struct RowReads {
    const uint8_t* const* at;
    int64_t count, first, head, bytes, type;
    Strides elements;                  // of a row
    bool whole;                        // whether they are contiguous
    bool heads_contiguous;             // whether the heads of a key are closer together than keys
    const uint8_t* const* groups;      // the scales of groups of head 0; null without
    GroupRow group;                    // where they are in a row; `at` is not used
    int64_t group_first;               // of the first head
    const float* scales = nullptr;     // of the first head, if they contain zero points, else null
    const int64_t* scale_at = nullptr;
    int64_t scale_head = 0;

    INLINE int64_t zero_of(int64_t j, int64_t h) const { return scales ? zero_point_of(scales[scale_at[j] + h * scale_head]) : 0; }
    INLINE GroupRow groups_of(int64_t j) const { return {groups ? groups[j] + group_first : nullptr, group.part, group.high, group.low}; }

    INLINE const uint8_t* row(int64_t j, int64_t h) const { return at[j] + first + h * head; }
};

// Prefetches rows that will be read soon, in the order in which they will be read: each call fetches one row of each stream.
struct Prefetcher {
    const RowReads of;
    int64_t heads, stream_stride, h = 0, j = 0;
    bool more;

    Prefetcher(const RowReads& of, int64_t heads)
        : of(of), heads(heads), stream_stride((of.count + STREAMS - 1) / STREAMS), more(of.at && of.whole) {}

    INLINE void fetch() {
        if (!more) return;
        int64_t offset = of.first + h * of.head;
        UNROLL for (int64_t i = 0; i < STREAMS; i++) {
            const uint8_t* row = of.at[least(j + i * stream_stride, of.count - 1)] + offset;
            for (int64_t b = 0; b < of.bytes; b += 64) prefetch(row + b);
        }
        if (++h < heads) return;
        h = 0;
        more = ++j < stream_stride;
    }
};

// Scores of ROWS query rows over W / ROWS keys, one lane per score, row by row.
template <class F, int T, int ROWS>
static INLINE vf scores_of(const int32_t* q, int64_t q_stride, const uint8_t* const* key, const int64_t* zero, int64_t dim) {
    using R = Reader<F, T>;
    constexpr int AT_ONCE = W / ROWS;
    vf sum[W] = {};
    auto step = [&](int64_t d, int64_t left) __attribute__((always_inline)) {
        vi units[AT_ONCE][R::VECTORS];
        UNROLL for (int i = 0; i < AT_ONCE; i++) R::read(key[i] + bytes_of<T>(d), left, units[i], zero[i]);
        UNROLL for (int n = 0; n < R::VECTORS; n++) UNROLL for (int r = 0; r < ROWS; r++) {
            vi mine = load<vi>(q + r * q_stride + d / F::PER_UNIT + n * W);
            UNROLL for (int i = 0; i < AT_ONCE; i++) sum[r * AT_ONCE + i] = F::dot(sum[r * AT_ONCE + i], mine, units[i][n]);
        }
    };
    int64_t d = 0;
    for (; d + R::STEP <= dim; d += R::STEP) step(d, R::STEP);
    if (d < dim) step(d, dim - d);
    return sums(sum);
}

// Brings the scores of a strip, computed W at a time, into the order of rows and keys. Keys that are scored together are STRIDE
// keys apart, so the scores are stored transposed.
template <int64_t STRIDE>
static INLINE void to_key_order(float* scores) {
    float made[W * STRIDE];
    if (STRIDE != W) memcpy(made, scores, sizeof made);
    if constexpr (STRIDE % W == 0) {
        for (int64_t j = 0; j < STRIDE; j += W) {
            vi some[W];
            UNROLL for (int i = 0; i < W; i++) some[i] = load<vi>((STRIDE == W ? scores : made) + (j + i) * W);
            transpose(some);
            UNROLL for (int i = 0; i < W; i++) store(scores + i * STRIDE + j, some[i]);
        }
    } else {
        for (int64_t i = 0; i < W; i++) UNROLL for (int64_t j = 0; j < STRIDE; j++) scores[i * STRIDE + j] = made[j * W + i];
    }
}

// How many keys of each stream are accumulated in registers. With fewer keys, memory is read more nearly in order.
template <int T>
constexpr int64_t SLOTS = 8 / SIZE<T>;

// values[r] = values[r] * keep[r] + weights[r] V of one head, a few vectors of dims at a time. From each stream, `stream_stride`
// keys long, the SLOTS keys from `slot` on are taken. Only slot 0 multiplies by `keep`.
template <class F, int T, int ROWS>
static INLINE void values_of(const int32_t* weights, const RowReads& v, int64_t h, int64_t slot, int64_t stream_stride,
                             Prefetcher* ahead, int64_t dim, const float* keep, float* values, int64_t stride) {
    constexpr int PER = F::PER_UNIT, VECTORS = VECTORS_AT_ONCE;
    constexpr int64_t DIMS = VECTORS * W, EACH = SLOTS<T> / PER;
    using R = Reader<F, T>;
    const int64_t offset = v.first + h * v.head, pause = STREAMS * ((dim + DIMS - 1) / DIMS);
    int64_t since = pause;  // keys since the last prefetch: prefetches are spread evenly over the keys
    auto some_dims = [&](int64_t d, auto full) __attribute__((always_inline)) {
        vf sum[ROWS][VECTORS] = {};
        for (int64_t stream = 0; stream < STREAMS; stream++) for (int64_t i = 0; i < EACH; i++) {
            int64_t u = (stream * stream_stride + slot) / PER + i;
            if (u * PER >= v.count) break;
            if (ahead && (since += PER) > pause) ahead->fetch(), since = PER;
            const uint8_t* row = v.at[u * PER] + offset;
            const uint8_t* other = u * PER + 1 < v.count ? v.at[u * PER + PER - 1] + offset : ZEROS;
            int64_t zero = 0, other_zero = 0;
            if constexpr (T == INT4_ZP) zero = v.zero_of(u * PER, h), other_zero = v.zero_of(least(u * PER + PER, v.count) - 1, h);
            vi unit[VECTORS] = {};
            UNROLL for (int n = 0; n < VECTORS; n += R::STEP / W) {
                // A step has R::STEP / W vectors of lanes; with bf16 each lane holds the elements of two keys.
                int64_t at = d + n * W, left = full ? R::STEP : dim - at;
                if (!full && left <= 0) break;
                vi some[R::STEP / W];
                R::read(row + bytes_of<T>(at), other + bytes_of<T>(at), left, some, zero, other_zero);
                UNROLL for (int i = 0; i < R::STEP / W; i++) unit[n + i] = some[i];
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                vi weight = splat(weights[r * (DECODE_KEYS / PER) + u]);
                UNROLL for (int n = 0; n < VECTORS; n++) sum[r][n] = F::dot(sum[r][n], weight, unit[n]);
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int n = 0; n < VECTORS; n++) {
            float* to = values + r * stride + d + n * W;
            store(to, fma(load(to), splat(slot ? 1.0f : keep[r]), sum[r][n]));
        }
    };
    int64_t d = 0;
    for (; d + DIMS <= dim; d += DIMS) some_dims(d, std::true_type());
    if (d < dim) some_dims(d, std::false_type());
}

template <class F>
struct DecodeKernel {
    static constexpr int64_t UNITS = DECODE_KEYS / F::PER_UNIT;  // of a row's weights
    const Attend& call;
    int64_t k_units, v_lanes;
    int32_t *q, *weights, *copies;
    uint8_t* strided;
    float *values, *scores, *keep, *bias, *k_scale, *v_scale;
    SoftmaxState* have;
    VisibleRange* visibles;
    Tile* tiles;
    const uint8_t** places;
    int64_t strip, padded_rows;

    DecodeKernel(const Attend& call, Workspace& workspace) : call(call) {
        int64_t count = call.cache.heads * DECODE_ROWS;
        k_units = round_up((call.cache.k.dim + F::PER_UNIT - 1) / F::PER_UNIT, 2 * W);
        v_lanes = round_up(call.cache.v.dim, VECTORS_AT_ONCE * W);
        q = workspace.take<int32_t>(count * k_units);
        values = workspace.take<float>(count * v_lanes);
        scores = workspace.take<float>(count * DECODE_KEYS);
        weights = F::PER_UNIT == 1 ? (int32_t*)scores : workspace.take<int32_t>(count * UNITS);
        keep = workspace.take<float>(count + W);
        bias = workspace.take<float>(call.select.kind || (call.alibi && call.batch.shard.ranks > 1) ? DECODE_ROWS * DECODE_KEYS : 0);
        k_scale = workspace.take<float>(KEYS);
        v_scale = workspace.take<float>(KEYS);
        have = workspace.take<SoftmaxState>(count);
        visibles = workspace.take<VisibleRange>(count);
        tiles = workspace.take<Tile>(2);
        copies = workspace.take<int32_t>(DECODE_KEYS * (MOST_DIM + W));
        places = workspace.take<const uint8_t*>(DECODE_KEYS);
        strided = workspace.take<uint8_t>(DECODE_KEYS * (MOST_DIM * 4 + 64));
    }

    void run(const Unit& unit) {
        const Sequence s(call, unit.seq);
        int64_t heads = unit.heads, group = call.group, k_dim = call.cache.k.dim, size = size_of(call.q.type);
        strip = unit.rows < 3 ? unit.rows : AT_ONCE;
        padded_rows = round_up(unit.rows, strip);
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < padded_rows; i++) {
                int64_t at = h * padded_rows + i, token = (unit.row + i) / group;
                int32_t* to = q + at * k_units;
                if (i >= unit.rows) {
                    memset(to, 0, k_units * 4);
                    continue;
                }
                int64_t q_head = (unit.head + h) * group + (unit.row + i) % group;
                const uint8_t* from = call.q.data + (query_row(s, unit, token) * call.q.token + q_head * call.q.head) * size;
                if (call.q.dim != 1) from = gather_row(from, elements_of(call.q, k_dim), (uint8_t*)copies);
                as_units<F>(from, call.q.type, k_dim, to, k_units);
                visibles[at] = visible_in(call, s, unit, token, q_head);
                if (s.selected) visibles[at].low = 0, visibles[at].high = KEYS;
                have[at] = SoftmaxState{-__builtin_inff(), 0.0f};
            }
        }
        memset(values, 0, heads * padded_rows * v_lanes * 4);
        const Logits logits(call);
        const SeenPositions positions(call, s, unit);
        bool bad = false;
        // A tile does not contain both cached and new tokens: all of its rows have one type.
        int64_t turn = s.fresh ? most(unit.low, least(unit.high, s.context)) : unit.high;
        auto end_of = [&](int64_t low) { return least(low + DECODE_KEYS, low < turn ? turn : unit.high); };
        auto locate = [&](int64_t from, Tile& tile) {  // returns where the next tile starts
            if (s.selected) return locate_selected(call, s, unit, positions.some, from, DECODE_KEYS, tile);
            locate_tile(s, from, end_of(from), tile);
            return end_of(from);
        };
        int64_t low = unit.low, next = low, which = 0;
        if (low < unit.high) next = locate(low, tiles[0]);
        while (low < unit.high) {
            Tile &tile = tiles[which], &after = tiles[1 - which];
            int64_t then = next < unit.high ? locate(next, after) : next;
            if (tile.bad) bad = true;
            else if (tile.count) visit(s, unit, tile, next < unit.high && !after.bad && after.count ? &after : nullptr, positions, logits);
            low = next, next = then, which = 1 - which;
        }
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t i = 0; i < unit.rows; i++) {
                int64_t at = h * padded_rows + i;
                if (bad) have[at].total = __builtin_nanf("");
                F::to_key_order(values + at * v_lanes, v_lanes);
                store_partial(call, s, unit, unit.head + h, unit.row + i, have[at], values + at * v_lanes);
            }
        }
    }

    void locate_tile(const Sequence& s, int64_t low, int64_t high, Tile& tile) { locate_keys(call, s, low, low, high, nullptr, tile); }

    // Attends to a tile, for as many heads at a time as are read together. Values are prefetched while keys are scored, and the
    // next keys while values are accumulated.
    void visit(const Sequence& s, const Unit& unit, const Tile& tile, const Tile* after, const SeenPositions& positions,
               const Logits& logits) {
        const bool hidden = s.selected && positions.hide_some(tile);
        int64_t some = heads_at_once(keys(tile, 0), values_in(tile, 0));
        for (int64_t h = 0; h < unit.heads; h += some) {
            int64_t heads = least(some, unit.heads - h), head = unit.head + h;
            RowReads k = keys(tile, head), v = values_in(tile, head), next{};
            if (h + some < unit.heads) next = keys(tile, head + some);
            else if (after) next = keys(*after, unit.head);
            score(ready(k, call.cache.k.dim), v, h, heads);
            for (int64_t i = h; i < h + heads; i++) softmax_head(s, unit, tile, i, hidden, logits);
            accumulate(ready(v, call.cache.v.dim), next, h, heads);
        }
    }

    RowReads keys(const Tile& tile, int64_t head) const { return reads(call.cache.k, call.new_k, tile, tile.k, tile.k_groups, tile.k_scale, head); }
    RowReads values_in(const Tile& tile, int64_t head) const { return reads(call.cache.v, call.new_v, tile, tile.v, tile.v_groups, tile.v_scale, head); }

    static RowReads reads(const Pages& p, const Array& fresh, const Tile& tile, const uint8_t* const* at, const uint8_t* const* groups,
                          const int64_t* scale_at, int64_t head) {
        if (tile.cut) {
            int64_t size = size_of(p.type);
            return {at, tile.count, head * p.head * size, p.head * size, p.row() * size, p.type, elements_of(p), p.whole_rows(),
                    p.head < p.slot_low, p.groups ? groups : nullptr, p.group_row(nullptr), head * p.group_head,
                    p.type == INT4_ZP ? p.scale + head * p.scale_head : nullptr, scale_at, p.scale_head};
        }
        int64_t size = size_of(fresh.type);
        return {at, tile.count, head * fresh.head * size, fresh.head * size, p.dim * size, fresh.type, elements_of(fresh, p.dim),
                fresh.dim == 1, fresh.head < fresh.token, nullptr, {}, 0};
    }

    // Rows are multiplied in place, unless their elements are not contiguous, would be decoded again for every strip, or are copied in
    // any case.
    bool in_place(const RowReads& r) const { return r.whole && !is_copied<F>(r.type) && (padded_rows == strip || r.type == F::TYPE); }

    int64_t heads_at_once(const RowReads& k, const RowReads& v) const {
        if (!in_place(k) || !in_place(v) || !k.heads_contiguous || !v.heads_contiguous) return 1;
        return most<int64_t>(1, BYTES_AT_ONCE / most(k.bytes, v.bytes));
    }

    // Rows in the form that the products take. If they have to be copied, only those of one head.
    RowReads ready(const RowReads& from, int64_t dim) {
        if (in_place(from)) return from;
        int64_t units = round_up((dim + F::PER_UNIT - 1) / F::PER_UNIT, W), step = round_up(from.bytes, 64) + 64;
        if (!from.whole) gather_rows(from.at, from.count, from.first, from.elements, strided, step);
        for (int64_t j = 0; j < from.count; j++) {
            const uint8_t* row = from.whole ? from.row(j, 0) : strided + j * step;
            if (from.type != F::TYPE) {
                int32_t* to = copies + j * (units + W);  // not a power of two: rows would share few sets of the first cache
                as_units<F>(row, from.type, dim, to, units, from.groups_of(j), from.zero_of(j, 0));
                row = (const uint8_t*)to;
            }
            places[j] = row;
        }
        return {places, from.count, 0, 0, dim * size_of(F::TYPE), F::TYPE, {}, true, false, nullptr, {}, 0};
    }

    // Calls f with a type and the number of rows in a strip as constants.
    template <class Do>
    INLINE void with_strip(int64_t type, Do f) {
        with_type(type, [&](auto t) {
            if constexpr (FITS<F, t.value>) {
                if (strip == 1) f(t, std::integral_constant<int, 1>());
                else if (strip == 2) f(t, std::integral_constant<int, 2>());
                else f(t, std::integral_constant<int, 4>());
            }
        });
    }

    void score(const RowReads& k, const RowReads& coming, int64_t first, int64_t heads) {
        Prefetcher ahead(coming, heads);
        with_strip(k.type, [&](auto t, auto rows) {
            constexpr int MANY = W / rows.value;
            constexpr int64_t STRIDE = DECODE_KEYS / MANY;  // a constant: with a variable, bf16 takes a few percent longer
            for (int64_t j = 0; j < least(STRIDE, k.count); j++) {
                for (int64_t h = 0; h < heads; h++) {
                    const uint8_t* key[MANY];
                    int64_t zero[MANY] = {};
                    const int64_t offset = k.first + h * k.head;
                    UNROLL for (int i = 0; i < MANY; i++) {
                        const int64_t at = least(j + i * STRIDE, k.count - 1);
                        key[i] = k.at[at] + offset;
                        if constexpr (t.value == INT4_ZP) zero[i] = k.zero_of(at, h);
                        if (i % STREAMS == 0) ahead.fetch();
                    }
                    for (int64_t r = 0; r < padded_rows; r += rows.value) {
                        int64_t at = (first + h) * padded_rows + r;
                        store(scores + at * DECODE_KEYS + j * W,
                              scores_of<F, t.value, rows.value>(q + at * k_units, k_units, key, zero, call.cache.k.dim));
                    }
                }
            }
            for (int64_t r = 0; r < heads * padded_rows; r += rows.value) {
                to_key_order<STRIDE>(scores + (first * padded_rows + r) * DECODE_KEYS);
            }
        });
    }

    void softmax_head(const Sequence& s, const Unit& unit, const Tile& tile, int64_t h, bool hidden, Logits logits) {
        const Pages &k = call.cache.k, &v = call.cache.v;
        bool one = k.scale && k.scale_page == 0 && k.scale_slot == 0 && tile.cut == tile.count;  // one scale for all keys
        if (one) logits.factor *= k.scale_of(0, 0, unit.head + h);
        bool k_scaled = !one && scales_of(k, tile.k, tile.k_scale, tile, unit.head + h, k_scale, DECODE_KEYS);
        bool v_scaled = scales_of(v, tile.v, tile.v_scale, tile, unit.head + h, v_scale, DECODE_KEYS);
        int64_t base = h * padded_rows;
        const bool biased = hidden || alibi_is_bias(call, s);
        Scores seen{scores + base * DECODE_KEYS, DECODE_KEYS, round_up(tile.count, 2 * W), k_scaled ? k_scale : nullptr,
                    v_scaled ? v_scale : nullptr, biased ? bias : nullptr, call.alibi && !biased, {}, {}, {}, {}};
        for (int64_t i = 0; i < unit.rows; i++) {
            const VisibleRange& visible = visibles[base + i];
            seen.first[i] = most<int64_t>(0, visible.low - tile.first);
            seen.last[i] = most<int64_t>(0, least(tile.count, visible.high - tile.first));
            seen.slope[i] = visible.slope, seen.distance[i] = (float)(visible.at - tile.first);
            for (int64_t j = 0; biased && j < seen.padded; j++) {
                bias[i * DECODE_KEYS + j] = j < tile.count ? alibi_bias(visible, position_in(call, s, tile, j)) : 0.0f;
            }
            const Range sees = hidden ? seen_by(call, s, visible.token) : Range{};
            for (int64_t j = 0; hidden && j < tile.count; j++) {
                if (tile.position[j] < sees.low || tile.position[j] >= sees.high) bias[i * DECODE_KEYS + j] = -__builtin_inff();
            }
        }
        softmax<F>(seen, unit.rows, weights + base * UNITS, UNITS, logits, have + base, keep + base);
        for (int64_t i = base + unit.rows; i < base + padded_rows; i++) {
            memset(weights + i * UNITS, 0, UNITS * 4);
            keep[i] = 1.0f;
        }
    }

    void accumulate(const RowReads& v, const RowReads& coming, int64_t first, int64_t heads) {
        Prefetcher ahead(coming, heads);
        with_strip(v.type, [&](auto t, auto rows) {
            int64_t stream_stride = round_up((v.count + STREAMS - 1) / STREAMS, SLOTS<t.value>);
            for (int64_t slot = 0; slot < stream_stride; slot += SLOTS<t.value>) {
                for (int64_t h = 0; h < heads; h++) {
                    for (int64_t r = 0; r < padded_rows; r += rows.value) {
                        int64_t at = (first + h) * padded_rows + r;
                        values_of<F, t.value, rows.value>(weights + at * UNITS, v, h, slot, stream_stride, r ? nullptr : &ahead,
                                                          call.cache.v.dim, keep + at, values + at * v_lanes, v_lanes);
                    }
                }
            }
        });
    }
};

}  // namespace QUIRE_LEVEL
}  // namespace quire
