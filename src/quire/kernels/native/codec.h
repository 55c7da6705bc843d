// The codecs: stored elements as fp32 and back. A new format is a value of `Type` in call.h, a `Number` with its traits, and a line
// of `with_type`.
#pragma once
#include "vector.h"

namespace quire {
namespace QUIRE_LEVEL {

INLINE vf infinity() { return as_float(splat(0x7F800000)); }
INLINE vf magnitude(vf x) { return as_float(as_int(x) & 0x7FFFFFFF); }
INLINE vf not_below(vf x, float low) { return larger(splat(low), x); }  // NaN stays NaN
INLINE vf not_above(vf x, float high) { return -larger(splat(-high), -x); }

// W integers of a smaller type as 32-bit integers.
template <class Integer>
INLINE vi widened(const uint8_t* p) {
    typedef Integer vn __attribute__((vector_size(W * sizeof(Integer))));
    return __builtin_convertvector(load<vn>(p), vi);
}

// Floats of 8 or 16 bits: E bits of exponent with a bias, M of mantissa.
enum Specials { IEEE, NAN_ONLY, ONE_NAN, FINITE };  // infinities and NaNs; NaN is the largest code; NaN is the code of -0; neither

template <int E, int M, int BIAS, Specials KIND>
struct Small {
    static constexpr int SIGN = 1 << (E + M), INFINITE = ((1 << E) - 1) << M;
    static constexpr bool NEGATIVE_ZERO = KIND != ONE_NAN, TWOS_COMPLEMENT = false;

    static INLINE vf decode(vi code) {
        vi size = code & (SIGN - 1);
        vi normal = (size << (23 - M)) + ((127 - BIAS) << 23);
        vi tiny = as_int(__builtin_convertvector(size, vf) * as_float(splat((127 + 1 - BIAS - M) << 23)));
        vi bits = select(size < (1 << M), tiny, normal);
        if (KIND == IEEE) bits = select(size >= INFINITE, 0x7F800000 | (size << (23 - M)), bits);
        if (KIND == NAN_ONLY) bits = select(size == SIGN - 1, splat(0x7FC00000), bits);
        bits |= (code & SIGN) << (31 - E - M);
        if (KIND == ONE_NAN) bits = select(code == SIGN, splat(0x7FC00000), bits);
        return as_float(bits);
    }

    // Rounds to nearest, ties to even. For formats without infinities x is in their range.
    static INLINE vi encode(vf x) {
        vi size = as_int(magnitude(x)), sign = (as_int(x) >> (31 - E - M)) & SIGN;
        vi normal = ((size + ((1 << (22 - M)) - 1) + ((size >> (23 - M)) & 1)) >> (23 - M)) - ((127 - BIAS) << M);
        vi unit = splat((127 + 24 - BIAS - M) << 23);  // its ulp is the smallest denormal
        vi tiny = as_int(as_float(size) + as_float(unit)) - unit;
        vi code = select(size < ((128 - BIAS) << 23), tiny, normal);
        if (KIND == IEEE) code = select(code > INFINITE, splat(INFINITE), code);
        if (KIND == FINITE) return select(size > 0x7F800000, splat(0), code | sign);
        vi nan = KIND == IEEE && E == 5 && M == 10 ? splat(0x7E00) : splat(SIGN - 1);
        code = select(size > 0x7F800000, nan, code);
        if (KIND == ONE_NAN) return select(size > 0x7F800000, splat(SIGN), select(code == 0, code, code | sign));
        return code | sign;
    }

    // The value of one code. Only the compiler evaluates it.
    static constexpr float value(int code) {
        int size = code & (SIGN - 1), exponent = size >> M, mantissa = size & ((1 << M) - 1);
        float x = exponent ? mantissa + (1 << M) : mantissa;
        for (int e = exponent ? exponent : 1; e < BIAS + M; e++) x /= 2;
        for (int e = exponent; e > BIAS + M; e--) x *= 2;
        if (KIND == IEEE && size >= INFINITE) x = mantissa ? __builtin_nanf("") : __builtin_inff();
        if (KIND == NAN_ONLY && size == SIGN - 1) x = __builtin_nanf("");
        if (KIND == ONE_NAN && code == SIGN) return __builtin_nanf("");
        return code & SIGN ? -x : x;
    }
};

// The codec of a type: `decode` and `encode` for W elements, and LARGEST, where encoding saturates; 0 if it does not. 8-bit types
// also have the traits of their codes: `value`, NEGATIVE_ZERO (whether code 128 is -0) and TWOS_COMPLEMENT.
template <int TYPE>
struct Number;

template <>
struct Number<FP32> {
    static constexpr float LARGEST = 0;
    static INLINE vf decode(const uint8_t* p) { return load(p); }
    static INLINE vi encode(vf x) { return as_int(x); }
};

template <>
struct Number<BF16> {
    static constexpr float LARGEST = 0;
    static INLINE vf decode(const uint8_t* p) { return as_float(widened<uint16_t>(p) << 16); }
    static INLINE vi encode(vf x) {
        vi bits = as_int(x);
        vi rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF;
        return select((bits & 0x7FFFFFFF) > 0x7F800000, splat(0x7FC0), rounded);
    }
};

template <>
struct Number<FP16> : Small<5, 10, 15, IEEE> {
    static constexpr float LARGEST = 0;
#if defined(__AVX512F__)
    static INLINE vf decode(const uint8_t* p) { return (vf)_mm512_cvtph_ps(load<__m256i>(p)); }
#elif defined(__AVX2__)
    static INLINE vf decode(const uint8_t* p) { return (vf)_mm256_cvtph_ps(load<__m128i>(p)); }
#else
    static INLINE vf decode(const uint8_t* p) { return Small::decode(widened<uint16_t>(p)); }
#endif
};

template <class S>
struct Byte : S {
    static INLINE vf decode(const uint8_t* p) { return S::decode(widened<uint8_t>(p)); }
};
template <>
struct Number<E4M3FN> : Byte<Small<4, 3, 7, NAN_ONLY>> {
    static constexpr float LARGEST = 448;
};
template <>
struct Number<E4M3FNUZ> : Byte<Small<4, 3, 8, ONE_NAN>> {
    static constexpr float LARGEST = 240;
};
template <>
struct Number<E5M2> : Byte<Small<5, 2, 15, IEEE>> {
    static constexpr float LARGEST = 57344;
};
template <>
struct Number<INT8> {
    static constexpr float LARGEST = 127;
    static constexpr bool NEGATIVE_ZERO = false, TWOS_COMPLEMENT = true;

    static INLINE vf decode(const uint8_t* p) { return __builtin_convertvector(widened<int8_t>(p), vf); }
    static INLINE vi encode(vf x) { return __builtin_convertvector(select(x == x, nearest(x), vf{}), vi); }
    static constexpr float value(int code) { return code < 128 ? code : code - 256; }
};

template <>
struct Number<INT4> {
    static constexpr float LARGEST = 7;
    typedef uint64_t vw __attribute__((vector_size(BYTES)));
    typedef uint8_t vb __attribute__((vector_size(W / 2)));

    // Each byte in 64 bits, as two lanes of 32: the low four bits stay below, the others go to the upper lane.
    static INLINE vf decode(const uint8_t* p) {
        vw wide = __builtin_convertvector(load<vb>(p), vw);
        vi codes = (vi)(wide | wide << 28);
        return __builtin_convertvector(codes << 28 >> 28, vf);
    }
    static INLINE vb encode(vf x) {
        vw wide = (vw)(Number<INT8>::encode(x) & 0xF);
        return __builtin_convertvector(wide | wide >> 28, vb);
    }
};

// Codes from 0 on, packed as those of INT4; zero points are subtracted when they become factors.
template <>
struct Number<INT4_ZP> : Number<INT4> {
    static constexpr float LARGEST = 15;

    static INLINE vf decode(const uint8_t* p) {
        vw wide = __builtin_convertvector(load<vb>(p), vw);
        return __builtin_convertvector((vi)(wide | wide << 28) & 0xF, vf);
    }
};

// e2m1: a code in four bits, packed as those of INT4. Scales of groups are applied by `grouped_row_as_units`.
template <>
struct Number<NVFP4> : Small<2, 1, 1, FINITE> {
    static constexpr float LARGEST = 6;
    typedef Number<INT4>::vb vb;
    typedef Number<INT4>::vw vw;

    static INLINE vf decode(const uint8_t* p) {
        vw wide = __builtin_convertvector(load<vb>(p), vw);
        vi codes = (vi)(wide | wide << 28) & 0xF;
#if defined(__AVX512F__)
        return (vf)_mm512_permutexvar_ps((__m512i)codes, _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6));
#else
        return Small::decode(codes);
#endif
    }
    static INLINE vb encode(vf x) {
        vw wide = (vw)Small::encode(x);
        return __builtin_convertvector(wide | wide >> 28, vb);
    }
};

template <int TYPE>
constexpr int SIZE = TYPE == FP32 ? 4 : TYPE < E4M3FN ? 2 : 1;
template <int TYPE>
INLINE int64_t bytes_of(int64_t elements) {
    return TYPE >= INT4 ? elements / 2 : elements * SIZE<TYPE>;
}

// The largest magnitude that a cache stores: that of an element, times that of the scale of its group.
template <int TYPE>
constexpr float LARGEST_STORED = Number<TYPE>::LARGEST * (TYPE == NVFP4 ? Number<E4M3FN>::LARGEST : 1);

// The scales of groups: what each of their codes stands for. A constant, as CODES below.
constexpr int GROUP_SCALE_TYPE = E4M3FN;
typedef Number<GROUP_SCALE_TYPE> GroupScale;
struct GroupScales {
    float of[256] = {};

    constexpr GroupScales() {
        for (int code = 0; code < 256; code++) of[code] = GroupScale::value(code);
    }
};
static constexpr GroupScales GROUP_SCALES;

#if defined(__AVX512BF16__)
// The magnitudes of all codes of an 8-bit format as bf16, where each is exact: a table of low bytes and one of high bytes, for
// lookup instructions. The entry of code 0 holds the magnitude of code 128. The tables are constants: a library that is loaded on
// any CPU must not run instructions of this file when it is loaded.
template <int T>
struct Codes {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr Codes() {
        for (int code = 0; code < 128; code++) {
            uint32_t bits = __builtin_bit_cast(uint32_t, Number<T>::value(code ? code : 128)) >> 16;
            low[code] = bits & 0xFF, high[code] = bits >> 8 & 0x7F;
        }
    }
};
template <int T>
static constexpr Codes<T> CODES;

// The bytes of -15 to 15 as bf16: what codes of INT4_ZP are less a zero point.
struct Differences {
    alignas(64) uint8_t low[64] = {}, high[64] = {};

    constexpr Differences() {
        for (int i = 0; i < 31; i++) {
            uint32_t bits = __builtin_bit_cast(uint32_t, float(i - 15)) >> 16;
            low[i] = bits & 0xFF, high[i] = bits >> 8;
        }
    }
};
static constexpr Differences DIFFERENCES;
#endif

// Calls f with the type as a constant.
template <class F>
INLINE auto with_type(int64_t type, F f) {
    switch (type) {
        case FP32: return f(std::integral_constant<int, FP32>());
        case FP16: return f(std::integral_constant<int, FP16>());
        case BF16: return f(std::integral_constant<int, BF16>());
        case E4M3FN: return f(std::integral_constant<int, E4M3FN>());
        case E4M3FNUZ: return f(std::integral_constant<int, E4M3FNUZ>());
        case E5M2: return f(std::integral_constant<int, E5M2>());
        case INT8: return f(std::integral_constant<int, INT8>());
        case INT4: return f(std::integral_constant<int, INT4>());
        case INT4_ZP: return f(std::integral_constant<int, INT4_ZP>());
        default: return f(std::integral_constant<int, NVFP4>());
    }
}

// W elements, or the first `count` and zeros.
template <int TYPE>
INLINE vf decode(const uint8_t* p, int64_t count = W) {
    if (count >= W) return Number<TYPE>::decode(p);
    uint8_t some[W * 4] = {};
    memcpy(some, p, bytes_of<TYPE>(count));
    return Number<TYPE>::decode(some);
}

template <int TYPE>
INLINE void encode(vf x, uint8_t* p, int64_t count = W) {
    constexpr float LARGEST = Number<TYPE>::LARGEST;
    if (LARGEST) x = not_above(not_below(x, -LARGEST), LARGEST);
    auto code = Number<TYPE>::encode(x);
    auto put = [&](auto numbers) {
        if (count >= W) return store(p, numbers);
        memcpy(p, &numbers, bytes_of<TYPE>(count));
    };
    if constexpr (SIZE<TYPE> == 4 || TYPE >= INT4) {
        put(code);
    } else if constexpr (SIZE<TYPE> == 2) {
        typedef uint16_t vn __attribute__((vector_size(W * 2)));
        put(__builtin_convertvector(code, vn));
    } else {
        typedef uint8_t vn __attribute__((vector_size(W)));
        put(__builtin_convertvector(code, vn));
    }
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
