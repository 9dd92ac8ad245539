// One element of AdamW, shared by the portable kernel and by the tails of the vector ones.
#pragma once

#include <cmath>

#include "adam.hpp"

namespace tz {

// The first moment is torch's lerp(m, g, w1), which starts from the nearer end: from m for w1 below a half,
// else from g.
struct Lerp {
    explicit Lerp(float w1) : from_grad(!(w1 < 0.5f)), weight(from_grad ? w1 - 1.0f : w1) {}

    bool from_grad;
    float weight;
};

template <bool Tail>
inline __attribute__((always_inline)) float adam_element(float* p, float* m, float* v, float g,
                                                         const AdamScalars& s) {
    g = g * s.coef;
    const Lerp lerp(s.w1);
    const float moment = __builtin_fmaf(lerp.weight, g - *m, lerp.from_grad ? g : *m);
    float square;
    if constexpr (Tail)
        square = __builtin_fmaf(s.b2, *v, (s.w2 * g) * g);
    else
        square = __builtin_fmaf(s.w2 * g, g, s.b2 * *v);
    const float denominator = __builtin_sqrtf(square) / s.bc2s + s.eps;
    const float value = *p * s.decay + (-s.step * moment) / denominator;
    *m = moment;
    *v = square;
    *p = value;
    return value;
}

// The last n % 8 elements of a parameter.
template <Dtype G, int O>
inline __attribute__((always_inline)) void adam_tail(float* p, float* m, float* v, const char* grad,
                                                     char* out, std::size_t from, std::size_t n,
                                                     const AdamScalars& s) {
    for (std::size_t i = from; i < n; ++i) {
        const float value =
            adam_element<true>(p + i, m + i, v + i, load_as_float<G>(grad + i * size_of(G)), s);
        if constexpr (O >= 0)
            store_float<static_cast<Dtype>(O)>(out + i * size_of(static_cast<Dtype>(O)), value);
        else
            (void)out;
    }
}

}  // namespace tz
