#include "adam.hpp"

#include <algorithm>

#include "adam_element.hpp"
#include "align.hpp"
#include "cpu.hpp"
#include "lanes_avx2.hpp"
#include "parallel.hpp"

namespace tz {

namespace {

constexpr std::size_t kPart = std::size_t{1} << 18;      // elements of one thread's turn, a multiple of 64
constexpr std::size_t kStreamed = std::size_t{8} << 20;  // bytes

template <Dtype T>
void cast_scalar(const float* from, char* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) store_float<T>(to + i * size_of(T), from[i]);
}

#ifdef TZ_X86
TZ_AVX2 void stream_avx2(float* const arrays[3], const float* grad, std::size_t n) {
    const __m256 half = _mm256_set1_ps(0.5f);
    for (std::size_t i = 0; i + 8 <= n; i += 8) {
        const __m256 g = _mm256_loadu_ps(grad + i);
        for (int k = 0; k < 3; ++k)
            _mm256_storeu_ps(arrays[k] + i, _mm256_fmadd_ps(_mm256_loadu_ps(arrays[k] + i), half, g));
    }
}

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

AdamKernel adam_kernel(const AdamTypes& types, Isa isa) {
    switch (isa) {
        case Isa::avx2:
            return adam_kernel_avx2(types);
        case Isa::avx512:
            return adam_kernel_avx512(types);
        case Isa::neon:
            return adam_kernel_neon(types);
        default:
            return adam_kernel_scalar(types);
    }
}

AdamKernel adam_kernel(const AdamTypes& types) {
    return adam_kernel(types, isa());
}

void adamw(const AdamArrays& arrays, std::size_t n, const AdamTypes& types, const AdamScalars& s,
           unsigned threads) {
    const AdamKernel kernel = adam_kernel(types);
    AdamArrays whole = arrays;
    // Nobody reads a copy larger than the caches soon, and its lines need not be fetched to be written.
    whole.stream = types.has_out && n * size_of(types.out) >= kStreamed && is_aligned(arrays.out, 64);
    parallel(threads, (n + kPart - 1) / kPart, [&](std::size_t i) {
        const std::size_t at = i * kPart;
        kernel(advance(whole, at, types), std::min(kPart, n - at), s);
    });
}

void stream_ceiling(float* a, float* b, float* c, const float* grad, std::size_t n, unsigned threads) {
    parallel(threads, (n + kPart - 1) / kPart, [&](std::size_t i) {
        const std::size_t at = i * kPart, count = std::min(kPart, n - at);
        float* const arrays[3] = {a + at, b + at, c + at};
#ifdef TZ_X86
        if (use_avx2()) return stream_avx2(arrays, grad + at, count);
#endif
        for (float* array : arrays)
            for (std::size_t j = 0; j < count; ++j) array[j] = array[j] * 0.5f + grad[at + j];
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
