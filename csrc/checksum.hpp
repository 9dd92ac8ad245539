// The additive checksum of every record: position-weighted sums of little-endian 32-bit words, mod 2^64.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tz {

struct Checksum {
    std::uint64_t s1 = 0, s2 = 0;
    Checksum& operator+=(const Checksum& o) {
        s1 += o.s1;
        s2 += o.s2;
        return *this;
    }
    bool operator==(const Checksum&) const = default;
};

// s1 = sum w_i, s2 = sum (word_offset + i + 1) w_i; a short last word is padded with zero bytes.
Checksum checksum(const void* data, std::size_t nbytes, std::uint64_t word_offset);

}  // namespace tz
