// All kernels, for one instruction set. This file is compiled once for each of them, with its own flags and its own QUIRE_LEVEL.
// Nothing here may be shared with another compilation: no inline function of the standard library, no object with a constructor
// that runs when the library is loaded.
#include "decode.h"
#include "prefill.h"
#include "rope.h"

namespace quire {
namespace QUIRE_LEVEL {

// Calls f with the kind of factors of a call's products. bf16 is used only if all inputs are exact in bf16 and the output is no
// more precise than bf16.
template <class Do>
static INLINE auto with_factors(const Attend& call, Do f) {
    auto fits = [](int64_t type) { return type != FP32 && type != FP16 && type != FP8_DS_MLA; };
    bool fit = fits(call.q.type) && fits(call.out.type) && fits(call.cache.k.type) && fits(call.cache.v.type) &&
               (!call.new_k.data || (fits(call.new_k.type) && fits(call.new_v.type)));
#if QUIRE_BF16
    if (fit) return f(Bf16Factors());
#endif
    (void)fit;
    return f(Fp32Factors());
}

static size_t workspace_size(const Attend& call) {
    return with_factors(call, [&](auto factors) {
        Workspace prefill{0, 0}, decode{0, 0};
        PrefillKernel<decltype(factors)> a(call, prefill);
        DecodeKernel<decltype(factors)> b(call, decode);
        return most(prefill.used, decode.used);
    });
}

static int64_t most_rows(const Attend& call) {
    return with_factors(call, [&](auto factors) { return PrefillKernel<decltype(factors)>::most_rows(call); });
}

static bool uses_decode(const Attend& call, int64_t rows) { return rows <= DECODE_ROWS && !call.mask && !call.invariant; }

static void attend(const Attend& call, const Unit& unit, bool decode, char* base) {
    with_factors(call, [&](auto factors) {
        Workspace workspace{reinterpret_cast<uintptr_t>(base), 0};
        if (decode) DecodeKernel<decltype(factors)>(call, workspace).run(unit);
        else PrefillKernel<decltype(factors)>(call, workspace).run(unit);
    });
}

extern const Level LEVEL;
const Level LEVEL = {workspace_size, most_rows, uses_decode, attend, combine, write_workspace, write,
                     rope_workspace, rope_write, KEYS, STRIP};

}  // namespace QUIRE_LEVEL
}  // namespace quire
