// Eight elements at a time: loads that widen to float, stores that round.
#pragma once

#include "cpu.hpp"
#include "dtype.hpp"

#ifdef TZ_X86

#include <immintrin.h>

namespace tz {

template <Dtype T>
TZ_AVX2 inline __m256 load8(const char* p) {
    if constexpr (T == Dtype::f32) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    } else {
        const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        if constexpr (T == Dtype::f16) return _mm256_cvtph_ps(h);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
}

// Stream: past the caches, to a multiple of the vector's size.
template <bool Stream>
TZ_AVX2 inline void put16(char* p, __m128i words) {
    auto* const to = reinterpret_cast<__m128i*>(p);
    if constexpr (Stream)
        _mm_stream_si128(to, words);
    else
        _mm_storeu_si128(to, words);
}

template <Dtype T, bool Stream = false>
TZ_AVX2 inline void store8(char* p, __m256 f) {
    if constexpr (T == Dtype::f32) {
        if constexpr (Stream)
            _mm256_stream_ps(reinterpret_cast<float*>(p), f);
        else
            _mm256_storeu_ps(reinterpret_cast<float*>(p), f);
    } else if constexpr (T == Dtype::f16) {
        put16<Stream>(p, _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
    } else {
        const __m256i u = _mm256_castps_si256(f);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i rounded =
            _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
        const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
        const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
        put16<Stream>(p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
}

struct Avx2Lanes {
    using F = __m256;
    static constexpr std::size_t kWidth = 8;
    TZ_AVX2 static F load(const float* p) { return _mm256_loadu_ps(p); }
    TZ_AVX2 static void store(float* p, F f) { _mm256_storeu_ps(p, f); }
    template <Dtype T>
    TZ_AVX2 static F load_as(const char* p) {
        return load8<T>(p);
    }
    template <Dtype T, bool Stream>
    TZ_AVX2 static void store_as(char* p, F f) {
        store8<T, Stream>(p, f);
    }
    TZ_AVX2 static void fence() { _mm_sfence(); }
    TZ_AVX2 static F all(float f) { return _mm256_set1_ps(f); }
    TZ_AVX2 static F add(F a, F b) { return _mm256_add_ps(a, b); }
    TZ_AVX2 static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    TZ_AVX2 static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    TZ_AVX2 static F div(F a, F b) { return _mm256_div_ps(a, b); }
    TZ_AVX2 static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    TZ_AVX2 static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    TZ_AVX2 static F larger(F x, F v) {  // NaN if either is; maxps gives its second operand then
        return _mm256_blendv_ps(_mm256_max_ps(x, v), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
};

}  // namespace tz

#endif
