// Cache writes with RoPE: a token's queries and keys are normalised and rotated in fp32, and rounded once.
#pragma once
#include "write.h"

namespace quire {
namespace QUIRE_LEVEL {

constexpr int64_t ROW_BUFFER = MOST_DIM + 2 * W;  // the longest head, and what vectors read and write after its parts

// The buffers of a thread.
struct RopeBuffers {
    // Cosines and sines of a token, for each element of a head. The sine of an element that its partner is subtracted from is negative.
    float *cosine, *sine;
    float *q_weight, *k_weight;  // factors of the norms
    float *row, *turned, *number;
    uint8_t* code;

    RopeBuffers(Workspace& workspace) {
        for (float** buffer : {&cosine, &sine, &q_weight, &k_weight, &row, &turned, &number}) *buffer = workspace.take<float>(ROW_BUFFER);
        code = workspace.take<uint8_t>(ROW_BUFFER * 4);
    }
};

// Elements of any type and stride as fp32, and zeros up to a multiple of W.
static void as_floats(const uint8_t* from, int64_t type, int64_t stride, int64_t dim, uint8_t* code, float* to) {
    int64_t size = size_of(type);
    if (stride != 1) {
        for (int64_t d = 0; d < dim; d++) memcpy(code + d * size, from + d * stride * size, size);
        from = code;
    }
    with_type(type, [&](auto t) {
        for (int64_t d = 0; d < dim; d += W) store(to + d, decode<t.value>(from + d * SIZE<t.value>, dim - d));
    });
}

static void load_weight(const Rope& rope, const Norm& norm, int64_t dim, uint8_t* code, float* to) {
    if (!norm.weight) return;
    as_floats(norm.weight, norm.type, 1, dim, code, to);
    for (int64_t d = 0; rope.unit_offset && d < dim; d += W) store(to + d, load(to + d) + 1.0f);
}

// Prepares the cosines and sines of a token; false if it has a position that the tables lack.
static bool load_turn(const Rope& rope, int64_t token, int64_t position, const RopeBuffers& buffers) {
    int64_t half = rope.half, axes = rope.axes ? 3 : 1, at[3];
    for (int64_t axis = 0; axis < axes; axis++) {
        at[axis] = rope.given.data ? rope.given.at(axis, token) : position;
        if (at[axis] < 0 || at[axis] >= rope.positions) return false;
    }
    for (int64_t i = 0; i < half; i++) {
        int64_t place = at[rope.axes ? rope.axes[i] : 0] * rope.table_row + i;
        int64_t first = rope.interleaved ? 2 * i : i, second = rope.interleaved ? 2 * i + 1 : i + half;
        float cosine = rope.cos[place], sine = rope.sin[place];
        buffers.cosine[first] = cosine, buffers.cosine[second] = cosine;
        buffers.sine[first] = -sine, buffers.sine[second] = sine;
    }
    return true;
}

// Multiplies the elements of `buffers.row` by weights and by 1 / the root of their mean square.
static void normalise(const Rope& rope, int64_t dim, const float* weight, const RopeBuffers& buffers) {
    float* x = buffers.row;
    vf squares{};
    for (int64_t d = 0; d < dim; d += W) squares = fma(load(x + d), load(x + d), squares);
    float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + static_cast<float>(rope.eps));
    for (int64_t d = 0; d < dim; d += W) store(x + d, load(x + d) * factor * load(weight + d));
}

// Turns `buffers.row` into `buffers.turned`. Without a turn, the position is not in the tables: NaN.
static void rotate(const Rope& rope, bool has_turn, int64_t dim, const RopeBuffers& buffers) {
    if (!has_turn) {
        for (int64_t d = 0; d < dim; d += W) store(buffers.turned + d, splat(__builtin_nanf("")));
        return;
    }
    // The end of the last vector of a part is written again by the next part.
    for (int64_t d = 0; d < rope.first; d += W) store(buffers.turned + d, load(buffers.row + d));
    float *x = buffers.row + rope.first, *to = buffers.turned + rope.first;
    int64_t half = rope.half, rotary = 2 * half;
    auto turn = [&](int64_t d, vf partner) { store(to + d, fma(partner, load(buffers.sine + d), load(x + d) * load(buffers.cosine + d))); };
    if (rope.interleaved) {
        for (int64_t d = 0; d < rotary; d += W) turn(d, swapped<1>(load(x + d), std::make_integer_sequence<int, W>()));
    } else {
        for (int64_t d = 0; d < half; d += W) turn(d, load(x + half + d));
        for (int64_t d = half; d < rotary; d += W) turn(d, load(x + d - half));
    }
    for (int64_t d = rotary; d < dim - rope.first; d += W) store(to + d, load(x + d));
}

static void store_query(const Array& out, int64_t token, int64_t head, int64_t dim, const RopeBuffers& buffers) {
    int64_t size = size_of(out.type);
    uint8_t* to = out.data + (token * out.token + head * out.head) * size;
    uint8_t* code = out.dim == 1 ? to : buffers.code;
    with_type(out.type, [&](auto t) {
        for (int64_t d = 0; d < dim; d += W) encode<t.value>(load(buffers.turned + d), code + d * SIZE<t.value>, dim - d);
    });
    for (int64_t d = 0; out.dim != 1 && d < dim; d++) memcpy(to + d * out.dim * size, code + d * size, size);
}

static size_t rope_workspace(const RopeWrite&) {
    Workspace workspace{0, 0};
    RopeBuffers buffers(workspace);
    return workspace.used;
}

// Rotates the queries of a token, and stores its keys and values unless the slot is -1.
static void rope_write(const RopeWrite& call, int64_t token, int64_t slot, int64_t position, char* base) {
    const Rope& rope = call.rope;
    const Cache& cache = call.write.cache;
    Workspace workspace{reinterpret_cast<uintptr_t>(base), 0};
    RopeBuffers buffers(workspace);
    const int64_t dim = call.head_dim(), k_dim = cache.k.dim;
    bool has_turn = load_turn(rope, token, position, buffers);
    load_weight(rope, rope.q_norm, dim, buffers.code, buffers.q_weight);
    load_weight(rope, rope.k_norm, k_dim, buffers.code, buffers.k_weight);
    auto take = [&](const Array& from, int64_t head, int64_t count, float* to) {
        const uint8_t* row = from.data + (token * from.token + head * from.head) * size_of(from.type);
        as_floats(row, from.type, from.dim, count, buffers.code, to);
    };
    for (int64_t head = 0; head < rope.q_heads; head++) {
        take(rope.q, head, dim, buffers.row);
        if (rope.q_norm.weight) normalise(rope, dim, buffers.q_weight, buffers);
        rotate(rope, has_turn, dim, buffers);
        store_query(rope.out, token, head, dim, buffers);
    }
    if (slot < 0) return;
    int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
    auto turned = [&](int64_t first) { return Array{reinterpret_cast<uint8_t*>(buffers.turned + first), 0, 0, 1, FP32}; };
    for (int64_t head = 0; head < cache.heads; head++) {
        take(call.write.k, head, k_dim, buffers.row);
        if (rope.k_norm.weight) normalise(rope, k_dim, buffers.k_weight, buffers);
        if (rope.first) take(call.write.v, head, cache.v.dim, buffers.row + rope.first);
        rotate(rope, has_turn, dim, buffers);
        const float top = call.write.shared_scales ? largest_of(buffers.turned, dim) : 0.0f;
        const float* known = call.write.shared_scales ? &top : nullptr;
        store_row(turned(0), cache.k, token, head, page, offset, buffers.number, buffers.code, known);
        const Array v = rope.first ? turned(rope.first) : call.write.v;
        store_row(v, cache.v, token, head, page, offset, buffers.number, buffers.code, known);
    }
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
