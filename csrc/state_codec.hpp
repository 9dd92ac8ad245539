// The parts of a state chunk that are not float32, to and from float32: one table of functions per
// instruction set, all with the same results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace tz {

// `noise`: one word per element, of whose half at bit `shift` decides how it is rounded; 0x8000: to nearest.
struct StateCodec {
    void (*noise)(std::uint64_t key, std::uint64_t first, std::uint32_t* out, std::size_t n);
    void (*widen)(const std::uint16_t* bf16, float* to, std::size_t n);
    void (*narrow)(const float* from, std::uint16_t* bf16, const std::uint32_t* noise, unsigned shift,
                   std::size_t n);
    // One block of up to 256 elements and its scale.
    void (*signed_codes)(const float* from, std::uint8_t* codes, float* scale, const std::uint32_t* noise,
                         unsigned shift, std::size_t n);
    void (*signed_values)(const std::uint8_t* codes, float scale, float* to, std::size_t n);
    void (*square_codes)(const float* from, std::uint8_t* codes, float* scale, const std::uint32_t* noise,
                         unsigned shift, std::size_t n);
    void (*square_values)(const std::uint8_t* codes, float scale, float* to, std::size_t n);
    // The float32 master from a bfloat16 parameter (at any byte), its low bits and the sign of `sq`, which is
    // cleared.
    void (*join)(const char* high, const std::uint16_t* low, float* sq, float* master, std::size_t n);
    // Its low bits and the sign of `sq`.
    void (*cut)(const float* master, std::uint16_t* low, float* sq, std::size_t n);
};

const StateCodec& state_codec();  // of isa()
const StateCodec& state_codec(Isa isa);
const StateCodec& state_codec_scalar();
const StateCodec& state_codec_avx2();  // the portable ones where there is no AVX2
const StateCodec& state_codec_avx512();

}  // namespace tz
