// The AVX2 + FMA kernel: eight lanes, one pass over memory.
#include "adam_element.hpp"
#include "adam_table.hpp"
#include "lanes_avx2.hpp"

namespace tz {

#ifdef TZ_X86

namespace {

template <Dtype G, int O>
struct Avx2 {
    TZ_AVX2 static void run(float* p, float* m, float* v, const char* grad, char* out, std::size_t n,
                            const AdamScalars& s) {
        const Lerp lerp(s.w1);
        const __m256 from_grad = _mm256_castsi256_ps(_mm256_set1_epi32(lerp.from_grad ? -1 : 0));
        const __m256 decay = _mm256_set1_ps(s.decay), w1 = _mm256_set1_ps(lerp.weight),
                     b2 = _mm256_set1_ps(s.b2), w2 = _mm256_set1_ps(s.w2), eps = _mm256_set1_ps(s.eps),
                     step = _mm256_set1_ps(-s.step), bc2s = _mm256_set1_ps(s.bc2s),
                     coef = _mm256_set1_ps(s.coef);
        const std::size_t body = n / 8 * 8;
        for (std::size_t i = 0; i < body; i += 8) {
            const __m256 g = _mm256_mul_ps(load8<G>(grad + i * size_of(G)), coef);
            const __m256 m0 = _mm256_loadu_ps(m + i);
            const __m256 m1 = _mm256_fmadd_ps(w1, _mm256_sub_ps(g, m0), _mm256_blendv_ps(m0, g, from_grad));
            const __m256 v1 =
                _mm256_fmadd_ps(_mm256_mul_ps(w2, g), g, _mm256_mul_ps(b2, _mm256_loadu_ps(v + i)));
            const __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v1), bc2s), eps);
            const __m256 change = _mm256_div_ps(_mm256_mul_ps(step, m1), denominator);
            const __m256 p1 = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(p + i), decay), change);
            _mm256_storeu_ps(m + i, m1);
            _mm256_storeu_ps(v + i, v1);
            _mm256_storeu_ps(p + i, p1);
            if constexpr (O >= 0) store8<static_cast<Dtype>(O)>(out + i * size_of(static_cast<Dtype>(O)), p1);
        }
        adam_tail<G, O>(p, m, v, grad, out, body, n, s);
    }
};

}  // namespace

AdamKernel adam_kernel_avx2(const AdamTypes& types) {
    return pick_kernel<Avx2>(types);
}

#else

AdamKernel adam_kernel_avx2(const AdamTypes&) {
    return nullptr;
}

#endif

}  // namespace tz
