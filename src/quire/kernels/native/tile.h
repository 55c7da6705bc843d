// Tiles of keys: the addresses of their rows, their scales, and the softmax of the scores of query rows.
#pragma once
#include "attention_features.h"
#include "gather.h"
#include "product.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr int64_t KEYS = 256;  // of a tile
constexpr double LN2 = 0.693147180559945309;
constexpr float HUGE_LOGIT = 1 << 22;  // its rounding error is up to 1/4

// The keys of a tile: the first `cut` are in the cache, the others are new tokens. The row of a key that no query sees is null.
struct Tile {
    int64_t first, count, cut;
    const uint8_t* k[KEYS];
    const uint8_t* v[KEYS];
    const uint8_t* k_groups[KEYS];  // the scales of their groups, of head 0; null if the format has none
    const uint8_t* v_groups[KEYS];
    int64_t k_scale[KEYS], v_scale[KEYS];  // where the scales of head 0 are, if there is one per token
    int64_t position[KEYS];                // with a selection
    bool bad;  // whether a required page does not exist
};

// The position of a key of a tile.
static INLINE int64_t position_in(const Attend& call, const Sequence& s, const Tile& tile, int64_t j) {
    return s.selected ? tile.position[j] : key_position(call, s, tile.first + j);
}

// Fills a tile with the next selected keys that some row of a unit sees, at most `most_keys`. Numbers [low, high) count the keys of
// the entries of the unit's row of the selection. Returns the number after the last one that was looked at. A tile of a selection
// starts at key 0: its rows see all of its keys that their `bias` does not hide.
static int64_t locate_selected(const Attend& call, const Sequence& s, const Unit& unit, const Range& wanted, int64_t low,
                               int64_t most_keys, Tile& tile) {
    const Cache& cache = call.cache;
    const Select& select = call.select;
    const bool columns = select.kind == Select::COLUMNS;
    const int64_t size = cache.page_size, each = select.keys_per_entry(size), limit = (s.kv_len + each - 1) / each;
    const int64_t row = columns ? s.seq : s.token + unit.row / call.group;
    const int64_t k_size = size_of(cache.k.type), v_size = size_of(cache.v.type);
    tile.first = 0, tile.count = 0, tile.bad = false;
    while (low < unit.high && tile.count < most_keys) {
        int64_t entry = select.at(row, unit.head, columns ? low / size : low), offset = columns ? low % size : 0;
        int64_t stop = least(unit.high, low - offset + each);
        if (entry < 0 || entry >= limit) {
            tile.bad |= entry != -1;
            low = stop;
            continue;
        }
        int64_t position = entry * each + offset, column = position / size, slot = position - column * size;
        int64_t skipped = most<int64_t>(0, wanted.low - position), end = least(position + stop - low, wanted.high);
        if (position + skipped >= end) {
            low = stop;
            continue;
        }
        position += skipped, slot += skipped, low += skipped;
        int64_t page = column < call.batch.width ? call.batch.table.at(s.seq, column) : -1;
        if (page < 0 || page >= cache.pages) {
            tile.bad = true;
            low = stop;
            continue;
        }
        const uint8_t* k = cache.k.data + page * cache.k.page * k_size;
        const uint8_t* v = cache.v.data + page * cache.v.page * v_size;
        for (; position < end && tile.count < most_keys; position++, slot++, low++) {
            int64_t j = tile.count++;
            tile.position[j] = position;
            tile.k_scale[j] = page * cache.k.scale_page + slot * cache.k.scale_slot;
            tile.v_scale[j] = page * cache.v.scale_page + slot * cache.v.scale_slot;
            tile.k[j] = k + cache.k.slot(slot) * k_size;
            tile.v[j] = v + cache.v.slot(slot) * v_size;
            tile.k_groups[j] = cache.k.groups_at(page, slot), tile.v_groups[j] = cache.v.groups_at(page, slot);
        }
        if (position == end) low = stop;
    }
    tile.cut = tile.count;
    return low;
}

// The positions that a new token sees, of those that are selected.
static INLINE Range seen_by(const Attend& call, const Sequence& s, int64_t token) {
    const VisibleRange visible = visible_range(call, s, token, 0);
    return {visible.low, visible.high};
}

// The row of q of a token of a unit.
static INLINE int64_t query_row(const Sequence& s, const Unit& unit, int64_t token) {
    return unit.shared ? unit.shared[token].row : s.token + token;
}

// The keys of a unit that a query row sees: all of a shared prefix.
static INLINE VisibleRange visible_in(const Attend& call, const Sequence& s, const Unit& unit, int64_t token, int64_t q_head) {
    if (unit.shared) return {token, unit.shared[token].at, unit.low, unit.high, call.alibi ? call.alibi[q_head] * LOG2E : 0.0f};
    VisibleRange visible = visible_range(call, s, token, q_head);
    if (call.prefixes.count) visible.low = most(visible.low, unit.low);
    return visible;
}

// The positions that some rows of a unit see, and those that all of them see.
struct SeenPositions {
    Range some{INT64_MAX, 0}, all{0, INT64_MAX};

    SeenPositions(const Attend& call, const Sequence& s, const Unit& unit) {
        if (!s.selected) return;
        for (int64_t token = unit.row / call.group; token <= (unit.row + unit.rows - 1) / call.group; token++) {
            Range one = seen_by(call, s, token);
            if (one.low < one.high) some = {least(some.low, one.low), most(some.high, one.high)};
            all = {most(all.low, one.low), least(all.high, one.high)};
        }
    }

    // Whether some row does not see some key of a tile of a selection.
    INLINE bool hide_some(const Tile& tile) const {
        bool hidden = false;
        for (int64_t j = 0; j < tile.count; j++) hidden |= (tile.position[j] < all.low) | (tile.position[j] >= all.high);
        return hidden;
    }
};

// Locates keys [low, high) of the tile that starts at `first`. `seen`, if not null, says which keys some query of a tree sees.
static void locate_keys(const Attend& call, const Sequence& s, int64_t first, int64_t low, int64_t high, const bool* seen, Tile& tile) {
    const Cache& cache = call.cache;
    tile.first = first, tile.count = high - first, tile.bad = false;
    int64_t end = s.fresh ? most(low, least(high, s.context)) : high;
    tile.cut = end - first;
    int64_t k_size = size_of(cache.k.type), v_size = size_of(cache.v.type);
    for (int64_t j = 0; j < low - first; j++) tile.k[j] = tile.v[j] = nullptr;
    for (int64_t key = low; key < end;) {
        int64_t column = key / cache.page_size, slot = key - column * cache.page_size;
        int64_t stop = least(end, key - slot + cache.page_size);
        bool needed = !seen;
        for (int64_t x = key; seen && x < stop; x++) needed |= seen[x - first];
        int64_t page = needed && column < call.batch.width ? call.batch.table.at(s.seq, column) : -1;
        bool exists = page >= 0 && page < cache.pages;
        tile.bad |= needed && !exists;
        const uint8_t* k = cache.k.data + (exists ? page * cache.k.page * k_size : 0);
        const uint8_t* v = cache.v.data + (exists ? page * cache.v.page * v_size : 0);
        for (; key < stop; key++, slot++) {
            int64_t j = key - first;
            tile.k_scale[j] = page * cache.k.scale_page + slot * cache.k.scale_slot;
            tile.v_scale[j] = page * cache.v.scale_page + slot * cache.v.scale_slot;
            bool read = exists && (!seen || seen[j]);
            tile.k[j] = read ? k + cache.k.slot(slot) * k_size : nullptr;
            tile.v[j] = read ? v + cache.v.slot(slot) * v_size : nullptr;
            tile.k_groups[j] = cache.k.groups_at(page, slot), tile.v_groups[j] = cache.v.groups_at(page, slot);
        }
    }
    for (int64_t key = end; key < high; key++) {
        int64_t j = key - first, row = s.token + new_token(call, s, key);
        bool read = !seen || seen[j];
        tile.k[j] = read ? call.new_k.data + row * call.new_k.token * size_of(call.new_k.type) : nullptr;
        tile.v[j] = read ? call.new_v.data + row * call.new_v.token * size_of(call.new_v.type) : nullptr;
    }
}

// The rows of one head of K or V: pointers to contiguous rows. Rows with strided elements are gathered into `buffer`, [KEYS, MOST_DIM].
struct Rows {
    const uint8_t* at[KEYS + 2];
    GroupRow groups[KEYS + 2];  // of cached rows
    int64_t zero[KEYS + 2];     // their zero points, if the type has them
    int64_t cut, count;
    int64_t type, new_type;

    int64_t type_of(int64_t j) const { return j < cut ? type : new_type; }
};

static void rows_of(const Pages& pages, const Array& fresh, const uint8_t* const* found, const uint8_t* const* groups,
                    const int64_t* scale_at, const Tile& tile, int64_t head, uint8_t* buffer, Rows& rows) {
    constexpr int64_t STEP = MOST_DIM * 4;
    rows.cut = tile.cut, rows.count = tile.count, rows.type = pages.type, rows.new_type = fresh.type;
    auto locate = [&](int64_t from, int64_t to, int64_t offset, bool whole, const Strides& elements) {
        if (!whole) gather_rows(found + from, to - from, offset, elements, buffer + from * STEP, STEP);
        for (int64_t j = from; j < to; j++) rows.at[j] = !found[j] ? ZEROS : whole ? found[j] + offset : buffer + j * STEP;
    };
    locate(0, tile.cut, head * pages.head * size_of(pages.type), pages.whole_rows(), elements_of(pages));
    locate(tile.cut, tile.count, head * fresh.head * size_of(fresh.type), fresh.dim == 1, elements_of(fresh, pages.dim));
    for (int64_t j = 0; j < tile.cut; j++) {
        if (pages.type == INT4_ZP) rows.zero[j] = found[j] ? zero_point_of(pages.scale[scale_at[j] + head * pages.scale_head]) : 0;
        if (pages.groups) rows.groups[j] = pages.group_row(found[j] ? groups[j] + head * pages.group_head : nullptr);
    }
    for (int64_t j = tile.count; j < round_up(tile.count, 2); j++) rows.at[j] = ZEROS;
}

// The scales of a tile's keys or values of one head, 1 for new tokens, 0 where there is no key; false if there are none.
static bool scales_of(const Pages& pages, const uint8_t* const* found, const int64_t* at, const Tile& tile, int64_t head, float* to,
                      int64_t padded = KEYS) {
    if (!pages.scale) return false;
    if (pages.scale_page == 0 && pages.scale_slot == 0) {
        float scale = pages.scale_of(0, 0, head);
        for (int64_t j = 0; j < tile.cut; j++) to[j] = scale;
    } else {
        const float* first = pages.scale + head * pages.scale_head;
        for (int64_t j = 0; j < tile.cut; j++) to[j] = found[j] ? first[at[j]] : 0.0f;
        for (int64_t j = 0; pages.type == INT4_ZP && j < tile.cut; j++) to[j] = without_zero_point(to[j]);
    }
    for (int64_t j = tile.cut; j < tile.count; j++) to[j] = 1.0f;
    for (int64_t j = tile.count; j < padded; j++) to[j] = 0.0f;
    return true;
}

// The scores of up to MOST_ROWS rows over a tile, and which keys the rows see.
constexpr int64_t MOST_ROWS = 32;
struct Scores {
    float* data;
    int64_t stride, padded;      // the distance of rows, and the keys that are processed: a multiple of 2 W
    const float* key_scale;      // of each key, or null
    const float* value_scale;    // of each value, or null
    const float* bias;           // added to the logits, row by row like the scores, or null
    bool alibi;
    int32_t first[MOST_ROWS], last[MOST_ROWS];      // the keys that each row sees
    float slope[MOST_ROWS], distance[MOST_ROWS];    // ALiBi's slope, and how far the row is from the first key
};

// Turns the scores of rows over a tile into weights, and computes `keep`, the factors of earlier sums. Each phase runs over all
// rows, so that independent rows hide latency. Whether a row is masked changes no rounding.
template <class F>
static void softmax(const Scores& s, int64_t rows, int32_t* weights, int64_t weights_stride, const Logits& logits, SoftmaxState* have,
                  float* keep) {
    const float none = -__builtin_inff();
    const vf factor = splat(logits.factor), never = splat(none);
    const bool plain = !s.key_scale && !s.bias && !s.alibi && !logits.transforms();  // then logits are computed twice and not stored
    auto cut_off = [&](int64_t r) { return s.first[r] > 0 || s.last[r] < s.padded; };
    auto shown = [&](vf x, int64_t r, int64_t j) {
        vi lane = lanes() + (int32_t)j;
        return select((lane >= s.first[r]) & (lane < s.last[r]), x, never);
    };
    float before[MOST_ROWS], here[MOST_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        float* score = s.data + r * s.stride;
        vf best = never;
        if (plain && !cut_off(r)) {
            // Rounding is monotonic: the largest score, or the smallest, gives the largest logit.
            if (logits.factor < 0) {
                for (int64_t j = 0; j < s.padded; j += W) best = larger(best, -load(score + j));
                best *= -factor;
            } else {
                for (int64_t j = 0; j < s.padded; j += W) best = larger(best, load(score + j));
                best *= factor;
            }
        } else {
            for (int64_t j = 0; j < s.padded; j += W) {
                vf x = load(score + j) * (s.key_scale ? load(s.key_scale + j) * factor : factor);
                x = logits.transform(x);
                if (s.bias) x += load(s.bias + r * s.stride + j);
                if (s.alibi) x -= alibi_penalty(s.distance[r], s.slope[r], j);
                if (cut_off(r)) x = shown(x, r, j);
                if (!plain) store(score + j, x);
                best = larger(best, x);
            }
        }
        here[r] = largest(best);
    }
    for (int64_t r = 0; r < rows; r++) {
        before[r] = have[r].top;
        if (here[r] > have[r].top) have[r].top = here[r];
        if (have[r].top == none && here[r] != here[r]) have[r].top = 0.0f;  // so that a NaN reaches the output
        // No key was visible so far: there is nothing to keep, and all logits are -inf.
        keep[r] = have[r].top == none ? 0.0f : before[r] - have[r].top;
    }
    for (int64_t r = rows; r < round_up(rows, W); r++) keep[r] = 0.0f;
    for (int64_t r = 0; r < rows; r += W) store(keep + r, exp2(load(keep + r)));
    for (int64_t r = 0; r < rows; r++) {
        float* score = s.data + r * s.stride;
        int32_t* weight = weights + r * weights_stride;
        const float top = have[r].top == none ? 0.0f : have[r].top;
        // The fused multiply-add does not round the logit, but the maximum was rounded: with huge logits the difference can be too
        // large for the exponential. So huge logits are computed and rounded first.
        const bool huge = plain && (top > HUGE_LOGIT || top < -HUGE_LOGIT);
        for (int64_t j = 0; huge && j < s.padded; j += W) {
            vf x = load(score + j) * factor;
            store(score + j, cut_off(r) ? shown(x, r, j) : x);
        }
        auto put = [&](int64_t j, vf low, vf high, vf& total) {
            low = exp2(low), high = exp2(high);
            total += low;
            total += high;
            if (s.value_scale) low *= load(s.value_scale + j), high *= load(s.value_scale + j + W);
            F::put(weight, j, low, high);
        };
        vf total{};
        if (!plain || huge) {
            for (int64_t j = 0; j < s.padded; j += 2 * W) put(j, load(score + j) - top, load(score + j + W) - top, total);
        } else if (!cut_off(r)) {
            for (int64_t j = 0; j < s.padded; j += 2 * W) {
                put(j, fma(load(score + j), factor, splat(-top)), fma(load(score + j + W), factor, splat(-top)), total);
            }
        } else {
            for (int64_t j = 0; j < s.padded; j += 2 * W) {
                vf low = fma(load(score + j), factor, splat(-top)), high = fma(load(score + j + W), factor, splat(-top));
                put(j, shown(low, r, j), shown(high, r, j + W), total);
            }
        }
        have[r].total = have[r].total * keep[r] + sum(total);
    }
}

// Adds the sink, divides, and stores one row of the output and of the LSE. The length of `values` in memory is a multiple of W.
static void finish(const Attend& call, const Sequence& s, int64_t head, int64_t row, SoftmaxState have, const float* values) {
    int64_t token = s.token + row / call.group, q_head = head * call.group + row % call.group;
    const float none = -__builtin_inff();
    float share = add_sink(call, q_head, have);
    if (call.lse) {
        double lse = have.total == 0 ? (double)none : have.top * LN2 + __builtin_log((double)have.total);
        call.lse[token * call.lse_token + q_head * call.lse_head] = lse;
    }
    share = have.total == 0 ? 0.0f : share / have.total;
    with_type(call.out.type, [&](auto t) {
        uint8_t* out = call.out.data + (token * call.out.token + q_head * call.out.head) * SIZE<t.value>;
        for (int64_t d = 0; d < call.cache.v.dim; d += W) {
            int64_t count = least<int64_t>(W, call.cache.v.dim - d);
            vf x = load(values + d) * share;
            if (call.out_scale) x /= (float)call.out_scale;
            uint8_t some[W * 4];
            if (call.out.dim == 1) {
                encode<t.value>(x, out + d * SIZE<t.value>, count);
            } else {
                encode<t.value>(x, some);
                for (int64_t i = 0; i < count; i++) {
                    memcpy(out + (d + i) * call.out.dim * SIZE<t.value>, some + i * SIZE<t.value>, SIZE<t.value>);
                }
            }
        }
    });
}

// Stores the partial result of a row, or its output.
static INLINE void store_partial(const Attend& call, const Sequence& s, const Unit& unit, int64_t head, int64_t row, SoftmaxState have,
                         const float* values) {
    if (!unit.part) return finish(call, s, head, row, have, values);
    float* part = unit.part + ((head - unit.head) * unit.part_rows + row - unit.row) * part_stride(call);
    part[0] = have.top, part[1] = have.total;
    memcpy(part + 2, values, call.cache.v.dim * 4);
}

static void combine(const Attend& call, const SplitUnit& work) {
    const Sequence s(call, work.seq);
    const float none = -__builtin_inff();
    const int64_t v_dim = call.cache.v.dim;
    float values[MOST_DIM];
    for (int64_t i = 0; i < work.heads * work.rows; i++) {
        auto row_of = [&](int64_t p) { return work.parts[p].at + i / work.rows * work.parts[p].head + i % work.rows * part_stride(call); };
        SoftmaxState have{none, 0.0f};
        for (int64_t p = 0; p < work.count; p++) have.top = most(have.top, row_of(p)[0]);
        memset(values, 0, sizeof values);
        for (int64_t p = 0; p < work.count; p++) {
            const float* part = row_of(p);
            if (part[1] == 0) continue;
            float share = part[0] == have.top ? 1.0f : exp2(splat(part[0] - have.top))[0];
            have.total += part[1] * share;
            for (int64_t d = 0; d < v_dim; d += W) {
                store(values + d, fma(load_some(part + 2 + d, v_dim - d), splat(share), load(values + d)));
            }
        }
        finish(call, s, work.head + i / work.rows, work.row + i % work.rows, have, values);
    }
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
