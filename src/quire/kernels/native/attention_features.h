// The attention features as hooks that the kernels call: causality, window, spans and tree mask (`visible_range`, `is_visible`), softcap
// (`Logits`), ALiBi (`alibi_penalty`), sinks (`add_sink`). Kernels number the keys that are in the cache; with a shard, the position
// of a key is another number (`Shard` of call.h). With a selection, keys are numbered within a tile, which has their positions.
#pragma once
#include "functions.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr float LOG2E = 1.44269504088896341f;

struct Sequence {
    int64_t seq, token, q_len, kv_len;
    int64_t begin, context;  // the position of the first new token, and the number of keys before it
    bool fresh;  // whether its new tokens are passed as arguments
    bool causal, tree, selected;

    Sequence(const Attend& call, int64_t seq)
        : seq(seq),
          token(call.lengths[seq].begin),
          q_len(call.lengths[seq].q_len),
          kv_len(call.lengths[seq].kv_len),
          begin(kv_len - q_len),
          context(call.batch.shard.count(begin)),
          fresh(call.takes_new(seq)),
          causal(call.is_causal(seq)),
          tree(call.mask),
          selected(call.select.kind) {}
};

// The keys that a query row sees: [low, high) without a tree mask; a tree's rows see some of the keys.
struct VisibleRange {
    int64_t token, at, low, high;  // the index of its token in the sequence's new tokens, its position
    float slope;                   // the ALiBi slope, for logits of base 2
};

static INLINE VisibleRange visible_range(const Attend& call, const Sequence& s, int64_t token, int64_t q_head) {
    const Shard& shard = call.batch.shard;
    VisibleRange visible{token, s.begin + token, 0, s.kv_len, call.alibi ? call.alibi[q_head] * LOG2E : 0.0f};
    if (s.tree) {
        if (call.positions.data) visible.at = call.positions.at(s.token + token);
        visible.high = shard.count(visible.high);
        return visible;
    }
    if (call.spans.data) {
        Range seen = span_of(call.spans, s.token + token, s.kv_len);
        visible.low = shard.count(seen.low), visible.high = shard.count(seen.high);
        return visible;
    }
    int64_t right = s.causal ? 0 : call.right;
    if (call.left != UNBOUNDED) visible.low = most<int64_t>(0, visible.at - call.left);
    if (right != UNBOUNDED) visible.high = most<int64_t>(0, least(s.kv_len, visible.at + right + 1));
    if (shard.ranks > 1) visible.low = shard.count(visible.low), visible.high = shard.count(visible.high);
    return visible;
}

// The new token that a key is, and the position of a key.
static INLINE int64_t new_token(const Attend& call, const Sequence& s, int64_t key) {
    return call.batch.shard.position(key) - s.begin;
}
static INLINE int64_t key_position(const Attend& call, const Sequence& s, int64_t key) {
    if (key >= s.context && call.positions.data) return call.positions.at(s.token + new_token(call, s, key));
    return call.batch.shard.position(key);
}
// Whether a query sees a key under a tree mask.
static INLINE bool is_visible(const Attend& call, const Sequence& s, const VisibleRange& visible, int64_t key) {
    if (key >= s.context &&
        !call.mask[(s.token + visible.token) * call.mask_token + new_token(call, s, key) * call.mask_column]) {
        return false;
    }
    if (call.left == UNBOUNDED && call.right == UNBOUNDED) return true;
    int64_t distance = visible.at - key_position(call, s, key);
    return (call.left == UNBOUNDED || distance <= call.left) && (call.right == UNBOUNDED || -distance <= call.right);
}

// How scores become logits of base 2.
struct Logits {
    float factor, cap, capped;  // s * factor; with a softcap, capped * tanh(s * factor)

    explicit Logits(const Attend& call) {
        // With a smaller cap all logits are equal in fp32.
        double softcap = call.softcap ? most(call.softcap, 1e-30) : 0.0;
        cap = softcap;
        factor = cap ? call.scale / softcap : call.scale * (double)1.4426950408889634;
        capped = softcap * 1.4426950408889634;
    }

    // Whether scores are transformed by more than `factor`.
    INLINE bool transforms() const { return cap != 0; }
    // Turns scores times `factor` into logits, without ALiBi.
    INLINE vf transform(vf x) const { return cap ? tanh(x) * capped : x; }
};

// Whether ALiBi is a bias of each row and key, because distances do not follow from the number of a key.
static INLINE bool alibi_is_bias(const Attend& call, const Sequence& s) {
    return call.alibi && (s.tree || s.selected || call.batch.shard.ranks > 1);
}
// The same bias as `alibi_penalty`, for the key at a position.
static INLINE float alibi_bias(const VisibleRange& visible, int64_t position) {
    int64_t distance = visible.slope ? visible.at - position : 0;
    return -visible.slope * (float)(distance < 0 ? -distance : distance);
}

// The ALiBi penalty of W keys starting at `j`, for a row at `distance` from key 0.
static INLINE vf alibi_penalty(float distance, float slope, int64_t j) {
    return magnitude(distance - __builtin_convertvector(lanes() + (int32_t)j, vf)) * slope;
}

struct SoftmaxState {  // of a row: the largest logit so far, and the sum of the weights relative to it
    float top, total;
};

// Adds the sink's term to the sum of a row. Returns the factor that rescales its accumulated values.
static INLINE float add_sink(const Attend& call, int64_t q_head, SoftmaxState& have) {
    if (!call.sinks || call.sinks[q_head] == -__builtin_inff()) return 1.0f;
    float sink = call.sinks[q_head] * LOG2E, top = sink > have.top ? sink : have.top;
    float share = have.top == top ? 1.0f : exp2(splat(have.top - top))[0];
    have.total = have.total * share + (sink == top ? 1.0f : exp2(splat(sink - top))[0]);
    have.top = top;
    return share;
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
