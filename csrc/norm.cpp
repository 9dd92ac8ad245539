#include "norm.hpp"

#include <cmath>

#include "cpu.hpp"
#include "lanes_avx2.hpp"

namespace tz {

namespace {

// The sums of squares of eight lanes over the first `body` elements, a multiple of 8.
template <Dtype T>
void lanes_scalar(const char* data, std::size_t body, float* lanes) {
    for (std::size_t i = 0; i < body; i += 8)
        for (std::size_t j = 0; j < 8; ++j) {
            const float x = load_as_float<T>(data + (i + j) * size_of(T));
            lanes[j] = lanes[j] + x * x;
        }
}

#ifdef TZ_X86
// Not inlined: the accumulator has to stay in a register, and the chain of additions is the speed.
template <Dtype T>
TZ_AVX2 __attribute__((noinline)) void lanes_avx2(const char* data, std::size_t body, float* lanes) {
    __m256 sum = _mm256_setzero_ps();
    for (std::size_t i = 0; i < body; i += 8) {
        const __m256 x = load8<T>(data + i * size_of(T));
        sum = _mm256_add_ps(sum, _mm256_mul_ps(x, x));
    }
    _mm256_storeu_ps(lanes, sum);
}
#endif

template <Dtype T>
float norm(const char* data, std::size_t n, bool vector) {
    if (n == 1) return std::fabs(load_as_float<T>(data));
    static const bool contracted = has_fma();
    float lanes[8] = {};
    const std::size_t body = n / 8 * 8;
#ifdef TZ_X86
    if (vector)
        lanes_avx2<T>(data, body, lanes);
    else
#endif
        lanes_scalar<T>(data, body, lanes);
    float sum = lanes[0];
    for (int j = 1; j < 8; ++j) sum = sum + lanes[j];
    const std::size_t plain = contracted ? body + (n - body) / 4 * 4 : n;
    for (std::size_t i = body; i < n; ++i) {
        const float x = load_as_float<T>(data + i * size_of(T));
        sum = i < plain ? sum + x * x : std::fmaf(x, x, sum);
    }
    return std::sqrt(sum);
}

float norm_of(const char* data, Dtype type, std::size_t n, bool vector) {
    switch (type) {
        case Dtype::f32:
            return norm<Dtype::f32>(data, n, vector);
        case Dtype::bf16:
            return norm<Dtype::bf16>(data, n, vector);
        default:
            return norm<Dtype::f16>(data, n, vector);
    }
}

}  // namespace

float l2_norm(const char* data, Dtype type, std::size_t n) {
    return norm_of(data, type, n, use_avx2());
}

float l2_norm_scalar(const char* data, Dtype type, std::size_t n) {
    return norm_of(data, type, n, false);
}

}  // namespace tz
