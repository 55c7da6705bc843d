// Vectors of fp32 as wide as the registers of the instruction set. All other code uses them.
#pragma once
#include <cstring>
#include <utility>

#include "call.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {
namespace QUIRE_LEVEL {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
constexpr int LANES_OF_PANEL = 32, ROWS_OF_PANEL = 12;  // 24 sums in 32 registers; a panel of fp32 stays in the first-level cache
constexpr int VECTORS_AT_ONCE = 4;                      // vectors of values, for 4 rows
#elif defined(__AVX2__)
constexpr int BYTES = 32;
constexpr int LANES_OF_PANEL = 16, ROWS_OF_PANEL = 6;  // 12 sums in 16 registers
constexpr int VECTORS_AT_ONCE = 2;
#elif defined(__ARM_NEON)
constexpr int BYTES = 16;
constexpr int LANES_OF_PANEL = 16, ROWS_OF_PANEL = 6;  // 24 sums in 32 registers
constexpr int VECTORS_AT_ONCE = 4;
#else
constexpr int BYTES = 16;
constexpr int LANES_OF_PANEL = 8, ROWS_OF_PANEL = 4;  // 8 sums in 16 registers, and no fused multiplication
constexpr int VECTORS_AT_ONCE = 2;
#endif
constexpr int W = BYTES / 4;
constexpr int VECTORS_OF_PANEL = LANES_OF_PANEL / W;

typedef float vf __attribute__((vector_size(BYTES)));
typedef int32_t vi __attribute__((vector_size(BYTES)));
typedef uint32_t vu __attribute__((vector_size(BYTES)));

#define UNROLL _Pragma("GCC unroll 32")

template <class T>
INLINE T least(T a, T b) {
    return b < a ? b : a;
}
template <class T>
INLINE T most(T a, T b) {
    return a < b ? b : a;
}
INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class V = vf>
INLINE V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store(void* p, V v) {
    memcpy(p, &v, sizeof v);
}
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vf as_float(vi x) { return (vf)x; }
INLINE vi as_int(vf x) { return (vi)x; }

// The first lanes, zeros in the others.
INLINE vf load_some(const float* p, int64_t lanes) {
    if (lanes >= W) return load(p);
    vf v{};
    memcpy(&v, p, lanes * 4);
    return v;
}

// a where the mask is all ones, b where it is zero.
INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
INLINE vi select(vi mask, vi a, vi b) { return mask ? a : b; }

#if defined(__AVX512F__)
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one of them is NaN
INLINE vf nearest(vf x) { return (vf)_mm512_roundscale_ps((__m512)x, 8); }
#elif defined(__AVX2__)
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf nearest(vf x) { return (vf)_mm256_round_ps((__m256)x, 8); }
#elif defined(__ARM_NEON)
INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }
INLINE vf nearest(vf x) { return (vf)vrndnq_f32((float32x4_t)x); }
#else
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }
INLINE vf nearest(vf x) {
    // Correct for magnitudes below 2^22: callers pass no larger ones.
    vf magic = splat(12582912.0f);
    return x + magic - magic;
}
#endif

INLINE vi lanes() {
    vi v;
    UNROLL for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

// Every second lane of two vectors, starting with FIRST, within groups of 4 lanes; or every second group of 4. Shuffles within
// groups of 4 lanes and of whole groups are the cheapest.
template <bool GROUPS, int FIRST, int... L>
INLINE vf every_second(vf a, vf b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, (GROUPS ? L / 4 * 8 + FIRST * 4 + L % 4 : L % 4 / 2 * W + L / 4 * 4 + L % 2 * 2 + FIRST)...);
}
template <bool GROUPS>
INLINE void part(vf a, vf b, vf& even, vf& odd) {
    even = every_second<GROUPS, 0>(a, b, std::make_integer_sequence<int, W>());
    odd = every_second<GROUPS, 1>(a, b, std::make_integer_sequence<int, W>());
}

// Transposes a matrix of W x W 32-bit units.
template <int DONE = 1>
INLINE void transpose(vi (&rows)[W]) {
    vf even[W / 2], odd[W / 2];
    UNROLL for (int i = 0; i < W / 2; i++) part<(DONE >= 4)>(as_float(rows[2 * i]), as_float(rows[2 * i + 1]), even[i], odd[i]);
    UNROLL for (int i = 0; i < W / 2; i++) rows[i] = as_int(even[i]), rows[i + W / 2] = as_int(odd[i]);
    if constexpr (2 * DONE < W) transpose<2 * DONE>(rows);
}

// The sums of the lanes of W vectors, as one vector.
template <int DONE = 1>
INLINE vf sums(vf (&rows)[W]) {
    UNROLL for (int i = 0; i < W / DONE / 2; i++) {
        vf even, odd;
        part<(DONE >= 4)>(rows[2 * i], rows[2 * i + 1], even, odd);
        rows[i] = even + odd;
    }
    if constexpr (2 * DONE < W) return sums<2 * DONE>(rows);
    return rows[0];
}

template <int H, int... L>
INLINE vf swapped(vf x, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(x, x, (L ^ H)...);
}
template <int H = W / 2>
INLINE float largest(vf x) {
    x = larger(x, swapped<H>(x, std::make_integer_sequence<int, W>()));
    if constexpr (H > 1) return largest<H / 2>(x);
    return x[0];
}
template <int H = W / 2>
INLINE float sum(vf x) {
    x = x + swapped<H>(x, std::make_integer_sequence<int, W>());
    if constexpr (H > 1) return sum<H / 2>(x);
    return x[0];
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// The buffers of a work unit, in one allocation. Without a base, `take` only counts bytes.
struct Workspace {
    uintptr_t base;
    size_t used;

    template <class T>
    T* take(size_t n) {
        uintptr_t at = base + used;
        used += (n * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(at);
    }
};

}  // namespace QUIRE_LEVEL
}  // namespace quire
