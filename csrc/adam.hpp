// Adam and AdamW on one parameter, bit for bit what torch.optim.Adam and AdamW (fused=True) compute on a CPU
// with AVX2.
#pragma once

#include <cstddef>

#include "cpu.hpp"
#include "dtype.hpp"

namespace tz {

// Computed once per step in double, rounded to float once.
struct AdamScalars {
    float decay;  // 1 - lr * weight_decay
    float w1;     // 1 - beta1
    float b2;     // beta2
    float w2;     // 1 - beta2
    float eps;
    float step;       // lr / (1 - beta1^t)
    float bc2s;       // sqrt(1 - beta2^t)
    float coef;       // the clip coefficient, negative to maximize; the scaled gradient is rounded to float
    float l2 = 0.0f;  // plain Adam's weight decay (with decay = 1), 0: none
};

// Per element, no contraction beyond the fma named:
//     g *= coef;  p *= decay;  g = fma(p, l2, g) if l2 != 0;  m = fma(w1, g - m, m);  v = fma(w2*g, g, b2*v)
//     x = max(x, v) with amsgrad, else x = v;  p += (-step*m) / (sqrt(x)/bc2s + eps)
// and in the last n % 8 elements, as torch's compiler contracted its scalar loop, v = fma(b2, v, (w2*g)*g).
// So a parameter may be cut anywhere that is a multiple of 8 elements from its start, and nowhere else.
struct AdamArrays {
    float *p, *m, *v;
    float* x;             // the largest v so far: amsgrad only
    const char* grad;     // any alignment
    char* out;            // receives p rounded to its type: any alignment, null where the types say none
    bool stream = false;  // `out`, at a multiple of 64 bytes, is written past the caches
};
using AdamKernel = void (*)(const AdamArrays& arrays, std::size_t n, const AdamScalars& s);

struct AdamTypes {
    Dtype grad;
    bool has_out;
    Dtype out;
    bool l2 = false;       // the scalars' l2 is not 0
    bool amsgrad = false;  // there is an x
};

AdamKernel adam_kernel(const AdamTypes& types);           // of isa()
AdamKernel adam_kernel(const AdamTypes& types, Isa isa);  // null: not in this build
AdamKernel adam_kernel_scalar(const AdamTypes& types);    // portable C++
AdamKernel adam_kernel_avx2(const AdamTypes& types);      // the rest: null on other architectures
AdamKernel adam_kernel_avx512(const AdamTypes& types);
AdamKernel adam_kernel_neon(const AdamTypes& types);

// A whole parameter on up to `threads` threads.
void adamw(const AdamArrays& arrays, std::size_t n, const AdamTypes& types, const AdamScalars& s,
           unsigned threads);

// a, b and c each to half of itself plus grad: reads four arrays and writes three, as the update does. What
// benchmarks hold it against.
void stream_ceiling(float* a, float* b, float* c, const float* grad, std::size_t n, unsigned threads);

// n floats to `type`, rounded to nearest even.
void cast_floats(const float* from, char* to, Dtype type, std::size_t n);

}  // namespace tz
