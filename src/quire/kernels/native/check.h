// Validates the index values and scales of a call in one pass, exactly as `quire.contract.values` does. It may reject a legal call
// with lengths or positions beyond 2^61: the rules of the contract then decide.
#pragma once
#include <algorithm>
#include <vector>

#include "call.h"

namespace quire {

constexpr int64_t FAR_AWAY = int64_t(1) << 61;  // larger than any position; the sum of two such numbers does not overflow

template <class Id>
bool ids_exist(const Id* row, int64_t step, int64_t first, int64_t last, int64_t pages) {
    bool good = true;
    if (step == 1) {  // a separate loop, which the compiler vectorises
        for (int64_t c = first; c <= last; c++) good &= (row[c] >= 0) & (row[c] < pages);
    } else {
        for (int64_t c = first; c <= last; c++) good &= (row[c * step] >= 0) & (row[c * step] < pages);
    }
    return good;
}

// Whether the table has an existing page for each of the keys [low, high) of a sequence; there is at least one key.
inline bool pages_exist(const Batch& batch, int64_t seq, int64_t low, int64_t high, int64_t page_size, int64_t pages) {
    int64_t first = low / page_size, last = (high - 1) / page_size;
    if (low < 0 || last >= batch.width) return false;
    const Index& table = batch.table;
    if (table.wide) {
        return ids_exist(static_cast<const int64_t*>(table.data) + seq * table.row, table.column, first, last, pages);
    }
    return ids_exist(static_cast<const int32_t*>(table.data) + seq * table.row, table.column, first, last, pages);
}

// The positions below `end` that some of the new tokens [first, last) see, as ranges in order that do not touch.
inline std::vector<Range> seen_by_spans(const Index& spans, int64_t first, int64_t last, int64_t kv_len, int64_t end) {
    std::vector<Range> found;
    auto add = [&](Range one) {
        if (!found.empty() && one.low >= found.back().low && one.low <= found.back().high) {
            found.back().high = std::max(found.back().high, one.high);
        } else {
            found.push_back(one);
        }
    };
    for (int64_t token = first; token < last; token++) {
        Range seen = span_of(spans, token, kv_len);
        seen.high = std::min(seen.high, end);
        if (seen.low < seen.high) add(seen);
    }
    auto before = [](const Range& a, const Range& b) { return a.low < b.low; };
    std::vector<Range> sorted;
    sorted.swap(found);
    if (!std::is_sorted(sorted.begin(), sorted.end(), before)) std::sort(sorted.begin(), sorted.end(), before);
    for (const Range& one : sorted) add(one);
    return found;
}

struct Run {  // slots [first, end)
    int64_t first, end;
};

class Checker {
  public:
    explicit Checker(const Check& call) : call(call), runs(memory()), marks(marked()) {}

    bool legal() {
        if (!all_positive(call.k_scale) || !all_positive(call.v_scale)) return false;
        if (!is_scale(call.q_scale) || !is_scale(call.out_scale)) return false;
        tokens_scaled = call.reads && (by_token(call.k_scale) || by_token(call.v_scale));
        stores = call.writes && (call.whole || call.slots.data || call.holders);
        if (!call.whole && !tokens_scaled && !stores) return true;
        if (call.batch.q_starts.at(0) != 0) return false;
        runs.clear();
        for (int64_t seq = 0; seq < call.batch.seqs; seq++) {
            int64_t begin = call.batch.q_starts.at(seq), end = call.batch.q_starts.at(seq + 1);
            if (end < begin || end > call.tokens) return false;
            if (end > begin && !sequence_is_legal(seq, begin, end - begin)) return false;
        }
        return !stores || runs_are_legal();
    }

  private:
    const Check& call;
    std::vector<Run>& runs;
    std::vector<uint8_t>& marks;  // by entry of a selection; all 0 between rows
    bool tokens_scaled = false, stores = false;

    // One per thread, reused by every call.
    static std::vector<Run>& memory() {
        static thread_local std::vector<Run> owned;
        return owned;
    }

    static std::vector<uint8_t>& marked() {
        static thread_local std::vector<uint8_t> owned;
        return owned;
    }

    int64_t keys(int64_t length) const { return call.batch.shard.count(length); }  // before a position
    bool takes_new(int64_t q_len) const { return call.has_new && q_len >= call.context_from; }
    static bool by_token(const Scales& s) { return s.data && !s.count; }
    static bool is_scale(const float* x) { return !x || (*x > 0 && *x <= __FLT_MAX__); }
    static bool all_positive(const Scales& s) {
        for (int64_t i = 0; i < s.count; i++) {
            if (!is_scale(s.data + i * s.head)) return false;
        }
        return true;
    }

    bool sequence_is_legal(int64_t seq, int64_t begin, int64_t q_len) {
        if (call.mask && q_len > call.mask_width) return false;
        if (q_len < call.only_low || q_len > call.only_high) return true;
        int64_t kv_len = call.batch.kv_lens.at(seq), context = kv_len - q_len;
        if (kv_len < 0 || kv_len > FAR_AWAY) return false;
        const bool by_length = !call.spans.data && call.is_causal(seq);
        if (context < 0 && (call.writes || call.has_new || call.mask || by_length)) return false;
        if (call.reads && (call.whole || tokens_scaled)) {
            bool good = call.select.kind  ? selection_is_legal(seq, begin, q_len, kv_len)
                        : call.spans.data ? spans_are_legal(seq, begin, q_len, kv_len)
                        : call.mask       ? tree_is_legal(seq, begin, q_len, context)
                                          : range_is_legal(seq, begin, context, kv_len);
            if (!good) return false;
        }
        if (!stores) return true;
        if (call.slots.data) return add_slots(begin, begin + q_len);
        int64_t first = keys(context), end = keys(kv_len);
        return first >= end || (pages_exist(call.batch, seq, first, end, call.page_size, call.pages) && add_tokens(seq, first, end));
    }

    // Without a tree mask, queries have consecutive positions, and the keys they see are one range.
    bool range_is_legal(int64_t seq, int64_t begin, int64_t context, int64_t kv_len) {
        int64_t low = call.left == UNBOUNDED ? 0 : std::max<int64_t>(0, context - call.left);
        low = std::min(low, std::max<int64_t>(0, context));
        return needed(seq, begin, context, low, takes_new(kv_len - context) ? context : kv_len);
    }

    bool spans_are_legal(int64_t seq, int64_t begin, int64_t q_len, int64_t kv_len) const {
        for (int64_t token = begin; token < begin + q_len; token++) {
            int64_t low = call.spans.at(token, 0), high = call.spans.at(token, 1);
            if (low < high && (low < 0 || high > kv_len)) return false;
        }
        int64_t context = kv_len - q_len, end = takes_new(q_len) ? context : kv_len;
        for (const Range& range : seen_by_spans(call.spans, begin, begin + q_len, kv_len, end)) {
            if (!needed(seq, begin, context, range.low, range.high)) return false;
        }
        return true;
    }

    // Whether all entries of the sequence exist, each once in its row, and the pages of those that are visible.
    bool selection_is_legal(int64_t seq, int64_t begin, int64_t q_len, int64_t kv_len) {
        const Select& select = call.select;
        const bool columns = select.kind == Select::COLUMNS;
        const int64_t each = select.keys_per_entry(call.page_size), limit = (kv_len + each - 1) / each, context = kv_len - q_len;
        const int64_t heads = select.head == 0 ? 1 : call.heads, right = call.is_causal(seq) ? 0 : call.right;
        if (static_cast<int64_t>(marks.size()) < limit) marks.resize(static_cast<size_t>(limit));
        for (int64_t i = 0; i < (columns ? 1 : q_len); i++) {
            // The positions of the row's first query and of its last, and what they see.
            const int64_t first = context + i, last = columns ? kv_len - 1 : first;
            const int64_t low = call.left == UNBOUNDED ? 0 : std::max<int64_t>(0, first - call.left);
            const int64_t high = right == UNBOUNDED || last >= kv_len - right ? kv_len : last + right + 1;
            for (int64_t h = 0; h < heads; h++) {
                if (!row_is_legal(seq, begin, context, columns ? seq : begin + i, h, limit, each, low, high)) return false;
            }
        }
        return true;
    }

    bool row_is_legal(int64_t seq, int64_t begin, int64_t context, int64_t row, int64_t head, int64_t limit, int64_t each, int64_t low,
                      int64_t high) {
        bool good = true;
        int64_t seen = 0;
        for (; good && seen < call.select.count; seen++) {
            int64_t entry = call.select.at(row, head, seen);
            if (entry == -1) continue;
            good = entry >= 0 && entry < limit && !marks[entry];
            if (!good) break;
            marks[entry] = 1;
            int64_t from = std::max(low, entry * each), to = std::min(high, (entry + 1) * each);
            good = needed(seq, begin, context, from, to);
        }
        for (int64_t i = 0; i < call.select.count && i <= seen; i++) {
            int64_t entry = call.select.at(row, head, i);
            if (entry >= 0 && entry < limit) marks[entry] = 0;
        }
        return good;
    }

    bool tree_is_legal(int64_t seq, int64_t begin, int64_t q_len, int64_t context) {
        bool windowed = call.positions.data && (call.left != UNBOUNDED || call.right != UNBOUNDED);
        if (!windowed) {
            if (!needed(seq, begin, context, 0, context)) return false;
        } else if (!context_of_window_is_legal(seq, begin, q_len, context)) {
            return false;
        }
        for (int64_t j = 0; !takes_new(q_len) && j < q_len; j++) {
            if (some_query_sees(begin, q_len, j, windowed) && !needed(seq, begin, context, context + j, context + j + 1)) return false;
        }
        return true;
    }

    bool context_of_window_is_legal(int64_t seq, int64_t begin, int64_t q_len, int64_t context) {
        for (int64_t i = 0; i < q_len; i++) {
            int64_t at = call.positions.at(begin + i);
            if (at > FAR_AWAY || at < -FAR_AWAY) return false;
            int64_t low = call.left == UNBOUNDED ? 0 : std::max<int64_t>(0, at - call.left);
            int64_t high = call.right == UNBOUNDED ? context : std::min(context, at + call.right + 1);
            if (!needed(seq, begin, context, low, high)) return false;
        }
        return true;
    }

    bool some_query_sees(int64_t begin, int64_t q_len, int64_t j, bool windowed) const {
        for (int64_t i = 0; i < q_len; i++) {
            if (!call.mask[(begin + i) * call.mask_token + j * call.mask_column]) continue;
            if (!windowed) return true;
            int64_t distance = call.positions.at(begin + i) - call.positions.at(begin + j);
            if ((call.left == UNBOUNDED || distance <= call.left) && (call.right == UNBOUNDED || -distance <= call.right)) return true;
        }
        return false;
    }

    // Checks the pages and scales of the keys at positions [low, high), which some query sees and which are read from the cache.
    bool needed(int64_t seq, int64_t begin, int64_t context, int64_t low, int64_t high) const {
        if (low >= high) return true;
        const int64_t new_from = context;  // the position of the first new token
        low = keys(low), high = keys(high), context = keys(context);
        if (low >= high) return true;
        if (!pages_exist(call.batch, seq, low, high, call.page_size, call.pages)) return false;
        if (!tokens_scaled) return true;
        // The scales of tokens that this call writes are computed later.
        if (call.writes && !call.slots.data) high = std::min(high, context);
        for (int64_t key = low; key < high;) {
            int64_t column = key / call.page_size, slot = key % call.page_size;
            int64_t stop = std::min(high, key - slot + call.page_size), page = call.batch.table.at(seq, column);
            if (call.writes && call.slots.data && stop > context) {
                stop = key + 1;
                int64_t token = begin + call.batch.shard.position(key) - new_from;
                if (key >= context && call.slots.at(token) == page * call.page_size + slot) {
                    key = stop;
                    continue;
                }
            }
            if (!are_positive(call.k_scale, page, slot, stop - key) || !are_positive(call.v_scale, page, slot, stop - key)) return false;
            key = stop;
        }
        return true;
    }

    // Scales per token. `write` computes NaN or infinity for a token with a NaN or an infinity: those are allowed.
    static bool are_positive(const Scales& s, int64_t page, int64_t slot, int64_t count) {
        if (!by_token(s)) return true;
        const float* first = s.data + page * s.page + slot * s.slot;
        int bad = 0;
        if (s.head == 1 && s.slot == s.heads) {
            for (int64_t i = 0; i < count * s.heads; i++) bad |= first[i] <= 0;
        } else {
            for (int64_t i = 0; i < count; i++) {
                for (int64_t h = 0; h < s.heads; h++) bad |= first[i * s.slot + h * s.head] <= 0;
            }
        }
        return !bad;
    }

    void add_run(int64_t first, int64_t end) {
        if (!runs.empty() && runs.back().end == first) runs.back().end = end;
        else runs.push_back({first, end});
    }

    bool add_slots(int64_t begin, int64_t end) {
        const int64_t capacity = call.pages * call.page_size;
        for (int64_t token = begin; token < end; token++) {
            int64_t slot = call.slots.at(token);
            if (slot < -1 || slot >= capacity) return false;
            if (slot >= 0) add_run(slot, slot + 1);
        }
        return true;
    }

    bool add_tokens(int64_t seq, int64_t first, int64_t end) {
        for (int64_t key = first; key < end;) {
            int64_t slot = key % call.page_size, stop = std::min(end, key - slot + call.page_size);
            int64_t page = call.batch.table.at(seq, key / call.page_size);
            if (page < 0 || page >= call.pages) return false;
            add_run(page * call.page_size + slot, page * call.page_size + slot + stop - key);
            key = stop;
        }
        return true;
    }

    // Whether no slot occurs twice and no page has several holders.
    bool runs_are_legal() {
        for (const Run& run : runs) {
            if (!call.holders) break;
            for (int64_t page = run.first / call.page_size; page <= (run.end - 1) / call.page_size; page++) {
                if (call.holders[page] > 1) return false;
            }
        }
        if (!call.whole && !call.slots.data) return true;
        auto before = [](const Run& a, const Run& b) { return a.first < b.first; };
        if (!std::is_sorted(runs.begin(), runs.end(), before)) std::sort(runs.begin(), runs.end(), before);
        for (size_t i = 1; i < runs.size(); i++) {
            if (runs[i].first < runs[i - 1].end) return false;
        }
        return true;
    }
};

inline bool is_legal(const Check& call) { return Checker(call).legal(); }

}  // namespace quire
