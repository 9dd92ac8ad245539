// The three float types of parameters and gradients, one element at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tz {

enum class Dtype { f32, bf16, f16 };

constexpr std::size_t size_of(Dtype t) {
    return t == Dtype::f32 ? 4 : 2;
}

inline float bf16_to_float(std::uint16_t h) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN.
inline std::uint16_t float_to_bf16(float f) {
    const auto u = std::bit_cast<std::uint32_t>(f);
    if (f != f) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float f16_to_float(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1fu, fraction = h & 0x3ffu;
    if (exponent == 31)
        return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u));
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Round to nearest even; beyond the range infinity, a NaN stays a (quiet) NaN.
inline std::uint16_t float_to_f16(float f) {
    const auto u = std::bit_cast<std::uint32_t>(f);
    const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
    const std::uint32_t magnitude = u & 0x7fffffffu;
    const auto with_sign = [sign](std::uint32_t bits) { return static_cast<std::uint16_t>(sign | bits); };
    if (magnitude > 0x7f800000u) return with_sign(0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return with_sign(0x7c00u);  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {                            // subnormal result: let the FPU round at 2^-24
        const float steps = std::bit_cast<float>(magnitude) + 0.5f;
        return with_sign(std::bit_cast<std::uint32_t>(steps) - 0x3f000000u);
    }
    const std::uint32_t rebased = magnitude - (112u << 23);
    return with_sign((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13);
}

// Element access through memcpy: records pack parameters at any byte offset.
template <Dtype T>
inline float load_as_float(const char* p) {
    if constexpr (T == Dtype::f32) {
        float f;
        std::memcpy(&f, p, 4);
        return f;
    } else {
        std::uint16_t h;
        std::memcpy(&h, p, 2);
        return T == Dtype::bf16 ? bf16_to_float(h) : f16_to_float(h);
    }
}

template <Dtype T>
inline void store_float(char* p, float f) {
    if constexpr (T == Dtype::f32) {
        std::memcpy(p, &f, 4);
    } else {
        const std::uint16_t h = T == Dtype::bf16 ? float_to_bf16(f) : float_to_f16(f);
        std::memcpy(p, &h, 2);
    }
}

}  // namespace tz
