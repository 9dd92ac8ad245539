// AdamW on one parameter, bit for bit what torch.optim.AdamW(fused=True) computes on a CPU with AVX2.
#pragma once

#include <cstddef>

#include "dtype.hpp"

namespace tz {

// Computed once per step in double, rounded to float once.
struct AdamScalars {
    float decay;  // 1 - lr * weight_decay
    float w1;     // 1 - beta1
    float b2;     // beta2
    float w2;     // 1 - beta2
    float eps;
    float step;  // lr / (1 - beta1^t)
    float bc2s;  // sqrt(1 - beta2^t)
    float coef;  // the clip coefficient; the scaled gradient is rounded to float
};

// Per element, no contraction beyond the fma named:
//     g *= coef;  p *= decay;  m = fma(w1, g - m, m);  v = fma(w2*g, g, b2*v);  p += (-step*m) /
//     (sqrt(v)/bc2s + eps)
// and in the last n % 8 elements, as torch's compiler contracted its scalar loop, v = fma(b2, v, (w2*g)*g).
// So a parameter may be cut anywhere that is a multiple of 8 elements from its start, and nowhere else.
using AdamKernel = void (*)(float* p, float* m, float* v, const char* grad, char* out, std::size_t n,
                            const AdamScalars& s);

// `out` (null: none) receives p rounded to its type. Grad and out pointers may have any alignment.
struct AdamTypes {
    Dtype grad;
    bool has_out;
    Dtype out;
};

AdamKernel adam_kernel(const AdamTypes& types);         // the best one for this processor
AdamKernel adam_kernel_scalar(const AdamTypes& types);  // portable C++
AdamKernel adam_kernel_avx2(const AdamTypes& types);    // null on other architectures
const char* adam_isa();

// A whole parameter on up to `threads` threads.
void adamw(float* p, float* m, float* v, const char* grad, char* out, std::size_t n, const AdamTypes& types,
           const AdamScalars& s, unsigned threads);

// n floats to `type`, rounded to nearest even.
void cast_floats(const float* from, char* to, Dtype type, std::size_t n);

}  // namespace tz
