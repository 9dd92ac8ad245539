#include "adam.hpp"

#include <algorithm>

#include "cpu.hpp"
#include "lanes_avx2.hpp"
#include "parallel.hpp"

namespace tz {

namespace {

constexpr std::size_t kPart = std::size_t{1} << 18;  // elements of one thread's turn, a multiple of 8

template <Dtype T>
void cast_scalar(const float* from, char* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) store_float<T>(to + i * size_of(T), from[i]);
}

#ifdef TZ_X86
template <Dtype T>
TZ_AVX2 std::size_t cast_avx2(const float* from, char* to, std::size_t n) {
    const std::size_t body = n / 8 * 8;
    for (std::size_t i = 0; i < body; i += 8) store8<T>(to + i * size_of(T), _mm256_loadu_ps(from + i));
    return body;
}
#endif

template <Dtype T>
void cast_to(const float* from, char* to, std::size_t n) {
    std::size_t done = 0;
#ifdef TZ_X86
    if (use_avx2()) done = cast_avx2<T>(from, to, n);
#endif
    cast_scalar<T>(from + done, to + done * size_of(T), n - done);
}

}  // namespace

AdamKernel adam_kernel(const AdamTypes& types) {
    return use_avx2() ? adam_kernel_avx2(types) : adam_kernel_scalar(types);
}

const char* adam_isa() {
    return use_avx2() ? "avx2" : "scalar";
}

void adamw(float* p, float* m, float* v, const char* grad, char* out, std::size_t n, const AdamTypes& types,
           const AdamScalars& s, unsigned threads) {
    const AdamKernel kernel = adam_kernel(types);
    const std::size_t gsize = size_of(types.grad), osize = size_of(types.out);
    parallel(threads, (n + kPart - 1) / kPart, [&](std::size_t i) {
        const std::size_t at = i * kPart;
        kernel(p + at, m + at, v + at, grad + at * gsize, types.has_out ? out + at * osize : nullptr,
               std::min(kPart, n - at), s);
    });
}

void cast_floats(const float* from, char* to, Dtype type, std::size_t n) {
    switch (type) {
        case Dtype::f32:
            return cast_to<Dtype::f32>(from, to, n);
        case Dtype::bf16:
            return cast_to<Dtype::bf16>(from, to, n);
        case Dtype::f16:
            return cast_to<Dtype::f16>(from, to, n);
    }
}

}  // namespace tz
