// Sixteen elements at a time: loads that widen to float, stores that round.
#pragma once

#include "cpu.hpp"
#include "dtype.hpp"

#ifdef TZ_X86

#include <immintrin.h>

namespace tz {

struct Avx512Lanes {
    using F = __m512;
    static constexpr std::size_t kWidth = 16;
    static constexpr __mmask16 kAll = 0xffff;  // the unmasked intrinsics make GCC 12 warn of its own headers
    TZ_AVX512 static F load(const float* p) { return _mm512_loadu_ps(p); }
    TZ_AVX512 static void store(float* p, F f) { _mm512_storeu_ps(p, f); }
    template <Dtype T>
    TZ_AVX512 static F load_as(const char* p) {
        if constexpr (T == Dtype::f32) {
            return _mm512_loadu_ps(p);
        } else {
            const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
            if constexpr (T == Dtype::f16) return _mm512_maskz_cvtph_ps(kAll, h);
            return _mm512_castsi512_ps(
                _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, h), 16));
        }
    }
    // Stream: past the caches, to a multiple of the vector's size.
    template <bool Stream>
    TZ_AVX512 static void put32(char* p, __m256i words) {
        auto* const to = reinterpret_cast<__m256i*>(p);
        if constexpr (Stream)
            _mm256_stream_si256(to, words);
        else
            _mm256_storeu_si256(to, words);
    }
    template <Dtype T, bool Stream>
    TZ_AVX512 static void store_as(char* p, F f) {
        if constexpr (T == Dtype::f32) {
            if constexpr (Stream)
                _mm512_stream_ps(reinterpret_cast<float*>(p), f);
            else
                _mm512_storeu_ps(p, f);
        } else if constexpr (T == Dtype::f16) {
            put32<Stream>(p, _mm512_maskz_cvtps_ph(kAll, f, _MM_FROUND_TO_NEAREST_INT));
        } else {  // not vcvtneps2bf16: that takes denormals for zeros
            const __m512i u = _mm512_castps_si512(f), high = _mm512_maskz_srli_epi32(kAll, u, 16);
            const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
            const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
            const __m512i rounded = _mm512_maskz_srli_epi32(kAll, sum, 16);
            const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
            const __m512i words = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
            put32<Stream>(p, _mm512_maskz_cvtepi32_epi16(kAll, words));
        }
    }
    TZ_AVX512 static void fence() { _mm_sfence(); }
    TZ_AVX512 static F all(float f) { return _mm512_set1_ps(f); }
    TZ_AVX512 static F add(F a, F b) { return _mm512_add_ps(a, b); }
    TZ_AVX512 static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    TZ_AVX512 static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    TZ_AVX512 static F div(F a, F b) { return _mm512_div_ps(a, b); }
    TZ_AVX512 static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    TZ_AVX512 static F sqrt(F a) { return _mm512_maskz_sqrt_ps(kAll, a); }
    TZ_AVX512 static F larger(F x, F v) {  // NaN if either is; maxps gives its second operand then
        return _mm512_mask_mov_ps(_mm512_maskz_max_ps(kAll, x, v), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
    }
};

}  // namespace tz

#endif
