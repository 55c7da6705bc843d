// Rows whose elements are not contiguous: copied into contiguous memory, and back. In the layouts of vLLM and AITER with split axes,
// neighbouring slots of a page are contiguous and the elements of a row are not: a block of both is transposed in registers.
#pragma once
#include "vector.h"

namespace quire {
namespace QUIRE_LEVEL {

// Where the elements of a row are, in elements of `size` bytes: element d is at `d / part * high + d % part * low`.
struct Strides {
    int64_t size, count, part, high, low;

    INLINE int64_t place(int64_t d) const { return d / part * high + d % part * low; }
};

INLINE Strides elements_of(const Pages& p) { return {size_of(p.type), p.row(), p.dim_part, p.dim_high, p.dim_low}; }
INLINE Strides elements_of(const Array& rows, int64_t dim) { return {size_of(rows.type), dim, dim, 0, rows.dim}; }

// The vector of the first halves of two vectors, or of their second halves, element by element in turns.
template <bool HIGH, class V, int... L>
INLINE V zipped(V a, V b, std::integer_sequence<int, L...>) {
    constexpr int N = sizeof...(L);
    return __builtin_shufflevector(a, b, (L / 2 + HIGH * N / 2 + L % 2 * N)...);
}

// Transposes N x N elements in vectors of 16 bytes.
template <class T, int N = 16 / sizeof(T)>
struct Square {
    typedef T V __attribute__((vector_size(16)));
    V row[N];

    INLINE void transpose() {
        UNROLL for (int done = 1; done < N; done *= 2) {
            V next[N];
            UNROLL for (int i = 0; i < N / 2; i++) {
                next[2 * i] = zipped<false>(row[i], row[i + N / 2], std::make_integer_sequence<int, N>());
                next[2 * i + 1] = zipped<true>(row[i], row[i + N / 2], std::make_integer_sequence<int, N>());
            }
            UNROLL for (int i = 0; i < N; i++) row[i] = next[i];
        }
    }
};

template <class T>
static void gather_typed(const uint8_t* const* rows, int64_t count, int64_t offset, const Strides& from, uint8_t* to, int64_t step) {
    constexpr int64_t N = 16 / sizeof(T);
    int64_t at[MOST_DIM];
    for (int64_t d = 0; d < from.count; d++) at[d] = from.place(d) * (int64_t)sizeof(T);
    const bool wide = from.low == 1 && from.part % N == 0;  // whole vectors of a row are contiguous
    for (int64_t j = 0; j < count;) {
        int64_t run = rows[j] ? 1 : 0, whole = from.count / N * N;
        while (run && run < N && j + run < count && rows[j + run] == rows[j] + run * (int64_t)sizeof(T)) run++;
        if (!run) {
            j++;
        } else if (run == N && !wide) {
            const uint8_t* first = rows[j] + offset;
            for (int64_t d = 0; d < whole; d += N) {
                Square<T> square;
                UNROLL for (int i = 0; i < N; i++) square.row[i] = load<typename Square<T>::V>(first + at[d + i]);
                square.transpose();
                UNROLL for (int i = 0; i < N; i++) store(to + (j + i) * step + d * sizeof(T), square.row[i]);
            }
            for (int64_t i = 0; i < N; i++) {
                for (int64_t d = whole; d < from.count; d++) memcpy(to + (j + i) * step + d * sizeof(T), first + i * sizeof(T) + at[d], sizeof(T));
            }
            j += N;
        } else {
            const uint8_t* row = rows[j] + offset;
            int64_t d = 0;
            for (; wide && d < whole; d += N) store(to + j * step + d * sizeof(T), load<typename Square<T>::V>(row + at[d]));
            for (; d < from.count; d++) memcpy(to + j * step + d * sizeof(T), row + at[d], sizeof(T));
            j++;
        }
    }
}

// Copies rows whose first elements are `offset` bytes behind `rows[j]` to `to + j * step`; rows that are null are left out.
static INLINE void gather_rows(const uint8_t* const* rows, int64_t count, int64_t offset, const Strides& from, uint8_t* to, int64_t step) {
    if (from.size == 1) gather_typed<uint8_t>(rows, count, offset, from, to, step);
    else if (from.size == 2) gather_typed<uint16_t>(rows, count, offset, from, to, step);
    else gather_typed<uint32_t>(rows, count, offset, from, to, step);
}

// The same for one row.
static INLINE const uint8_t* gather_row(const uint8_t* row, const Strides& from, uint8_t* to) {
    gather_rows(&row, 1, 0, from, to, 0);
    return to;
}

template <class T>
static INLINE void scatter_typed(const uint8_t* row, const Strides& to, uint8_t* at) {
    for (int64_t d = 0; d < to.count; d += to.part, at += to.high * (int64_t)sizeof(T)) {
        const int64_t some = least(to.part, to.count - d);
        const uint8_t* from = row + d * sizeof(T);
        if (to.low == 1 && some == 16 / sizeof(T)) {
            memcpy(at, from, 16);
            continue;
        }
        for (int64_t i = 0; i < some; i++) memcpy(at + i * to.low * (int64_t)sizeof(T), from + i * sizeof(T), sizeof(T));
    }
}

// Stores a contiguous row at the places of its elements.
static INLINE void scatter_row(const uint8_t* row, const Strides& to, uint8_t* at) {
    if (to.size == 1) scatter_typed<uint8_t>(row, to, at);
    else if (to.size == 2) scatter_typed<uint16_t>(row, to, at);
    else scatter_typed<uint32_t>(row, to, at);
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
