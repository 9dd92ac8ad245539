// Which bytes of a striped file lie on which member. Pure arithmetic.
//
// The file is cut into stripes; of every sum(weights) consecutive ones, member i has weights[i], spread
// evenly. A member's stripes follow each other in its own file. One member has everything, at the same
// offsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tz {

class StripeMap {
  public:
    StripeMap() : StripeMap(std::vector<unsigned>{1}, 0) {}
    // `stripe`: bytes, a multiple of 4096 (any value for one member). std::invalid_argument says what does
    // not fit.
    StripeMap(std::vector<unsigned> weights, std::uint64_t stripe);

    std::size_t members() const noexcept { return weights_.size(); }
    std::uint64_t stripe() const noexcept { return stripe_; }
    const std::vector<unsigned>& weights() const noexcept { return weights_; }

    struct Run {
        std::size_t member;
        std::uint64_t offset;  // in the member's file
        std::uint64_t length;
    };
    // The first part of [offset, offset + length) that lies in one piece on one member.
    Run first_run(std::uint64_t offset, std::uint64_t length) const;
    // How long the member's file must be for the logical bytes [0, nbytes).
    std::uint64_t member_bytes(std::size_t member, std::uint64_t nbytes) const;
    // The first logical byte that a member's file of `nbytes` bytes does not hold; UINT64_MAX if beyond any
    // file.
    std::uint64_t first_missing(std::size_t member, std::uint64_t nbytes) const;

  private:
    std::vector<unsigned> weights_;
    std::uint64_t stripe_;
    std::vector<std::size_t> owner_;                  // of each place in a cycle
    std::vector<std::uint64_t> rank_;                 // its number among the owner's places
    std::vector<std::vector<std::uint64_t>> places_;  // of each member
};

}  // namespace tz
