// The arguments of the C interface: pointers, strides and numbers, nothing of Python or torch. `call.py` packs the same structures.
#pragma once
#include <cstddef>
#include <cstdint>

// Always inlined: otherwise the linker would keep one copy of a function for all levels, with instructions that not every CPU has.
#define INLINE inline __attribute__((always_inline))

namespace quire {

constexpr int64_t UNBOUNDED = INT64_MAX;
constexpr int64_t MOST_DIM = 576;  // the largest size of a head

// The formats, in the order of `FORMATS` of quire/cache/format.py: `codec.h` converts them.
enum Type : int64_t { FP32, FP16, BF16, E4M3FN, E4M3FNUZ, E5M2, INT8, INT4, INT4_ZP, NVFP4, FP8_DS_MLA, TYPES };

constexpr uint64_t NANS[TYPES] = {0x7FC00000, 0x7E00, 0x7FC0, 0x7F, 0x80, 0x7F, 0, 0, 0, 0, 0};  // a NaN of each type, the lowest bytes first

// Bytes of an element of storage. One of INT4, INT4_ZP and NVFP4 has two elements, the even one in the low four bits.
INLINE int64_t size_of(int64_t type) { return type == FP32 ? 4 : type < E4M3FN ? 2 : 1; }

// A head of FP8_DS_MLA: the latent in e4m3, an fp32 scale for each of its groups and, if it is a key, rotated elements in bf16.
constexpr Type LATENT_TYPE = E4M3FN;
constexpr int64_t LATENT = 512, LATENT_GROUP = 128, LATENT_BYTES = LATENT + LATENT / LATENT_GROUP * 4;

INLINE int64_t stored(int64_t type, int64_t elements) {  // elements of storage
    if (type == FP8_DS_MLA) return LATENT_BYTES + (elements - LATENT) * 2;
    return type >= INT4 ? elements / 2 : elements;
}

struct Array {  // [tokens, heads, dim]; strides in elements
    uint8_t* data;
    int64_t token, head, dim, type;
};

struct Index {  // an int32 or int64 tensor
    const void* data;
    int64_t row, column, wide;

    INLINE int64_t at(int64_t i, int64_t j = 0) const {
        int64_t offset = i * row + j * column;
        return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
    }
};

constexpr int64_t GROUP = 16;  // elements of NVFP4 that share a scale

// The scales of the groups of one row, bytes of e4m3; `at` is null without such scales.
struct GroupRow {
    const uint8_t* at;
    int64_t part, high, low;

    INLINE int64_t element(int64_t g) const { return g / part * high + g % part * low; }
};

// The zero point of a token and head is in the low four bits of its scale.
constexpr uint32_t ZERO_BITS = 0xF;
INLINE int64_t zero_point_of(float scale) { return __builtin_bit_cast(uint32_t, scale) & ZERO_BITS; }
INLINE float without_zero_point(float scale) {
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scale) & ~ZERO_BITS);
}

struct Pages {  // [pages, heads, slot/, slot%, dim/, dim%]; strides, and the length of dim%, in elements of storage
    uint8_t* data;
    int64_t page, head, slot_high, slot_low, dim_high, dim_low;
    int64_t slot_part, dim_part;  // lengths of slot% and dim%
    int64_t dim, type;
    float* scale;  // null without scales; a stride is 0 where one scale applies to many
    int64_t scale_page, scale_slot, scale_head;
    uint8_t* groups;  // [pages, heads, slot/, slot%, group/, group%], as far apart as pages; null without scales of groups
    int64_t group_head, group_slot_high, group_slot_low, group_high, group_low, group_slot_part, group_part;

    INLINE uint8_t* groups_at(int64_t p, int64_t offset) const {  // of head 0
        if (!groups) return nullptr;
        return groups + p * page + offset / group_slot_part * group_slot_high + offset % group_slot_part * group_slot_low;
    }
    INLINE GroupRow group_row(const uint8_t* at) const { return {at, group_part, group_high, group_low}; }
    INLINE int64_t slot(int64_t offset) const { return offset / slot_part * slot_high + offset % slot_part * slot_low; }
    INLINE int64_t row() const { return stored(type, dim); }
    INLINE int64_t element(int64_t d) const { return d / dim_part * dim_high + d % dim_part * dim_low; }
    INLINE bool whole_rows() const { return dim_low == 1 && (dim_part == row() || dim_high == dim_part); }
    INLINE float scale_of(int64_t p, int64_t offset, int64_t h) const {
        float found = scale[p * scale_page + offset * scale_slot + h * scale_head];
        return type == INT4_ZP ? without_zero_point(found) : found;
    }
};

// Which keys queries see, if not all: for each row and head, `count` entries. A row is a token and an entry a position, or a row is a
// sequence and an entry a column of its page table. Heads that share their entries have stride 0.
struct Select {
    enum Kind : int64_t { NONE, POSITIONS, COLUMNS };
    const void* data;
    int64_t row, head, step, wide, count, kind;

    INLINE int64_t at(int64_t r, int64_t h, int64_t i) const {
        int64_t offset = r * row + h * head + i * step;
        return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
    }
    INLINE int64_t keys_per_entry(int64_t page_size) const { return kind == COLUMNS ? page_size : 1; }
};

// Which sequences begin with the same pages: rows of int32, as in `Prefixes.groups` and `.members` of quire/cache/prefixes.py.
struct Prefixes {
    const int32_t *groups, *members;
    int64_t count, members_count;  // count is 0 if every sequence is read by itself
};

struct Cache {
    Pages k, v;
    int64_t pages, page_size, heads;
};

// Which keys of a sequence are in the cache: those whose position p has p / interleave % ranks == rank, in order. Without a shard
// `ranks` is at most 1, and a key is its position.
struct Shard {
    int64_t rank, ranks, interleave;

    // How many of the first `length` positions are keys of the shard; 0 for a negative length.
    INLINE int64_t count(int64_t length) const {
        if (ranks < 2) return length;
        if (length <= 0) return 0;
        int64_t cycle = ranks * interleave, rest = length % cycle - rank * interleave;
        return length / cycle * interleave + (rest < 0 ? 0 : rest < interleave ? rest : interleave);
    }
    INLINE int64_t position(int64_t key) const {
        return ranks < 2 ? key : (key / interleave * ranks + rank) * interleave + key % interleave;
    }
    INLINE bool owns(int64_t position) const { return ranks < 2 || position / interleave % ranks == rank; }
};

struct Batch {
    Index table, kv_lens, q_starts;
    int64_t seqs, width;
    Shard shard;
};

// One sequence, read from the index tensors once when the call begins, so that a concurrent change cannot cause an invalid access.
// A sequence whose output is NaN has q_len 0 here: there is nothing to compute.
struct Lengths {
    int64_t begin, q_len, kv_len;
    bool has_gaps = false;  // whether no query sees some key between the first and the last that the sequence needs
};

struct Attend {
    Array q, out, new_k, new_v;  // new_k.data is null in full form
    float* lse;
    int64_t lse_token, lse_head;
    int64_t tokens, group;
    Batch batch;
    double scale, softcap, out_scale;  // softcap and out_scale are 0 where there is none
    int64_t left, right;               // keys to each side, or UNBOUNDED
    const float* alibi;
    const float* sinks;
    const uint8_t* causal_of;  // per sequence; null if `causal` applies to all
    int64_t causal_stride, causal;
    const uint8_t* mask;
    int64_t mask_token, mask_column, mask_width;
    Index positions;  // data is null if they follow from the lengths
    Index spans;      // the keys [begin, end) that each new token sees; data is null without spans
    Select select;
    Prefixes prefixes;
    int64_t context_from, only_low, only_high, zero_padding, invariant;
    int64_t threads, level;
    Cache cache;
    // Set by the library; a caller's structure ends before it.
    const Lengths* lengths;

    INLINE bool takes_new(int64_t seq) const { return new_k.data && lengths[seq].q_len >= context_from; }
    INLINE bool is_causal(int64_t seq) const { return causal_of ? causal_of[seq * causal_stride] : causal; }
};

struct Range {
    int64_t low, high;
};

// The positions that a new token with a span sees; none if low >= high.
INLINE Range span_of(const Index& spans, int64_t token, int64_t kv_len) {
    int64_t low = spans.at(token, 0), high = spans.at(token, 1);
    return {low < 0 ? 0 : low, high > kv_len ? kv_len : high};
}

// The positions of the context that a query of a tree at the given position sees; none if low >= high.
INLINE Range context_seen(const Attend& call, int64_t at, int64_t context) {
    int64_t low = call.left == UNBOUNDED ? 0 : at < INT64_MIN + call.left ? INT64_MIN : at - call.left;
    int64_t high = call.right == UNBOUNDED || at >= INT64_MAX - call.right ? context : at + call.right + 1;
    return {low < 0 ? 0 : low, high < context ? high : context};
}

struct Write {
    Array k, v;
    Batch batch;
    Index slots;  // data is null if they follow from the table
    int64_t tokens, threads, level;
    int64_t shared_scales;  // whether K and V are two parts of a row that share the scale of a token
    Cache cache;
};

struct Norm {
    const uint8_t* weight;  // of the elements of a head, or of the first part of a key; null without a norm
    int64_t type;
};

// How a write normalises and rotates keys and queries.
struct Rope {
    const float *cos, *sin;  // [positions, half]
    int64_t table_row, positions, half, interleaved;
    Index given;          // positions by axis and token; data is null if they follow from the lengths
    const int64_t* axes;  // of each frequency; null if positions have one axis
    Array q, out;
    int64_t q_heads;  // 0 without queries
    Norm q_norm, k_norm;
    double eps;
    int64_t unit_offset, zero_padding;
    int64_t first;  // elements of a head before the rotated ones; not 0 if K and V of the write are two parts of a key, V the rotated one
};

struct RopeWrite {
    Rope rope;
    Write write;

    INLINE int64_t head_dim() const { return write.cache.k.dim + (rope.first ? write.cache.v.dim : 0); }
};

struct Scales {  // of K or of V
    const float* data;
    int64_t count, heads;       // count: the number of scales; 0 if there is one per token
    int64_t page, slot, head;   // strides; `head` alone if `count` is not 0
};

// A call whose index values are to be validated.
struct Check {
    Batch batch;
    int64_t pages, page_size, heads, tokens;
    int64_t whole;             // whether to validate the batch too, or only values that depend on other tensors
    int64_t reads, has_new;    // whether it attends; whether new tokens are passed as arguments
    int64_t context_from, only_low, only_high;
    int64_t left, right;
    const uint8_t* causal_of;
    int64_t causal_stride, causal;
    const uint8_t* mask;
    int64_t mask_token, mask_column, mask_width;
    Index positions;
    Index spans;
    Select select;
    int64_t writes;
    Index slots;             // data is null if they follow from the table
    const int32_t* holders;  // how many sequences hold each page; null if unknown
    Scales k_scale, v_scale;
    const float *q_scale, *out_scale;

    INLINE bool is_causal(int64_t seq) const { return causal_of ? causal_of[seq * causal_stride] : causal; }
};

// A new token of a sequence that shares a prefix: its row of q, and its position.
struct SharedToken {
    int64_t row, at;
};

// A work unit: some query rows of one sequence, over some of its keys; with a selection, over the keys of some entries. A query row
// is a new token and a query head of the group. The rows of a unit over a shared prefix are those of several sequences, and `seq` is
// one of them.
struct Unit {
    int64_t seq, head, heads, row, rows, low, high;
    float* part;  // where the partial result is stored; null if the unit is not split
    double cost;
    int64_t part_rows;            // the rows of a head in `part`
    const SharedToken* shared;    // the tokens of a unit over a shared prefix; null for others
    int64_t prefix;
    // The partial results of the keys before, from which a unit of a batch-invariant call goes on: for each token those of its
    // first row of this head, then `part_stride` apart; null if there are none.
    const float* const* before = nullptr;
};

// A partial result of the rows of a unit: for each row the maximum, the sum and the accumulated values.
struct Part {
    const float* at;
    int64_t head;  // the distance of heads
};

// A unit whose keys are split, or shared in part.
struct SplitUnit {
    int64_t seq, head, heads, row, rows;
    const Part* parts;
    int64_t count;
};

// The functions of one instruction set.
struct Level {
    size_t (*workspace_size)(const Attend&);
    int64_t (*most_rows)(const Attend&);
    bool (*uses_decode)(const Attend&, int64_t rows);
    void (*attend)(const Attend&, const Unit&, bool decode, char* workspace);
    void (*combine)(const Attend&, const SplitUnit&);
    size_t (*write_workspace)(const Write&);
    void (*write)(const Write&, int64_t token, int64_t slot, char* workspace);
    size_t (*rope_workspace)(const RopeWrite&);
    void (*rope_write)(const RopeWrite&, int64_t token, int64_t slot, int64_t position, char* workspace);
    int64_t keys, strip;  // keys of a tile, and rows of a strip
};

INLINE int64_t part_stride(const Attend& call) { return (call.cache.v.dim + 2 + 15) / 16 * 16; }

}  // namespace quire
