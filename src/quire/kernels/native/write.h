// Cache writes: a token's keys and values, quantised, into their slot.
#pragma once
#include "factors.h"
#include "gather.h"

namespace quire {
namespace QUIRE_LEVEL {

// The largest magnitude of some elements, or NaN. Zeros follow them up to a multiple of W.
static float largest_of(const float* number, int64_t dim) {
    vf top{}, none{};  // `none` stays 0 unless an element is infinite or NaN
    for (int64_t d = 0; d < dim; d += W) {
        vf x = magnitude(load(number + d));
        top = larger(top, x), none = fma(x, vf{}, none);
    }
    float some = sum(none);
    if (some == some) return largest(top);
    for (int64_t d = 0; d < dim; d++) {
        if (number[d] != number[d]) return __builtin_fabsf(number[d]);
    }
    return __builtin_inff();
}

// Divides each group of a row by its scale, which is stored: its largest magnitude over the largest code, NaN if it has a NaN. At
// least the smallest scale above 0, so that nothing is divided by 0.
static void divide_by_groups(const Pages& pages, uint8_t* to, float* number) {
    constexpr float SMALLEST = 1.0f / 512, LARGEST = GroupScale::LARGEST;
    for (int64_t g = 0; g < pages.dim / GROUP; g++) {
        float *group = number + g * GROUP, top = largest_of(group, GROUP) / Number<NVFP4>::LARGEST;
        top = top < SMALLEST ? SMALLEST : top > LARGEST ? LARGEST : top;
        uint8_t code = (uint8_t)GroupScale::encode(splat(top))[0];
        to[pages.group_row(to).element(g)] = code;
        for (int64_t d = 0; d < GROUP; d += W) store(group + d, load(group + d) / GROUP_SCALES.of[code]);
    }
}

// Quantises a row with a zero point: codes 0 to 15 reach from the smallest element, or 0, to the largest, or 0. `number` becomes
// codes, and the scale is returned, its low bits the zero point; it is not finite if the row has such an element.
static float quantise_with_zero(float* number, int64_t dim) {
    constexpr float LARGEST = Number<INT4_ZP>::LARGEST;
    vf top{}, bottom{}, none{};  // `none` stays 0 unless an element is infinite or NaN
    for (int64_t d = 0; d < dim; d += W) {
        vf x = load(number + d);
        top = larger(top, x), bottom = larger(bottom, -x), none = fma(x, vf{}, none);
    }
    float high = largest(top), low = -largest(bottom);
    for (int64_t d = 0; sum(none) != 0 && d < dim; d++) {
        if (number[d] != number[d]) low = high = number[d];
    }
    // The ends are divided before they are subtracted: their difference may be too large for fp32.
    float scale = without_zero_point(high / LARGEST - low / LARGEST);
    scale = scale == 0 ? 1.0f : scale;
    vf zero = nearest(splat(-low / scale));
    zero = not_above(select(zero == zero, zero, vf{}), LARGEST);
    for (int64_t d = 0; d < dim; d += W) {
        store(number + d, not_above(not_below(nearest(load(number + d) / scale) + zero, 0), LARGEST));
    }
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scale) | (uint32_t)zero[0]);
}

// Stores a latent with the scales of its groups: the largest magnitude of a group over the largest number of its type, at least
// the smallest normal number, so that nothing is divided by 0; NaN if it has a NaN.
static void store_latent(const float* number, uint8_t* to) {
    constexpr float LARGEST = Number<LATENT_TYPE>::LARGEST, SMALLEST = __FLT_MIN__;
    for (int64_t g = 0; g < LATENT / LATENT_GROUP; g++, number += LATENT_GROUP) {
        float scale = largest_of(number, LATENT_GROUP) / LARGEST;
        if (scale < SMALLEST) scale = SMALLEST;
        memcpy(to + LATENT + g * 4, &scale, 4);
        for (int64_t d = 0; d < LATENT_GROUP; d += W) encode<LATENT_TYPE>(load(number + d) / scale, to + g * LATENT_GROUP + d);
    }
}

// One head of one token as contiguous elements: in place, or a copy in `to`.
static const uint8_t* row_of(const Array& from, int64_t token, int64_t head, int64_t dim, uint8_t* to) {
    const int64_t size = size_of(from.type);
    const uint8_t* row = from.data + (token * from.token + head * from.head) * size;
    return from.dim == 1 ? row : gather_row(row, elements_of(from, dim), to);
}

static void as_numbers(const Array& from, const uint8_t* row, int64_t dim, float* number) {
    with_type(from.type, [&](auto t) {
        for (int64_t d = 0; d < dim; d += W) store(number + d, decode<t.value>(row + d * SIZE<t.value>, dim - d));
    });
}

// Stores one head of one token. `number` holds it as fp32, `code` in the stored format; both are buffers of MOST_DIM elements. `known`
// is the largest magnitude that a scale of the token is for; null: that of the row.
static void store_row(const Array& from, const Pages& pages, int64_t token, int64_t head, int64_t page, int64_t slot, float* number,
                      uint8_t* code, const float* known = nullptr) {
    int64_t dim = pages.dim, row_size = pages.row(), size = size_of(pages.type);
    uint8_t* to = pages.data + (page * pages.page + head * pages.head + pages.slot(slot)) * size;
    bool whole = pages.whole_rows();
    if (whole && from.type == pages.type && from.dim == 1 && !pages.scale) {
        memcpy(to, from.data + (token * from.token + head * from.head) * size, dim * size);
        return;
    }
    const uint8_t* row = row_of(from, token, head, dim, code);
    if (pages.type == FP8_DS_MLA) {
        as_numbers(from, row, dim, number);
        return store_latent(number, to);
    }
    if (from.type == pages.type && !pages.scale) {
        if (row != code) memcpy(code, row, dim * size);
    } else {
        as_numbers(from, row, dim, number);
        if (pages.scale) {
            float* scale = pages.scale + page * pages.scale_page + slot * pages.scale_slot + head * pages.scale_head;
            if (pages.type == INT4_ZP) {
                *scale = quantise_with_zero(number, dim);
            } else if (pages.scale_slot || pages.scale_page) {
                // One scale per token: it maps the largest element to the largest number of the format.
                float top = known ? *known : largest_of(number, dim);
                top /= with_type(pages.type, [](auto t) { return LARGEST_STORED<t.value>; });
                *scale = top == 0 ? 1.0f : top;
            }
            for (int64_t d = 0; d < dim && pages.type != INT4_ZP; d += W) store(number + d, load(number + d) / *scale);
        }
        if (pages.groups) divide_by_groups(pages, pages.groups_at(page, slot) + head * pages.group_head, number);
        with_type(pages.type, [&](auto t) {
            for (int64_t d = 0; d < dim; d += W) encode<t.value>(load(number + d), code + bytes_of<t.value>(d));
        });
    }
    if (whole) {
        memcpy(to, code, row_size * size);
    } else {
        scatter_row(code, elements_of(pages), to);
    }
}

static size_t write_workspace(const Write&) { return (MOST_DIM + W) * 8; }

// The largest magnitude of one head of one token in both of its parts, or NaN.
static float largest_of(const Write& call, int64_t token, int64_t head, float* number, uint8_t* code) {
    float top = 0;
    auto see = [&](const Array& from, int64_t dim) {
        as_numbers(from, row_of(from, token, head, dim, code), dim, number);
        float one = largest_of(number, dim);
        if (one > top || one != one) top = one;
    };
    see(call.k, call.cache.k.dim);
    if (top == top) see(call.v, call.cache.v.dim);
    return top;
}

static void write(const Write& call, int64_t token, int64_t slot, char* workspace) {
    int64_t page = slot / call.cache.page_size, offset = slot % call.cache.page_size;
    float* number = reinterpret_cast<float*>(workspace);
    uint8_t* code = reinterpret_cast<uint8_t*>(workspace + (MOST_DIM + W) * 4);
    for (int64_t head = 0; head < call.cache.heads; head++) {
        float top = call.shared_scales ? largest_of(call, token, head, number, code) : 0.0f;
        const float* known = call.shared_scales ? &top : nullptr;
        store_row(call.k, call.cache.k, token, head, page, offset, number, code, known);
        store_row(call.v, call.cache.v, token, head, page, offset, number, code, known);
    }
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
