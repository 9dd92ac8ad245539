// Random bits that depend on a key and an element's index alone: the same whatever the chunks, threads and
// lanes.
#pragma once

#include <cstdint>

namespace tz {

// What one parameter's step draws from: `key` says which (seed, step, parameter), `first` is the index in the
// parameter of the segment's first element.
struct Noise {
    std::uint64_t key = 0, first = 0;
};

constexpr std::uint64_t mix64(std::uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// 32 bits for the element with index high * 2^32 + low; `key` has been through mix64. A 32-bit finalizer with
// the key at two places, so that it fits vector lanes.
inline __attribute__((always_inline)) std::uint32_t noise_at(std::uint64_t key, std::uint32_t high,
                                                             std::uint32_t low) {
    std::uint32_t x = low ^ static_cast<std::uint32_t>(key);
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) + (static_cast<std::uint32_t>(key >> 32) ^ (high * 0x9e3779b1u));
    x = (x ^ (x >> 16)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

}  // namespace tz
