// Picks the instantiation of a kernel template for the types at hand.
#pragma once

#include "adam.hpp"

namespace tz {

inline constexpr int kNoOut = -1;

// Kernels<G, O, L2, X>::run for gradient type G, output type O (a Dtype as int, or kNoOut), plain Adam's
// weight decay and amsgrad.
template <template <Dtype, int, bool, bool> class Kernels>
AdamKernel pick_kernel(const AdamTypes& t) {
    const auto flags = [&]<Dtype G, int O>() -> AdamKernel {
        if (t.amsgrad) return t.l2 ? Kernels<G, O, true, true>::run : Kernels<G, O, false, true>::run;
        return t.l2 ? Kernels<G, O, true, false>::run : Kernels<G, O, false, false>::run;
    };
    const auto with_grad = [&]<Dtype G>() -> AdamKernel {
        if (!t.has_out) return flags.template operator()<G, kNoOut>();
        switch (t.out) {
            case Dtype::f32:
                return flags.template operator()<G, static_cast<int>(Dtype::f32)>();
            case Dtype::bf16:
                return flags.template operator()<G, static_cast<int>(Dtype::bf16)>();
            default:
                return flags.template operator()<G, static_cast<int>(Dtype::f16)>();
        }
    };
    switch (t.grad) {
        case Dtype::f32:
            return with_grad.template operator()<Dtype::f32>();
        case Dtype::bf16:
            return with_grad.template operator()<Dtype::bf16>();
        default:
            return with_grad.template operator()<Dtype::f16>();
    }
}

}  // namespace tz
