// The matrix product c [rows, lanes] = a [rows, units] * b. A panel of b holds LANES_OF_PANEL lanes of every unit, contiguously:
//
//     for each panel, for each few rows:   sums stay in registers; each unit of a is multiplied by one line of the panel
//
// A line of a panel of keys holds one unit of each key; a line of a panel of values holds one key, or two, of each value.
#pragma once
#include "factors.h"

namespace quire {
namespace QUIRE_LEVEL {

struct Operand {  // a: rows of units
    const int32_t* data;
    int64_t stride;
};

struct Panels {  // b
    const int32_t* data;
    int64_t count, stride, units;
};

struct Sums {  // c; earlier sums are multiplied by `keep`, row by row, or discarded if it is null
    float* data;
    int64_t stride;
    const float* keep;
};

template <class F, int ROWS>
static void product_rows(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t units, float* c, int64_t c_stride,
                     const float* keep) {
    constexpr int V = VECTORS_OF_PANEL;
    vf sum[ROWS][V] = {};
    for (int64_t u = 0; u < units; u++, b += LANES_OF_PANEL) {
        vi line[V];
        UNROLL for (int n = 0; n < V; n++) line[n] = load<vi>(b + n * W);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vi unit = splat(a[r * a_stride + u]);
            UNROLL for (int n = 0; n < V; n++) sum[r][n] = F::dot(sum[r][n], unit, line[n]);
        }
    }
    // Earlier sums are added last: adding the small terms first loses less precision.
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int n = 0; n < V; n++) {
        float* to = c + r * c_stride + n * W;
        store(to, keep ? fma(load(to), splat(keep[r]), sum[r][n]) : sum[r][n]);
    }
}

template <class F, int ROWS = ROWS_OF_PANEL - 1>
INLINE void product_last_rows(int64_t rows, const int32_t* a, int64_t a_stride, const int32_t* b, int64_t units, float* c, int64_t c_stride,
                      const float* keep) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return product_rows<F, ROWS>(a, a_stride, b, units, c, c_stride, keep);
        product_last_rows<F, ROWS - 1>(rows, a, a_stride, b, units, c, c_stride, keep);
    }
}

template <class F>
static void product(Operand a, int64_t rows, Panels b, Sums c) {
    for (int64_t panel = 0; panel < b.count; panel++) {
        const int32_t* lines = b.data + panel * b.stride;
        float* to = c.data + panel * LANES_OF_PANEL;
        int64_t r = 0;
        for (; r + ROWS_OF_PANEL <= rows; r += ROWS_OF_PANEL) {
            product_rows<F, ROWS_OF_PANEL>(a.data + r * a.stride, a.stride, lines, b.units, to + r * c.stride, c.stride,
                                       c.keep ? c.keep + r : nullptr);
        }
        product_last_rows<F>(rows - r, a.data + r * a.stride, a.stride, lines, b.units, to + r * c.stride, c.stride,
                     c.keep ? c.keep + r : nullptr);
    }
}

#if defined(__AMX_BF16__)
// The same with AMX: tiles of 16 rows, 16 units and 16 lanes. The numbers of rows and units are multiples of 16.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Tiles {  // configures the tile registers of a thread while it exists
    Tiles() {
        TileShapes shapes;
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};

template <>
void product<Bf16Factors>(Operand a, int64_t rows, Panels b, Sums c) {
    for (int64_t r = 0; r < rows; r += 32) {
        bool two = r + 16 < rows;
        const int32_t* a0 = a.data + r * a.stride;
        const int32_t* a1 = two ? a0 + 16 * a.stride : a0;
        for (int64_t lane = 0; lane < b.count * LANES_OF_PANEL; lane += 32) {
            const int32_t* lines = b.data + lane / LANES_OF_PANEL * b.stride + lane % LANES_OF_PANEL;
            float* c0 = c.data + r * c.stride + lane;
            float* c1 = c0 + 16 * c.stride;
            if (c.keep) {
                for (int64_t i = 0; i < (two ? 32 : 16); i++) {
                    float keep = c.keep[r + i], *row = c0 + i * c.stride;
                    if (keep != 1.0f) store(row, load(row) * keep), store(row + W, load(row + W) * keep);
                }
                _tile_loadd(0, c0, c.stride * 4);
                _tile_loadd(1, c0 + 16, c.stride * 4);
                if (two) {
                    _tile_loadd(2, c1, c.stride * 4);
                    _tile_loadd(3, c1 + 16, c.stride * 4);
                }
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t u = 0; u < b.units; u += 16, lines += 16 * LANES_OF_PANEL) {
                _tile_loadd(6, lines, LANES_OF_PANEL * 4);
                _tile_loadd(7, lines + 16, LANES_OF_PANEL * 4);
                _tile_loadd(4, a0 + u, a.stride * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (two) {
                    _tile_loadd(5, a1 + u, a.stride * 4);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, c0, c.stride * 4);
            _tile_stored(1, c0 + 16, c.stride * 4);
            if (two) {
                _tile_stored(2, c1, c.stride * 4);
                _tile_stored(3, c1 + 16, c.stride * 4);
            }
        }
    }
}
constexpr int ROUND_ROWS = 16, ROUND_UNITS = 16;
#else
struct Tiles {
    Tiles() {}
};
constexpr int ROUND_ROWS = 1, ROUND_UNITS = 1;
#endif

}  // namespace QUIRE_LEVEL
}  // namespace quire
