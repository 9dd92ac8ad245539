// Four elements at a time: loads that widen to float, stores that round.
#pragma once

#include "cpu.hpp"
#include "dtype.hpp"

#ifdef TZ_NEON_CPU

#include <arm_neon.h>

namespace tz {

struct NeonLanes {
    using F = float32x4_t;
    static constexpr std::size_t kWidth = 4;
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F f) { vst1q_f32(p, f); }
    template <Dtype T>
    static F load_as(const char* p) {
        if constexpr (T == Dtype::f32) {
            return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const unsigned char*>(p)));
        } else {
            const uint16x4_t h = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const unsigned char*>(p)));
            if constexpr (T == Dtype::f16) return vcvt_f32_f16(vreinterpret_f16_u16(h));
            return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
        }
    }
    template <Dtype T, bool Stream>
    static void store_as(char* p, F f) {
        auto* const to = reinterpret_cast<unsigned char*>(p);
        if constexpr (T == Dtype::f32) {
            vst1q_u8(to, vreinterpretq_u8_f32(f));
        } else if constexpr (T == Dtype::f16) {
            vst1_u8(to, vreinterpret_u8_f16(vcvt_f16_f32(f)));
        } else {
            const uint32x4_t u = vreinterpretq_u32_f32(f), high = vshrq_n_u32(u, 16);
            const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
            const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
            const uint32x4_t words = vbslq_u32(vceqq_f32(f, f), rounded, vorrq_u32(high, vdupq_n_u32(0x40)));
            vst1_u8(to, vreinterpret_u8_u16(vmovn_u32(words)));
        }
    }
    static void fence() {}
    static F all(float f) { return vdupq_n_f32(f); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F larger(F x, F v) { return vmaxq_f32(x, v); }  // NaN if either is
};

}  // namespace tz

#endif
