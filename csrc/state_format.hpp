// What a chunk of optimizer state is made of, byte for byte, in a file and in memory alike.
//
// A chunk of c elements (a multiple of 1024) is, one after the other, each part for all c:
//     master      f32: the float32 parameter          split: the low 16 bits of it (below)       none:
//     nothing exp_avg     f32 | bf16 | u8: c codes, then a float32 scale of every 256 elements exp_avg_sq f32
//     | bf16 | u8: likewise, then with a split master one bit of every element max_exp_avg_sq, with amsgrad
//     only: as exp_avg_sq, without the bits
// and zero bytes up to a multiple of 4096. [f32 f32 f32] needs none: 12 c bytes.
//
// bf16 moments are rounded stochastically (noise.hpp): right on average, off by less than one bf16 step, 2^-7
// of the value. max_exp_avg_sq is rounded to nearest.
//
// u8 moments, S = the scale = the largest magnitude in the block, rounded stochastically between neighbouring
// codes:
//     exp_avg     sign * S * (q / 127)^2, q <= 127:  |error| < S * (2 sqrt(|m| / S) / 127 + 1 / 127^2)
//     exp_avg_sq  S * (q / 255)^4, q <= 255:         |error of the root| < sqrt(S) * (2 (v / S)^(1/4) / 255 +
//     1 / 255^2)
// Largest in the block: exact. An exp_avg_sq above zero never becomes zero, so that no step is divided by eps
// alone. A block with a value that is not finite decodes to NaN.
//
// split: the bfloat16 parameter itself, rounded to nearest even, holds the high half. Sixteen more bits
// cannot tell the two ways into a tie apart (65537 floats round to every even bfloat16): the direction is one
// more bit, 1 where the parameter lies above. It is the sign bit of exp_avg_sq, which has no sign, or the bit
// above. Every float32 comes back as it was, but signalling NaNs as quiet ones.
//
// none: the float32 parameter in memory is the master.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "align.hpp"

namespace tz {

enum class Master { f32, split, none };
enum class Moment { f32, bf16, u8 };

inline constexpr std::uint64_t kBlock = 256;  // elements that share a scale

// `size` bytes for every `per` elements from byte `offset` of the chunk on; size 0: not there.
struct Stream {
    std::uint64_t offset = 0, per = 1, size = 0;
    std::uint64_t at(std::uint64_t element) const { return offset + element / per * size; }
    std::uint64_t bytes(std::uint64_t elements) const { return (elements + per - 1) / per * size; }
};

struct StateLayout {
    Stream master, avg, avg_scale, sq, sq_scale, ties, max, max_scale;
    std::uint64_t used = 0, bytes = 0;  // without and with the zero bytes at the end
    std::array<const Stream*, 8> streams() const {
        return {&master, &avg, &avg_scale, &sq, &sq_scale, &ties, &max, &max_scale};
    }
};

struct StateFormat {
    Master master = Master::f32;
    Moment avg = Moment::f32, sq = Moment::f32;
    bool amsgrad = false;

    bool operator==(const StateFormat&) const = default;
    // The chunk can be updated in place by the float32 kernels.
    bool plain() const { return master == Master::f32 && avg == Moment::f32 && sq == Moment::f32; }
    // What the first element of every parameter is a multiple of.
    std::uint64_t granule() const { return avg == Moment::u8 || sq == Moment::u8 ? kBlock : 64; }
    StateLayout layout(std::uint64_t elements) const;  // of one chunk
    std::uint64_t chunk_bytes(std::uint64_t elements) const { return layout(elements).bytes; }
    // Of a record cut into chunks of `chunk` elements and what is left.
    std::uint64_t record_bytes(std::uint64_t elements, std::uint64_t chunk) const;
};

}  // namespace tz
