// The two kinds of factors that products are made of. A unit is 32 bits: one fp32, or two bf16 that are multiplied and added
// together. Everything that moves factors moves units, and does not care which kind they are.
#pragma once
#include "numbers.h"

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
    static INLINE void mingle(vi& low, vi& high) { (void)low, (void)high; }
};

#if defined(__AVX512BF16__)
#define QUIRE_BF16 1

// All codes of an 8-bit format as bf16: each is exact there. Low bytes and high bytes, as lookups want them. Made by the compiler:
// a library that is loaded on any CPU must not run this file's instructions before it was asked to.
template <int T>
struct Codes {
    alignas(64) uint8_t low[256] = {}, high[256] = {};

    constexpr Codes() {
        for (int code = 0; code < 256; code++) {
            uint32_t bits = __builtin_bit_cast(uint32_t, number(code)) >> 16;
            low[code] = bits & 0xFF, high[code] = bits >> 8;
        }
    }

    static constexpr float number(int code) {
        if (T == INT8) return code < 128 ? code : code - 256;
        constexpr int M = T == E5M2 ? 2 : 3, BIAS = T == E5M2 ? 15 : T == E4M3FN ? 7 : 8;
        int size = code & 127, exponent = size >> M, mantissa = size & ((1 << M) - 1);
        float value = exponent ? mantissa + (1 << M) : mantissa;
        for (int e = exponent ? exponent : 1; e < BIAS + M; e++) value /= 2;
        for (int e = exponent; e > BIAS + M; e--) value *= 2;
        if (T == E5M2 && exponent == 31) value = mantissa ? __builtin_nanf("") : __builtin_inff();
        if (T == E4M3FN && size == 127) value = __builtin_nanf("");
        if (T == E4M3FNUZ && code == 128) return __builtin_nanf("");
        return code & 128 ? -value : value;
    }
};
template <int T>
static constexpr Codes<T> CODES;

template <int T>
INLINE __m512i looked_up(__m512i codes, const uint8_t* table) {
    __m512i found = _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    if (T == E4M3FN || T == E5M2) return found;  // the sign is added by the caller
    __m512i negative = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), codes, _mm512_load_si512(table + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), found, negative);
}

// 64 elements of 8 bits as bf16, in their order.
template <int T>
INLINE void bytes_as_bf16(__m512i codes, vi& first, vi& second) {
    codes = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), codes);
    __m512i low = looked_up<T>(codes, CODES<T>.low), high = looked_up<T>(codes, CODES<T>.high);
    if (T == E4M3FN || T == E5M2) high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);
    first = (vi)_mm512_unpacklo_epi8(low, high);
    second = (vi)_mm512_unpackhi_epi8(low, high);
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
            __m256i some = count >= 32 ? load<__m256i>(p) : _mm256_maskz_loadu_epi8((1u << count) - 1, p);
            vi first, second;
            bytes_as_bf16<T>(_mm512_castsi256_si512(some), first, second);
            return first;
        }
    }

    static INLINE void put(int32_t* to, int64_t at, vf low, vf high) {
        store(to + at / 2, (vi)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }

    // Two rows of 32 values become pairs, a lane for each value.
    static INLINE void mingle(vi& low, vi& high) {
        const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                               36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
        __m512i a = (__m512i)low, b = (__m512i)high;
        low = (vi)_mm512_permutex2var_epi16(a, first, b);
        high = (vi)_mm512_permutex2var_epi16(a, second, b);
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
            bytes_as_bf16<T>(load<__m512i>(row + d), first, second);
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
