// Picks the instantiation of a kernel template for the types at hand.
#pragma once

#include "adam.hpp"

namespace tz {

inline constexpr int kNoOut = -1;

// Kernels<G, O>::run for gradient type G and output type O (a Dtype as int, or kNoOut).
template <template <Dtype, int> class Kernels>
AdamKernel pick_kernel(const AdamTypes& t) {
    const auto with_grad = [&]<Dtype G>() -> AdamKernel {
        if (!t.has_out) return Kernels<G, kNoOut>::run;
        switch (t.out) {
            case Dtype::f32:
                return Kernels<G, static_cast<int>(Dtype::f32)>::run;
            case Dtype::bf16:
                return Kernels<G, static_cast<int>(Dtype::bf16)>::run;
            default:
                return Kernels<G, static_cast<int>(Dtype::f16)>::run;
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
