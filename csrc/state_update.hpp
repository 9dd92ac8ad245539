// One Adam step on a stretch of a state chunk of any format, and a chunk's state to and from float32.
#pragma once

#include "adam.hpp"
#include "noise.hpp"
#include "state_format.hpp"

namespace tz {

// Elements [at, at + count) of a chunk: `at` a multiple of the format's granule from its parameter's start.
struct Stretch {
    char* state = nullptr;  // the chunk
    std::uint64_t at = 0;
    std::size_t count = 0;
    const char* params = nullptr;  // split and none: the parameters before, in their own dtype
    const char* grad = nullptr;
    char* out = nullptr;  // the parameters after, or null
    Noise noise;          // first: the index of element `at`
};

void update_stretch(const StateFormat& format, const StateLayout& layout, const Stretch& stretch,
                    const AdamTypes& types, const AdamScalars& scalars);

// Float32 planes of one whole chunk's stretch to its state, rounded to nearest, and back. `params`: split:
// bfloat16, none: float32; both ways in memory. x: with amsgrad only.
struct Planes32 {
    float *p, *m, *v, *x;
};
void pack_stretch(const StateFormat& format, const StateLayout& layout, char* state, std::uint64_t at,
                  std::size_t count, const Planes32& from, char* params);
void unpack_stretch(const StateFormat& format, const StateLayout& layout, const char* state, std::uint64_t at,
                    std::size_t count, const char* params, const Planes32& to);

}  // namespace tz
