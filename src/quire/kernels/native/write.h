// Cache writes: a token's keys and values, quantised, into their slot.
#pragma once
#include "factors.h"

namespace quire {
namespace QUIRE_LEVEL {

// Divides each group of a row by its scale, which is stored: its largest magnitude over the largest code, NaN if it has a NaN. At
// least the smallest scale above 0, so that nothing is divided by 0.
static void divide_by_groups(const Pages& pages, uint8_t* to, float* number) {
    constexpr float SMALLEST = 1.0f / 512, LARGEST = GroupScale::LARGEST;
    for (int64_t g = 0; g < pages.dim / GROUP; g++) {
        float *group = number + g * GROUP, top = 0;
        for (int64_t d = 0; d < GROUP && top == top; d++) {
            float x = __builtin_fabsf(group[d]);
            if (x > top || x != x) top = x;
        }
        top /= Number<NVFP4>::LARGEST;
        top = top < SMALLEST ? SMALLEST : top > LARGEST ? LARGEST : top;
        uint8_t code = (uint8_t)GroupScale::encode(splat(top))[0];
        to[pages.group_row(to).element(g)] = code;
        for (int64_t d = 0; d < GROUP; d += W) store(group + d, load(group + d) / GROUP_SCALES.of[code]);
    }
}

// Stores one head of one token. `number` holds it as fp32, `code` in the stored format; both are buffers of 512 elements.
static void store_row(const Array& from, const Pages& pages, int64_t token, int64_t head, int64_t page, int64_t slot, float* number,
                      uint8_t* code) {
    int64_t dim = pages.dim, row_size = pages.row(), size = size_of(pages.type), from_size = size_of(from.type);
    const uint8_t* row = from.data + (token * from.token + head * from.head) * from_size;
    uint8_t* to = pages.data + (page * pages.page + head * pages.head + pages.slot(slot)) * size;
    bool whole = pages.whole_rows();
    if (whole && from.type == pages.type && from.dim == 1 && !pages.scale) {
        memcpy(to, row, dim * size);
        return;
    }
    if (from.dim != 1) {
        for (int64_t d = 0; d < dim; d++) memcpy(code + d * from_size, row + d * from.dim * from_size, from_size);
        row = code;
    }
    if (from.type == pages.type && !pages.scale) {
        if (row != code) memcpy(code, row, dim * size);
    } else {
        with_type(from.type, [&](auto t) {
            for (int64_t d = 0; d < dim; d += W) store(number + d, decode<t.value>(row + d * SIZE<t.value>, dim - d));
        });
        if (pages.scale) {
            float* scale = pages.scale + page * pages.scale_page + slot * pages.scale_slot + head * pages.scale_head;
            if (pages.scale_slot || pages.scale_page) {
                // One scale per token: it maps the largest element to the largest number of the format.
                float top = 0;
                for (int64_t d = 0; d < dim; d++) {
                    float x = __builtin_fabsf(number[d]);
                    if (x > top || x != x) top = x;
                    if (top != top) break;
                }
                top /= with_type(pages.type, [](auto t) { return LARGEST_STORED<t.value>; });
                *scale = top == 0 ? 1.0f : top;
            }
            for (int64_t d = 0; d < dim; d += W) store(number + d, load(number + d) / *scale);
        }
        if (pages.groups) divide_by_groups(pages, pages.groups_at(page, slot) + head * pages.group_head, number);
        with_type(pages.type, [&](auto t) {
            for (int64_t d = 0; d < dim; d += W) encode<t.value>(load(number + d), code + bytes_of<t.value>(d));
        });
    }
    if (whole) {
        memcpy(to, code, row_size * size);
    } else {
        for (int64_t d = 0; d < row_size; d++) memcpy(to + pages.element(d) * size, code + d * size, size);
    }
}

static size_t write_workspace(const Write&) { return (512 + W) * 8; }

static void write(const Write& call, int64_t token, int64_t slot, char* workspace) {
    int64_t page = slot / call.cache.page_size, offset = slot % call.cache.page_size;
    float* number = reinterpret_cast<float*>(workspace);
    uint8_t* code = reinterpret_cast<uint8_t*>(workspace + (512 + W) * 4);
    for (int64_t head = 0; head < call.cache.heads; head++) {
        store_row(call.k, call.cache.k, token, head, page, offset, number, code);
        store_row(call.v, call.cache.v, token, head, page, offset, number, code);
    }
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
