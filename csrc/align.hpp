// Sizes and alignment of direct I/O.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tz {

inline constexpr std::size_t kPage = 4096;

constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t to) {
    return (n + to - 1) / to * to;
}
constexpr std::uint64_t round_down(std::uint64_t n, std::uint64_t to) {
    return n / to * to;
}
inline bool is_aligned(const void* p, std::size_t to) {
    return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}
// Whether [a, a+na) and [b, b+nb) share a byte.
inline bool overlap(const void* a, std::size_t na, const void* b, std::size_t nb) {
    const auto x = reinterpret_cast<std::uintptr_t>(a), y = reinterpret_cast<std::uintptr_t>(b);
    return na != 0 && nb != 0 && x < y + nb && y < x + na;
}

}  // namespace tz
