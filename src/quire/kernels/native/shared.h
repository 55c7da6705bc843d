// Shared prefixes: the pages that several sequences begin with are read once. The rows of all of their new tokens are those of units
// over these keys, and the other keys of each sequence are units of its own. All of these give partial results, which are combined.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "call.h"

namespace quire {

constexpr int64_t SHARED_TOKENS = 16;  // a sequence with more new tokens is limited by arithmetic and read by itself

// In a batch-invariant call prefixes end at multiples of a tile, and nothing is combined: the units after a prefix go on from its
// partial results, so that each row has the sums that it has without prefixes.

struct SharedPlace {
    int64_t prefix, token;  // of a prefix, and a token in it; prefix is -1 for none
};

struct SharedPrefix {
    int64_t seq, low, high;           // the first of its sequences, and its keys
    std::vector<SharedToken> tokens;  // of all of its sequences
    std::vector<SharedPlace> before;  // of each token: the prefix that this one continues
    int64_t depth = 0;                // how many prefixes are before it
    int64_t chunks = 1;               // over which its keys are split
    size_t place = 0;                 // of its partial results: [chunks, heads, rows]
};

struct SharedPlan {
    std::vector<SharedPrefix> prefixes;
    std::vector<int64_t> covered;                  // how many keys of each sequence are said to be shared
    std::vector<std::vector<SharedPlace>> places;  // where each sequence is, in the order of its keys
    int64_t unit = 1;                              // prefixes end at multiples of this number of keys

    int64_t begin_of(int64_t seq) const { return covered.empty() ? 0 : covered[static_cast<size_t>(seq)] / unit * unit; }
    bool shares(int64_t seq) const { return begin_of(seq) > 0; }

    // `fail` is called for a sequence that does not have the pages it is said to share, or that shares new tokens.
    template <class Fail>
    SharedPlan(const Attend& call, const Level& level, const std::vector<Lengths>& lengths, Fail fail) {
        if (!call.prefixes.count) return;
        if (call.invariant) unit = level.keys;
        covered.resize(lengths.size());
        places.resize(lengths.size());
        for (int64_t i = 0; i < call.prefixes.count; i++) add(call, lengths, call.prefixes.groups + 5 * i, fail);
    }

  private:
    template <class Fail>
    void add(const Attend& call, const std::vector<Lengths>& lengths, const int32_t* group, Fail fail) {
        const int64_t size = call.cache.page_size, first = group[0], count = group[1], begin = group[2], end = group[3];
        if (first < 0 || count <= 0 || first + count > call.prefixes.members_count) return;
        SharedPrefix prefix{-1, begin * size / unit * unit, end * size / unit * unit, {}, {}};
        for (int64_t m = first; m < first + count; m++) {
            const int64_t seq = call.prefixes.members[m];
            if (seq < 0 || seq >= call.batch.seqs) continue;
            const Lengths& one = lengths[static_cast<size_t>(seq)];
            if (one.q_len <= 0 || one.q_len > SHARED_TOKENS || one.q_len < call.only_low || one.q_len > call.only_high) continue;
            const int64_t context = one.kv_len - one.q_len;
            bool good = covered[static_cast<size_t>(seq)] == begin * size && begin < end && end * size <= context && end <= call.batch.width;
            if (good && prefix.seq >= 0) good = pages_are_equal(call.batch.table, prefix.seq, seq, prefix.low / size, end);
            if (!good) {
                fail(seq);
                continue;
            }
            if (prefix.seq < 0) prefix.seq = seq;
            covered[static_cast<size_t>(seq)] = end * size;
            if (prefix.low == prefix.high) continue;
            std::vector<SharedPlace>& mine = places[static_cast<size_t>(seq)];
            const SharedPlace last = mine.empty() ? SharedPlace{-1, 0} : mine.back();
            if (last.prefix >= 0) prefix.depth = std::max(prefix.depth, prefixes[static_cast<size_t>(last.prefix)].depth + 1);
            mine.push_back({static_cast<int64_t>(prefixes.size()), static_cast<int64_t>(prefix.tokens.size())});
            for (int64_t t = 0; t < one.q_len; t++) {
                prefix.tokens.push_back({one.begin + t, context + t});
                prefix.before.push_back({last.prefix, last.token + t});
            }
        }
        if (!prefix.tokens.empty()) prefixes.push_back(std::move(prefix));
    }

    static bool pages_are_equal(const Index& table, int64_t a, int64_t b, int64_t begin, int64_t end) {
        bool same = true;
        for (int64_t c = begin; c < end; c++) same &= table.at(a, c) == table.at(b, c);
        return same;
    }
};

// The units over shared prefixes. Few rows are one unit of all heads.
inline void add_shared_units(const Attend& call, const Level& level, const SharedPlan& plan, std::vector<Unit>& units) {
    const int64_t heads = call.cache.heads;
    for (size_t i = 0; i < plan.prefixes.size(); i++) {
        const SharedPrefix& prefix = plan.prefixes[i];
        const int64_t rows = static_cast<int64_t>(prefix.tokens.size()) * call.group;
        const bool few = level.uses_decode(call, rows);
        const int64_t most = few ? rows : level.most_rows(call), pieces = (rows + most - 1) / most, together = few ? heads : 1;
        int64_t step = (rows + pieces - 1) / pieces;
        if (!few) step = (step + level.strip - 1) / level.strip * level.strip;
        for (int64_t head = 0; head < heads; head += together) {
            for (int64_t row = 0; row < rows; row += step) {
                const int64_t count = rows - row < step ? rows - row : step;
                const double cost = double(prefix.high - prefix.low + 16) * together * (count + (few ? 8 : 16));
                units.push_back({prefix.seq, head, together, row, count, prefix.low, prefix.high, nullptr, cost, rows, prefix.tokens.data(),
                                 static_cast<int64_t>(i)});
            }
        }
    }
}

}  // namespace quire
