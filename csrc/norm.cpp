#include "norm.hpp"

#include <cmath>

#include "cpu.hpp"
#include "lanes_avx2.hpp"

namespace tz {

namespace {

// What the norm is taken of: `data`, or with A >= 0 (a Dtype) what adding `more` of that type leaves there.
template <Dtype T, int A>
inline __attribute__((always_inline)) float element(char* data, const char* more, std::size_t i) {
    char* const at = data + i * size_of(T);
    if constexpr (A >= 0) {
        constexpr Dtype kMore = static_cast<Dtype>(A);
        store_float<T>(at, load_as_float<T>(at) + load_as_float<kMore>(more + i * size_of(kMore)));
    }
    return load_as_float<T>(at);
}

// The sums of squares of eight lanes over the first `body` elements, a multiple of 8.
template <Dtype T, int A>
void lanes_scalar(char* data, const char* more, std::size_t body, float* lanes) {
    for (std::size_t i = 0; i < body; i += 8)
        for (std::size_t j = 0; j < 8; ++j) {
            const float x = element<T, A>(data, more, i + j);
            lanes[j] = lanes[j] + x * x;
        }
}

#ifdef TZ_X86
// Not inlined: the accumulator has to stay in a register, and the chain of additions is the speed.
template <Dtype T, int A>
TZ_AVX2 __attribute__((noinline)) void lanes_avx2(char* data, const char* more, std::size_t body,
                                                  float* lanes) {
    __m256 sum = _mm256_setzero_ps();
    for (std::size_t i = 0; i < body; i += 8) {
        char* const at = data + i * size_of(T);
        if constexpr (A >= 0) {
            constexpr Dtype kMore = static_cast<Dtype>(A);
            store8<T>(at, _mm256_add_ps(load8<T>(at), load8<kMore>(more + i * size_of(kMore))));
        }
        const __m256 x = load8<T>(at);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(x, x));
    }
    _mm256_storeu_ps(lanes, sum);
}
#endif

template <Dtype T, int A>
float norm(char* data, const char* more, std::size_t n, [[maybe_unused]] bool vector) {
    if (n == 1) return std::fabs(element<T, A>(data, more, 0));
    static const bool contracted = has_fma();
    float lanes[8] = {};
    const std::size_t body = n / 8 * 8;
#ifdef TZ_X86
    if (vector)
        lanes_avx2<T, A>(data, more, body, lanes);
    else
#endif
        lanes_scalar<T, A>(data, more, body, lanes);
    float sum = lanes[0];
    for (int j = 1; j < 8; ++j) sum = sum + lanes[j];
    const std::size_t plain = contracted ? body + (n - body) / 4 * 4 : n;
    for (std::size_t i = body; i < n; ++i) {
        const float x = element<T, A>(data, more, i);
        sum = i < plain ? sum + x * x : std::fmaf(x, x, sum);
    }
    return std::sqrt(sum);
}

float norm_of(const char* data, Dtype type, std::size_t n, [[maybe_unused]] bool vector) {
    char* const read_only = const_cast<char*>(data);  // nothing is added
    switch (type) {
        case Dtype::f32:
            return norm<Dtype::f32, -1>(read_only, nullptr, n, vector);
        case Dtype::bf16:
            return norm<Dtype::bf16, -1>(read_only, nullptr, n, vector);
        default:
            return norm<Dtype::f16, -1>(read_only, nullptr, n, vector);
    }
}

template <Dtype T>
bool all_finite(const char* data, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
        if (!std::isfinite(load_as_float<T>(data + i * size_of(T)))) return false;
    return true;
}

// A finite norm has finite elements: only another needs a second look.
Norm looked_at(float value, const char* data, Dtype type, std::size_t n) {
    if (std::isfinite(value)) return {value, true};
    switch (type) {
        case Dtype::f32:
            return {value, all_finite<Dtype::f32>(data, n)};
        case Dtype::bf16:
            return {value, all_finite<Dtype::bf16>(data, n)};
        default:
            return {value, all_finite<Dtype::f16>(data, n)};
    }
}

}  // namespace

Norm l2_norm(const char* data, Dtype type, std::size_t n) {
    return looked_at(norm_of(data, type, n, use_avx2()), data, type, n);
}

float l2_norm_scalar(const char* data, Dtype type, std::size_t n) {
    return norm_of(data, type, n, false);
}

Norm accumulate(char* into, Dtype into_type, const char* more, Dtype more_type, std::size_t n) {
    const bool vector = use_avx2();
    const auto add = [&]<Dtype T, Dtype A>() { return norm<T, static_cast<int>(A)>(into, more, n, vector); };
    float value = 0.0f;
    if (into_type == Dtype::bf16)
        value = add.template operator()<Dtype::bf16, Dtype::bf16>();
    else if (into_type == Dtype::f16)
        value = add.template operator()<Dtype::f16, Dtype::f16>();
    else if (more_type == Dtype::f32)
        value = add.template operator()<Dtype::f32, Dtype::f32>();
    else if (more_type == Dtype::bf16)
        value = add.template operator()<Dtype::f32, Dtype::bf16>();
    else
        value = add.template operator()<Dtype::f32, Dtype::f16>();
    return looked_at(value, into, into_type, n);
}

}  // namespace tz
