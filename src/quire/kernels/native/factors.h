// The two kinds of factors that products are made of. A unit is 32 bits: one fp32, or two bf16 that are multiplied and added
// together. Everything that moves factors moves units, and does not care which kind they are.
#pragma once
#include "codec.h"

namespace quire {
namespace QUIRE_LEVEL {

alignas(64) static const uint8_t ZEROS[4096] = {};  // a row of any type, up to 512 elements, and what a vector reads beyond

struct Fp32Factors {
    static constexpr int PER_UNIT = 1, TYPE = FP32;

    static INLINE vf dot(vf sum, vi a, vi b) { return fma(as_float(a), as_float(b), sum); }

    // W units of a row of stored elements; `count` elements are left of it.
    template <int T>
    static INLINE vi units(const uint8_t* p, int64_t count) {
        return as_int(decode<T>(p, count));
    }

    // Where weights go: one unit each.
    static INLINE void put(int32_t* to, int64_t at, vf low, vf high) {
        store(to + at, low);
        store(to + at + W, high);
    }

    // Units of values: a key each.
    static INLINE void interleave(vi& low, vi& high) { (void)low, (void)high; }
    static INLINE void to_key_order(float* values, int64_t count) { (void)values, (void)count; }
};

#if defined(__AVX512BF16__)
#define QUIRE_BF16 1

template <int T>
INLINE __m512i looked_up(__m512i codes, const uint8_t* table) {
    __m512i size = Number<T>::TWOS_COMPLEMENT ? _mm512_abs_epi8(codes) : codes, a = _mm512_load_si512(table), b = _mm512_load_si512(table + 64);
    if (Number<T>::NEGATIVE_ZERO) return _mm512_permutex2var_epi8(a, size, b);
    return _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes), a, size, b);
}

// 64 elements of 8 bits as bf16: the first half of each quarter, and the second.
template <int T>
INLINE void halves_as_bf16(__m512i codes, vi& first, vi& second) {
    __m512i low = looked_up<T>(codes, CODES<T>.low), high = looked_up<T>(codes, CODES<T>.high);
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // and the sign
    first = (vi)_mm512_unpacklo_epi8(low, high);
    second = (vi)_mm512_unpackhi_epi8(low, high);
}

// Up to 64 bytes of a row, zeros after them: the first half in the first halves of its quarters.
INLINE __m512i quartered(const uint8_t* p, int64_t count) {
    __m512i bytes = count >= 64 ? load<__m512i>(p) : _mm512_maskz_loadu_epi8((1ull << count) - 1, p);
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), bytes);
}

struct Bf16Factors {
    static constexpr int PER_UNIT = 2, TYPE = BF16;

    static INLINE vf dot(vf sum, vi a, vi b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
    }

    template <int T>
    static INLINE vi units(const uint8_t* p, int64_t count) {
        if constexpr (T == BF16) {
            if (count >= 32) return load<vi>(p);
            return (vi)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
        } else {
            static_assert(SIZE<T> == 1, "fp16 and fp32 do not fit into bf16");
            vi first, second;
            halves_as_bf16<T>(quartered(p, least<int64_t>(count, 32)), first, second);
            return first;
        }
    }

    static INLINE void put(int32_t* to, int64_t at, vf low, vf high) {
        store(to + at / 2, (vi)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }

    // Two rows of 32 values become pairs, a lane for each value.
    static INLINE void interleave(vi& low, vi& high) {
        const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                               36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
        __m512i a = (__m512i)low, b = (__m512i)high;
        low = (vi)_mm512_permutex2var_epi16(a, first, b);
        high = (vi)_mm512_permutex2var_epi16(a, second, b);
    }

    // The same with fours of values as they come cheapest: first the even ones of 32, then the odd ones.
    static INLINE void mingle_fours(vi& low, vi& high) {
        __m512i a = (__m512i)low, b = (__m512i)high;
        low = (vi)_mm512_unpacklo_epi16(a, b);
        high = (vi)_mm512_unpackhi_epi16(a, b);
    }
    template <int T>
    static INLINE void mingle_fours(__m512i a, __m512i b, vi (&to)[4]) {  // of quartered bytes
        halves_as_bf16<T>(_mm512_unpacklo_epi8(a, b), to[0], to[1]);
        halves_as_bf16<T>(_mm512_unpackhi_epi8(a, b), to[2], to[3]);
    }

    // Fours of values in their order again.
    static INLINE void to_key_order(float* values, int64_t count) {
        for (float* to = values; to < values + count; to += 2 * W) {
            float made[2 * W];
            memcpy(made, to, sizeof made);
            UNROLL for (int i = 0; i < W / 4; i++) memcpy(to + 8 * i, made + 4 * i, 16), memcpy(to + 8 * i + 4, made + W + 4 * i, 16);
        }
    }
};
#endif

// A row of stored elements as units, zeros up to `padded` of them (a multiple of W).
template <class F, int T>
INLINE void row_as_units(const uint8_t* row, int64_t dim, int32_t* to, int64_t padded) {
    constexpr int STEP = W * F::PER_UNIT;
    int64_t d = 0;
#if QUIRE_BF16
    if constexpr (F::PER_UNIT == 2 && SIZE<T> == 1) {
        for (; d + 64 <= dim; d += 64) {
            vi first, second;
            halves_as_bf16<T>(quartered(row + d, 64), first, second);
            store(to + d / 2, first);
            store(to + d / 2 + W, second);
        }
    }
#endif
    for (; d < dim; d += STEP) store(to + d / F::PER_UNIT, F::template units<T>(row + d * SIZE<T>, dim - d));
    for (; d < padded * F::PER_UNIT; d += STEP) store(to + d / F::PER_UNIT, vi{});
}

// Whether a type can be a factor of this kind without being rounded.
template <class F, int T>
constexpr bool FITS = F::PER_UNIT == 1 || (T != FP32 && T != FP16);

template <class F>
INLINE void as_units(const uint8_t* row, int64_t type, int64_t dim, int32_t* to, int64_t padded) {
    with_type(type, [&](auto t) {
        if constexpr (FITS<F, t.value>) row_as_units<F, t.value>(row, dim, to, padded);
    });
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
