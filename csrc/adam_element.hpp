// One element of Adam, shared by the portable kernel and by the tails of the vector ones.
#pragma once

#include <cmath>

#include "adam.hpp"
#include "adam_table.hpp"

namespace tz {

// The first moment is torch's lerp(m, g, w1), which starts from the nearer end: from m for w1 below a half,
// else from g. Its vector kernel adds w1 - 1 times the way from there, its tail takes away 1 - w1 times that:
// at w1 = 1 the zeros have different signs.
struct Lerp {
    explicit Lerp(float w1, bool tail = false)
        : from_grad(!(w1 < 0.5f)),
          weight(!from_grad ? w1
                 : tail     ? -(1.0f - w1)
                            : w1 - 1.0f) {}

    bool from_grad;
    float weight;
};

template <Dtype G, int O, bool L2, bool X, bool Tail>
inline __attribute__((always_inline)) void adam_element(const AdamArrays& a, std::size_t i,
                                                        const AdamScalars& s) {
    float g = load_as_float<G>(a.grad + i * size_of(G)) * s.coef;
    const float start = a.p[i] * s.decay;
    if constexpr (L2) g = __builtin_fmaf(start, s.l2, g);
    const Lerp lerp(s.w1, Tail);
    const float moment = __builtin_fmaf(lerp.weight, g - a.m[i], lerp.from_grad ? g : a.m[i]);
    float square;
    if constexpr (Tail)
        square = __builtin_fmaf(s.b2, a.v[i], (s.w2 * g) * g);
    else
        square = __builtin_fmaf(s.w2 * g, g, s.b2 * a.v[i]);
    float largest = square;
    if constexpr (X) {
        const float x = a.x[i];
        if constexpr (Tail)
            largest = x < square ? square : x;  // a NaN square is passed over, as std::max does
        else
            largest = x > square || x != x ? x : square;
        a.x[i] = largest;
    }
    const float denominator = __builtin_sqrtf(largest) / s.bc2s + s.eps;
    const float value = start + (-s.step * moment) / denominator;
    a.m[i] = moment;
    a.v[i] = square;
    a.p[i] = value;
    if constexpr (O >= 0)
        store_float<static_cast<Dtype>(O)>(a.out + i * size_of(static_cast<Dtype>(O)), value);
}

// The last n % 8 elements of a parameter.
template <Dtype G, int O, bool L2, bool X>
inline __attribute__((always_inline)) void adam_tail(const AdamArrays& a, std::size_t n,
                                                     const AdamScalars& s) {
    for (std::size_t i = n / 8 * 8; i < n; ++i) adam_element<G, O, L2, X, true>(a, i, s);
}

inline AdamArrays advance(const AdamArrays& a, std::size_t n, const AdamTypes& t) {
    return {a.p + n,
            a.m + n,
            a.v + n,
            t.amsgrad ? a.x + n : nullptr,
            a.grad + n * size_of(t.grad),
            t.has_out ? a.out + n * size_of(t.out) : nullptr,
            a.stream};
}

}  // namespace tz
