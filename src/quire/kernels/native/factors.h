// The two kinds of factors of products. A unit is 32 bits: one fp32, or two bf16, whose products are added. Code that moves factors
// moves units, whatever their kind.
#pragma once
#include "codec.h"

namespace quire {
namespace QUIRE_LEVEL {

alignas(64) static const uint8_t ZEROS[4096] = {};  // a row of up to MOST_DIM elements of any type, and what a vector reads after it

struct Fp32Factors {
    static constexpr int PER_UNIT = 1, TYPE = FP32;

    static INLINE vf dot(vf sum, vi a, vi b) { return fma(as_float(a), as_float(b), sum); }

    // W units of a row of stored elements, of which `count` elements remain. `zero` is the zero point of the row, if the type has one.
    template <int T>
    static INLINE vi units(const uint8_t* p, int64_t count, int64_t zero) {
        if constexpr (T == INT4_ZP) return as_int(decode<T>(p, count) - splat((float)zero));
        return as_int(decode<T>(p, count));
    }

    // Stores weights as units: one unit each.
    static INLINE void put(int32_t* to, int64_t at, vf low, vf high) {
        store(to + at, low);
        store(to + at + W, high);
    }

    // The units of values hold one key each: nothing is interleaved.
    static INLINE void interleave(vi& low, vi& high) { (void)low, (void)high; }
    static INLINE void to_key_order(float* values, int64_t count) { (void)values, (void)count; }
};

#if defined(__AVX512BF16__)
#define QUIRE_BF16 1

template <int T>
INLINE __m512i looked_up(__m512i codes, const uint8_t* table) {
    __m512i size = Number<T>::TWOS_COMPLEMENT ? _mm512_abs_epi8(codes) : codes;
    __m512i a = _mm512_load_si512(table), b = _mm512_load_si512(table + 64);
    if (Number<T>::NEGATIVE_ZERO) return _mm512_permutex2var_epi8(a, size, b);
    return _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes), a, size, b);
}

// 64 codes, one in a byte, as bf16: the first halves of the four quarters, then the second halves.
template <int T>
INLINE void halves_as_bf16(__m512i codes, vi& first, vi& second) {
    __m512i low, high;
    if constexpr (T == NVFP4) {
        // The bytes of 0 to 6 and of -0 to -6 as bf16.
        const __m128i lows = _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64);
        const __m128i highs = _mm_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64);
        low = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(lows), codes);
        high = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(highs), codes);
    } else if constexpr (T == INT4_ZP) {
        low = _mm512_permutexvar_epi8(codes, _mm512_load_si512(DIFFERENCES.low));
        high = _mm512_permutexvar_epi8(codes, _mm512_load_si512(DIFFERENCES.high));
    } else if constexpr (T == INT4) {
        // The bytes of 0 to 7 and of -8 to -1 as bf16.
        const __m128i lows = _mm_setr_epi8(0, -128, 0, 64, -128, -96, -64, -32, 0, -32, -64, -96, -128, 64, 0, -128);
        const __m128i highs = _mm_setr_epi8(0, 63, 64, 64, 64, 64, 64, 64, -63, -64, -64, -64, -64, -64, -64, -65);
        low = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(lows), codes);
        high = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(highs), codes);
    } else {
        low = looked_up<T>(codes, CODES<T>.low), high = looked_up<T>(codes, CODES<T>.high);
        high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // adds the sign
    }
    first = (vi)_mm512_unpacklo_epi8(low, high);
    second = (vi)_mm512_unpackhi_epi8(low, high);
}

// Up to 64 codes of a row, then zeros, permuted so that the first halves of the four quarters hold the first 32 codes. Of codes with a
// zero point, the index of their difference from it in DIFFERENCES.
template <int T>
INLINE __m512i quartered(const uint8_t* p, int64_t count, int64_t zero = 0) {
    if constexpr (T >= INT4) {
        __m256i pairs = count >= 64 ? load<__m256i>(p) : _mm256_maskz_loadu_epi8((1u << count / 2) - 1, p);
        const __m512i order = _mm512_set_epi32(0, 0, 7, 3, 0, 0, 6, 2, 0, 0, 5, 1, 0, 0, 4, 0);
        __m512i low = _mm512_permutexvar_epi32(order, _mm512_castsi256_si512(pairs)), nibble = _mm512_set1_epi8(0xF);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble);
        __m512i codes = _mm512_unpacklo_epi8(_mm512_and_si512(low, nibble), high);
        return T == INT4_ZP ? _mm512_add_epi8(codes, _mm512_set1_epi8((char)(15 - zero))) : codes;
    }
    __m512i bytes = count >= 64 ? load<__m512i>(p) : _mm512_maskz_loadu_epi8((1ull << count) - 1, p);
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), bytes);
}

// Elements of bf16 as fp32.
INLINE vi widened(__m256i halves) { return (vi)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }

struct Bf16Factors {
    static constexpr int PER_UNIT = 2, TYPE = BF16;

    static INLINE vf dot(vf sum, vi a, vi b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
    }

    template <int T>
    static INLINE vi units(const uint8_t* p, int64_t count, int64_t zero) {
        if constexpr (T == BF16) {
            if (count >= 32) return load<vi>(p);
            return (vi)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
        } else {
            static_assert(SIZE<T> == 1, "fp16 and fp32 do not fit into bf16");
            vi first, second;
            halves_as_bf16<T>(quartered<T>(p, least<int64_t>(count, 32), zero), first, second);
            return first;
        }
    }

    static INLINE void put(int32_t* to, int64_t at, vf low, vf high) {
        store(to + at / 2, (vi)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }

    // Interleaves two rows of 32 values: a lane holds the values of both rows.
    static INLINE void interleave(vi& low, vi& high) {
        const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                               36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
        __m512i a = (__m512i)low, b = (__m512i)high;
        low = (vi)_mm512_permutex2var_epi16(a, first, b);
        high = (vi)_mm512_permutex2var_epi16(a, second, b);
    }

    // The same with cheaper instructions, which permute groups of 4 values: of 32 values first the even groups, then the odd ones.
    static INLINE void interleave_groups_of_4(vi& low, vi& high) {
        __m512i a = (__m512i)low, b = (__m512i)high;
        low = (vi)_mm512_unpacklo_epi16(a, b);
        high = (vi)_mm512_unpackhi_epi16(a, b);
    }
    template <int T>
    static INLINE void interleave_groups_of_4(__m512i a, __m512i b, vi (&to)[4]) {  // of bytes from `quartered`
        halves_as_bf16<T>(_mm512_unpacklo_epi8(a, b), to[0], to[1]);
        halves_as_bf16<T>(_mm512_unpackhi_epi8(a, b), to[2], to[3]);
    }

    // Restores the order of the groups of 4 values.
    static INLINE void to_key_order(float* values, int64_t count) {
        for (float* to = values; to < values + count; to += 2 * W) {
            float made[2 * W];
            memcpy(made, to, sizeof made);
            UNROLL for (int i = 0; i < W / 4; i++) memcpy(to + 8 * i, made + 4 * i, 16), memcpy(to + 8 * i + 4, made + W + 4 * i, 16);
        }
    }
};
#endif

// Converts a row of stored elements to units, and fills it with zeros up to `padded` units, a multiple of W. With a zero point, the
// last unit may end with its opposite in place of zeros: the other factor has zeros there, or the product is not used.
template <class F, int T>
INLINE void row_as_units(const uint8_t* row, int64_t dim, int32_t* to, int64_t padded, int64_t zero) {
    constexpr int STEP = W * F::PER_UNIT;
    int64_t d = 0;
#if QUIRE_BF16
    if constexpr (SIZE<T> == 1) {
        for (; d + 64 <= dim; d += 64) {
            vi halves[2];
            halves_as_bf16<T>(quartered<T>(row + bytes_of<T>(d), 64, zero), halves[0], halves[1]);
            UNROLL for (int i = 0; i < 2; i++) {
                if constexpr (F::PER_UNIT == 2) {
                    store(to + d / 2 + i * W, halves[i]);
                } else {
                    store(to + d + 2 * i * W, widened(_mm512_castsi512_si256((__m512i)halves[i])));
                    store(to + d + 2 * i * W + W, widened(_mm512_extracti64x4_epi64((__m512i)halves[i], 1)));
                }
            }
        }
    }
#endif
    for (; d < dim; d += STEP) store(to + d / F::PER_UNIT, F::template units<T>(row + bytes_of<T>(d), dim - d, zero));
    for (; d < padded * F::PER_UNIT; d += STEP) store(to + d / F::PER_UNIT, vi{});
}

// The bytes of the scales of a row, contiguous: in place or copied.
INLINE const uint8_t* contiguous(const GroupRow& groups, int64_t count, uint8_t* to) {
    if (groups.low == 1 && groups.part >= count) return groups.at;
    for (int64_t g = 0, high = 0; g < count; high += groups.high) {
        for (int64_t i = 0; i < groups.part && g < count; i++, g++) to[g] = groups.at[high + i * groups.low];
    }
    return to;
}

// The same for a row of NVFP4, with the scales of its groups: a product of an element and a scale is exact in bf16. Zeros without.
template <class F>
INLINE void grouped_row_as_units(const uint8_t* row, const GroupRow& groups, int64_t dim, int32_t* to, int64_t padded) {
    constexpr int STEP = W * F::PER_UNIT;
    int64_t d = 0, count = groups.at ? dim / GROUP : 0;
    uint8_t buffer[512 / GROUP];
    const uint8_t* codes = contiguous(groups, count, buffer);
#if QUIRE_BF16
    for (; d < count * GROUP; d += 64) {
        int64_t g = d / GROUP, left = least<int64_t>(4, count - g);
        __m128i bytes = _mm_maskz_loadu_epi8((1u << left) - 1, codes + g);
        // Of four scales as fp32, the first two and the last two, eight times each: a lane has two elements of a group.
        __m128i low = _mm512_castsi512_si128(looked_up<GROUP_SCALE_TYPE>(_mm512_castsi128_si512(bytes), CODES<GROUP_SCALE_TYPE>.low));
        __m128i high = _mm512_castsi512_si128(looked_up<GROUP_SCALE_TYPE>(_mm512_castsi128_si512(bytes), CODES<GROUP_SCALE_TYPE>.high));
        high = _mm_or_si128(high, _mm_and_si128(bytes, _mm_set1_epi8((char)0x80)));
        __m512i four = _mm512_castsi128_si512(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_unpacklo_epi8(low, high)), 16));
        const __m512i order = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        vi halves[2];
        halves_as_bf16<NVFP4>(quartered<NVFP4>(row + d / 2, least<int64_t>(64, dim - d)), halves[0], halves[1]);
        UNROLL for (int i = 0; i < 2; i++) {
            const int64_t at = (d + 32 * i) / F::PER_UNIT;
            if (at >= padded) break;
            vf scale = (vf)_mm512_castsi512_ps(_mm512_permutexvar_epi32(_mm512_add_epi32(order, _mm512_set1_epi32(2 * i)), four));
            vi even = as_int(as_float(halves[i] << 16) * scale), odd = as_int(as_float(halves[i] & (int32_t)0xFFFF0000) * scale);
            if constexpr (F::PER_UNIT == 2) {
                store(to + at, (vi)((__m512i)odd | _mm512_srli_epi32((__m512i)even, 16)));
            } else {
                const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
                const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
                store(to + at, (vi)_mm512_permutex2var_epi32((__m512i)even, first, (__m512i)odd));
                if (at + W < padded) store(to + at + W, (vi)_mm512_permutex2var_epi32((__m512i)even, second, (__m512i)odd));
            }
        }
    }
    d = least(round_up(d, 64), padded * F::PER_UNIT);
#endif
    float scales[512 / GROUP + W];
    for (int64_t g = 0; d < dim && g < count; g += W) store(scales + g, decode<GROUP_SCALE_TYPE>(codes + g, count - g));
    scales[count] = 0;
    auto some = [&](int64_t at) __attribute__((always_inline)) { return Number<NVFP4>::decode(row + at / 2) * scales[at / GROUP]; };
    for (; count && d < dim; d += STEP) {
        if constexpr (F::PER_UNIT == 1) store(to + d, as_int(some(d)));
        else F::put(to, d, some(d), d + W < dim ? some(d + W) : vf{});
    }
    for (; d < padded * F::PER_UNIT; d += STEP) store(to + d / F::PER_UNIT, vi{});
}

// The same for a row of FP8_DS_MLA, whose elements are fp32.
template <class F>
INLINE void latent_row_as_units(const uint8_t* row, int64_t dim, int32_t* to, int64_t padded) {
    for (int64_t d = 0; d < padded * F::PER_UNIT; d += 2 * W) {
        vf number[2] = {};
        UNROLL for (int i = 0; i < 2; i++) {
            int64_t at = d + i * W;
            if (at < LATENT) {
                float scale;
                memcpy(&scale, row + LATENT + at / LATENT_GROUP * 4, 4);
                number[i] = decode<LATENT_TYPE>(row + at) * splat(scale);
            } else if (at < dim) {
                number[i] = decode<BF16>(row + LATENT_BYTES + (at - LATENT) * 2, dim - at);
            }
        }
        F::put(to, d, number[0], number[1]);
    }
}

// Whether every element of a type is exact as a factor of this kind, and can be converted alone.
template <class F, int T>
constexpr bool FITS = T != NVFP4 && (F::PER_UNIT == 1 || (T != FP32 && T != FP16));

// Whether rows of a type are copied as factors before they are multiplied. Codes of 8 bits become fp32 by looking up 64 of them; 16 at
// a time, as products take them, the conversion takes three times as many instructions.
template <class F>
INLINE bool is_copied(int64_t type) {
#if QUIRE_BF16
    if (F::PER_UNIT == 1 && size_of(type) == 1) return true;
#endif
    return type >= NVFP4;
}

template <class F>
INLINE void as_units(const uint8_t* row, int64_t type, int64_t dim, int32_t* to, int64_t padded, GroupRow groups = {}, int64_t zero = 0) {
    if (type == FP8_DS_MLA) return latent_row_as_units<F>(row, dim, to, padded);
    if (type == NVFP4) return grouped_row_as_units<F>(row, groups, dim, to, padded);
    with_type(type, [&](auto t) {
        if constexpr (FITS<F, t.value>) row_as_units<F, t.value>(row, dim, to, padded, zero);
    });
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
