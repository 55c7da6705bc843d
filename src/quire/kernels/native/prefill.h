// Sequences with many new tokens. Keys and values of a tile are packed once and used by all strips of query rows:
//
//     for each tile of keys:   pack K as panels of keys, V as panels of values
//         for each strip of rows:   scores = q K;   weights = 2^(logits - largest);   values = values * keep + weights V
//
// Tiles start at multiples of KEYS, and sums are computed in the order of keys: the bits of a row depend on its own position alone.
#pragma once
#include "tile.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr int64_t STRIP = ROUND_ROWS > 1 ? 32 : 12;  // rows of a strip

template <class F>
struct PrefillKernel {
    const Attend& call;
    int64_t k_units, v_lanes;
    int32_t *q, *k_panels, *v_panels, *weights, *line;
    float *values, *scores, *keep, *bias, *k_scale, *v_scale;
    SoftmaxState* have;
    VisibleRange* visibles;
    Tile* tile;
    Rows* rows;
    uint8_t* gathered;

    static int64_t most_rows(const Attend& call) {
        int64_t widest = most(call.cache.k.dim, call.cache.v.dim);
        return round_up(1024 * 128 / most<int64_t>(widest, 128), STRIP);
    }

    PrefillKernel(const Attend& call, Workspace& workspace) : call(call) {
        int64_t count = most_rows(call);
        k_units = round_up((call.cache.k.dim + F::PER_UNIT - 1) / F::PER_UNIT, W);
        v_lanes = round_up(call.cache.v.dim, LANES_OF_PANEL);
        q = workspace.take<int32_t>(count * k_units);
        values = workspace.take<float>(count * v_lanes);
        scores = workspace.take<float>(STRIP * KEYS);
        weights = F::PER_UNIT == 1 ? (int32_t*)scores : workspace.take<int32_t>(STRIP * KEYS / 2);
        k_panels = workspace.take<int32_t>(KEYS * k_units);
        v_panels = workspace.take<int32_t>(KEYS * v_lanes);
        line = workspace.take<int32_t>(W * most(k_units, v_lanes));
        keep = workspace.take<float>(MOST_ROWS);
        bias = workspace.take<float>(call.mask || call.select.kind || (call.alibi && call.batch.shard.ranks > 1) ? STRIP * KEYS : 0);
        k_scale = workspace.take<float>(KEYS);
        v_scale = workspace.take<float>(KEYS);
        have = workspace.take<SoftmaxState>(count);
        visibles = workspace.take<VisibleRange>(count);
        tile = workspace.take<Tile>(1);
        rows = workspace.take<Rows>(1);
        gathered = workspace.take<uint8_t>(KEYS * MOST_DIM * 4);
    }

    // A row as units: in place if it has the right type and length, otherwise a copy in `to`.
    const int32_t* as_factor(const Rows& from, int64_t j, int64_t dim, int32_t* to, int64_t padded) {
        if (j >= from.count) return (const int32_t*)ZEROS;
        int64_t type = from.type_of(j);
        if (type == F::TYPE && dim == padded * F::PER_UNIT) return (const int32_t*)from.at[j];
        as_units<F>(from.at[j], type, dim, to, padded, from.groups[j], from.zero[j]);
        return to;
    }

    void pack_keys(int64_t head) {
        rows_of(call.cache.k, call.new_k, tile->k, tile->k_groups, tile->k_scale, *tile, head, gathered, *rows);
        for (int64_t first = 0; first < round_up(tile->count, LANES_OF_PANEL); first += W) {
            const int32_t* from[W];
            for (int64_t i = 0; i < W; i++) from[i] = as_factor(*rows, first + i, call.cache.k.dim, line + i * k_units, k_units);
            int32_t* to = k_panels + first / LANES_OF_PANEL * LANES_OF_PANEL * k_units + first % LANES_OF_PANEL;
            for (int64_t u = 0; u < k_units; u += W) {
                vi square[W];
                UNROLL for (int i = 0; i < W; i++) square[i] = load<vi>(from[i] + u);
                transpose(square);
                UNROLL for (int i = 0; i < W; i++) store(to + (u + i) * LANES_OF_PANEL, square[i]);
            }
        }
    }

    void pack_values(int64_t head, int64_t units) {
        constexpr int64_t PER = F::PER_UNIT;
        rows_of(call.cache.v, call.new_v, tile->v, tile->v_groups, tile->v_scale, *tile, head, gathered, *rows);
        int64_t row_units = v_lanes / PER, panel = units * LANES_OF_PANEL;
        for (int64_t u = 0; u < units; u++) {
            const int32_t* a = as_factor(*rows, u * PER, call.cache.v.dim, line, row_units);
            const int32_t* b = PER == 1 ? a : as_factor(*rows, u * PER + 1, call.cache.v.dim, line + v_lanes, row_units);
            for (int64_t d = 0; d < v_lanes; d += PER * W) {
                int32_t* to = v_panels + d / LANES_OF_PANEL * panel + u * LANES_OF_PANEL + d % LANES_OF_PANEL;
                vi low = load<vi>(a + d / PER), high = PER == 1 ? vi{} : load<vi>(b + d / PER);
                F::interleave(low, high);
                store(to, low);
                if (PER == 2) store(to + W, high);
            }
        }
    }

    void run(const Unit& unit) {
        Tiles tiles;
        const Sequence s(call, unit.seq);
        int64_t head = unit.head, group = call.group, k_dim = call.cache.k.dim, padded_rows = round_up(unit.rows, ROUND_ROWS);
        for (int64_t i = 0; i < unit.rows; i++) {
            int64_t token = (unit.row + i) / group, q_head = head * group + (unit.row + i) % group, size = size_of(call.q.type);
            const uint8_t* from = call.q.data + (query_row(s, unit, token) * call.q.token + q_head * call.q.head) * size;
            if (call.q.dim != 1) from = gather_row(from, elements_of(call.q, k_dim), gathered);
            as_units<F>(from, call.q.type, k_dim, q + i * k_units, k_units);
            visibles[i] = visible_in(call, s, unit, token, q_head);
            if (s.selected) visibles[i].low = 0, visibles[i].high = KEYS;
            have[i] = SoftmaxState{-__builtin_inff(), 0.0f};
        }
        for (int64_t i = unit.rows; i < padded_rows; i++) memset(q + i * k_units, 0, k_units * 4);
        memset(values, 0, padded_rows * v_lanes * 4);
        const Logits logits(call);
        bool bad = false;
        const SeenPositions positions(call, s, unit);
        for (int64_t low = unit.low; s.selected && low < unit.high;) {
            low = locate_selected(call, s, unit, positions.some, low, KEYS, *tile);
            bad |= tile->bad;
            if (tile->count) attend_tile(s, unit, head, logits, !alibi_is_bias(call, s) && !positions.hide_some(*tile));
        }
        const int64_t last = last_seen(s, unit);
        for (int64_t first = unit.low / KEYS * KEYS; !s.selected && first < unit.high; first += KEYS) {
            // Skip keys that no window of a tree contains: there may be many of them before the new tokens.
            if (first >= last && first + KEYS <= s.context) first = s.context / KEYS * KEYS;
            if (first >= unit.high) break;
            int64_t low = most(first, unit.low), high = least(first + KEYS, unit.high);
            bool seen[KEYS], some = true, plain = !s.tree || (high <= s.context && call.left == UNBOUNDED && call.right == UNBOUNDED);
            bool all = plain;
            if (!plain) some = find_visible(s, unit, first, low, high, seen);
            else if (call.spans.data) some = find_spanned(unit, first, low, high, seen, all);
            if (!some) continue;
            locate_keys(call, s, first, low, high, all ? nullptr : seen, *tile);
            bad |= tile->bad;
            attend_tile(s, unit, head, logits, plain && !alibi_is_bias(call, s));
        }
        for (int64_t i = 0; i < unit.rows; i++) {
            if (bad) have[i].total = __builtin_nanf("");
            store_partial(call, s, unit, head, unit.row + i, have[i], values + i * v_lanes);
        }
    }

    // One past the last key of the context that some row sees.
    int64_t last_seen(const Sequence& s, const Unit& unit) const {
        if (!s.tree || !call.positions.data) return s.context;
        int64_t last = 0;
        for (int64_t i = 0; i < unit.rows; i++) {
            Range seen = context_seen(call, visibles[i].at, s.begin);
            if (seen.low < seen.high) last = most(last, seen.high);
        }
        return call.batch.shard.count(last);
    }

    // Which keys of a tile lie in the span of some row. `all`: whether all of them do.
    bool find_spanned(const Unit& unit, int64_t first, int64_t low, int64_t high, bool* seen, bool& all) {
        int32_t change[KEYS + 1] = {}, count = 0;  // in the number of spans, from one key to the next
        for (int64_t i = 0; i < unit.rows; i++) {
            if (i && visibles[i].token == visibles[i - 1].token) continue;
            int64_t begin = most(low, visibles[i].low), end = least(high, visibles[i].high);
            if (begin < end) change[begin - first]++, change[end - first]--;
        }
        bool some = false;
        all = true;
        for (int64_t key = first; key < high; key++) {
            count += change[key - first];
            seen[key - first] = count > 0;
            some |= count > 0, all &= count > 0 || key < low;
        }
        return some;
    }

    // Which keys of a tile some row of a tree sees.
    bool find_visible(const Sequence& s, const Unit& unit, int64_t first, int64_t low, int64_t high, bool* seen) {
        bool some = false;
        for (int64_t key = first; key < high; key++) {
            bool one = false;
            for (int64_t i = 0; i < unit.rows && !one && key >= low; i++) {
                if (i && visibles[i].token == visibles[i - 1].token) continue;
                one = is_visible(call, s, visibles[i], key);
            }
            seen[key - first] = one;
            some |= one;
        }
        return some;
    }

    // Attends to one tile with all rows. A bias masks keys if visibility does not follow from lengths, and has ALiBi's penalty if
    // distances do not. A strip uses only the panels of keys that one of its rows sees.
    void attend_tile(const Sequence& s, const Unit& unit, int64_t head, const Logits& logits, bool plain) {
        constexpr int64_t PER = F::PER_UNIT, PANEL = LANES_OF_PANEL, WEIGHTS = KEYS / PER;
        int64_t first = tile->first, count = tile->count, all_units = round_up((count + PER - 1) / PER, ROUND_UNITS);
        int64_t k_used = ROUND_UNITS > 1 ? k_units : (call.cache.k.dim + PER - 1) / PER;
        bool packed = false, k_scaled = false, v_scaled = false;
        for (int64_t from = 0; from < unit.rows; from += STRIP) {
            int64_t rows = least(STRIP, unit.rows - from), run_rows = round_up(rows, ROUND_ROWS);
            int64_t lowest = INT64_MAX, highest = 0;
            for (int64_t i = from; i < from + rows; i++) {
                if (visibles[i].low >= visibles[i].high) continue;
                lowest = least(lowest, visibles[i].low), highest = most(highest, visibles[i].high);
            }
            int64_t begin = most<int64_t>(0, lowest - first) / PANEL * PANEL, end = least(count, highest - first);
            if (end <= begin) continue;
            if (!packed) {
                pack_keys(head);
                pack_values(head, all_units);
                k_scaled = scales_of(call.cache.k, tile->k, tile->k_scale, *tile, head, k_scale);
                v_scaled = scales_of(call.cache.v, tile->v, tile->v_scale, *tile, head, v_scale);
                packed = true;
            }
            int64_t padded = round_up(end, 2 * W) - begin, units = round_up((end + PER - 1) / PER, ROUND_UNITS) - begin / PER;
            Panels keys{k_panels + begin * k_units, (round_up(end, PANEL) - begin) / PANEL, PANEL * k_units, k_used};
            product<F>(Operand{q + from * k_units, k_units}, run_rows, keys, Sums{scores, KEYS, nullptr});
            Scores seen{scores, KEYS, padded, k_scaled ? k_scale + begin : nullptr, v_scaled ? v_scale + begin : nullptr,
                        plain ? nullptr : bias, plain && call.alibi, {}, {}, {}, {}};
            for (int64_t i = 0; i < rows; i++) {
                const VisibleRange& visible = visibles[from + i];
                if (!plain) fill_bias(s, visible, begin, padded, bias + i * KEYS);
                seen.first[i] = most<int64_t>(0, visible.low - first - begin);
                seen.last[i] = most<int64_t>(0, least(end, visible.high - first) - begin);
                seen.slope[i] = visible.slope, seen.distance[i] = (float)(visible.at - first - begin);
            }
            softmax<F>(seen, rows, weights, WEIGHTS, logits, have + from, keep);
            for (int64_t i = 0; i < rows; i++) {
                for (int64_t u = padded / PER; u < units; u++) weights[i * WEIGHTS + u] = 0;
            }
            for (int64_t i = rows; i < run_rows; i++) {
                memset(weights + i * WEIGHTS, 0, units * 4);
                keep[i] = 1.0f;
            }
            product<F>(Operand{weights, WEIGHTS}, run_rows,
                       Panels{v_panels + begin / PER * PANEL, v_lanes / PANEL, all_units * PANEL, units},
                       Sums{values + from * v_lanes, v_lanes, keep});
        }
    }

    void fill_bias(const Sequence& s, const VisibleRange& visible, int64_t begin, int64_t padded, float* bias) {
        const Range seen = s.selected ? seen_by(call, s, visible.token) : Range{};
        for (int64_t i = 0; i < padded; i++) {
            int64_t j = begin + i;
            bool sees = j < tile->count && tile->k[j] && (!s.tree || is_visible(call, s, visible, tile->first + j));
            if (s.selected && sees) sees = tile->position[j] >= seen.low && tile->position[j] < seen.high;
            bias[i] = sees ? alibi_bias(visible, position_in(call, s, *tile, j)) : -__builtin_inff();
        }
    }
};

}  // namespace QUIRE_LEVEL
}  // namespace quire
