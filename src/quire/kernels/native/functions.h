// Elementary functions of vectors.
#pragma once
#include "codec.h"

namespace quire {
namespace QUIRE_LEVEL {

// 2^x for x <= 128, within an ulp; zero below 2^-126.
INLINE vf exp2(vf x) {
    vf n = nearest(not_below(x, -127.0f));
    vf f = x - n;
    vf p = splat(1.5461447463e-4f);
    p = fma(p, f, splat(1.3390867351e-3f));
    p = fma(p, f, splat(9.6180566699e-3f));
    p = fma(p, f, splat(5.5503571043e-2f));
    p = fma(p, f, splat(2.4022650922e-1f));
    p = fma(p, f, splat(6.9314718803e-1f));
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
    vf y = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vf y = as_float(as_int(p) + (__builtin_convertvector(n, vi) << 23));
#endif
    return select(x < splat(-126.0f), vf{}, y);
}

// tanh as in Cephes: an odd polynomial near zero, where the other form would cancel.
INLINE vf tanh(vf x) {
    vf size = magnitude(x), square = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    vf small = fma(p * square, x, x);
    vf e = exp2(not_above(size, 20.0f) * 2.88539008f);  // e^(2|x|)
    vf large = 1.0f - 2.0f / (e + 1.0f);
    large = as_float(as_int(large) | (as_int(x) & splat((int32_t)0x80000000)));
    return select(size < splat(0.625f), small, large);
}

}  // namespace QUIRE_LEVEL
}  // namespace quire
