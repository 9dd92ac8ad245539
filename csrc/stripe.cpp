#include "stripe.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "align.hpp"

namespace tz {

namespace {
constexpr std::uint64_t kLargestWeight = 1024, kMostMembers = 256, kLargestStripe = std::uint64_t{1} << 30;
}

StripeMap::StripeMap(std::vector<unsigned> weights, std::uint64_t stripe)
    : weights_(std::move(weights)), stripe_(stripe), places_(weights_.size()) {
    if (weights_.empty() || weights_.size() > kMostMembers)
        throw std::invalid_argument("a file has 1 to 256 members, not " + std::to_string(weights_.size()));
    std::uint64_t total = 0;
    for (const unsigned weight : weights_) {
        if (weight < 1 || weight > kLargestWeight)
            throw std::invalid_argument("a stripe weight is 1 to 1024, not " + std::to_string(weight));
        total += weight;
    }
    if (weights_.size() == 1) return;
    if (stripe_ == 0 || stripe_ % kPage != 0 || stripe_ > kLargestStripe)
        throw std::invalid_argument("a stripe is a positive multiple of 4096 bytes up to 1 GiB, not " +
                                    std::to_string(stripe_));
    // Each place goes to the member that is furthest behind its share, so that neighbours differ.
    std::vector<std::uint64_t> given(weights_.size(), 0);
    for (std::uint64_t place = 0; place < total; ++place) {
        std::size_t best = weights_.size();
        std::int64_t most = 0;
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            const auto behind = static_cast<std::int64_t>((place + 1) * weights_[i]) -
                                static_cast<std::int64_t>(given[i] * total);
            if (given[i] < weights_[i] && (best == weights_.size() || behind > most)) {
                best = i;
                most = behind;
            }
        }
        owner_.push_back(best);
        rank_.push_back(given[best]++);
        places_[best].push_back(place);
    }
}

StripeMap::Run StripeMap::first_run(std::uint64_t offset, std::uint64_t length) const {
    if (weights_.size() == 1) return {0, offset, length};
    const std::uint64_t index = offset / stripe_, within = offset % stripe_;
    const std::uint64_t cycle = index / owner_.size(), place = index % owner_.size();
    const std::size_t member = owner_[place];
    return {member, (cycle * weights_[member] + rank_[place]) * stripe_ + within,
            std::min(length, stripe_ - within)};
}

std::uint64_t StripeMap::member_bytes(std::size_t member, std::uint64_t nbytes) const {
    if (weights_.size() == 1) return nbytes;
    const std::uint64_t index = nbytes / stripe_, rest = nbytes % stripe_;
    const std::uint64_t cycle = index / owner_.size(), place = index % owner_.size();
    const auto& own = places_[member];
    const auto before =
        static_cast<std::uint64_t>(std::lower_bound(own.begin(), own.end(), place) - own.begin());
    return (cycle * weights_[member] + before) * stripe_ + (owner_[place] == member ? rest : 0);
}

std::uint64_t StripeMap::first_missing(std::size_t member, std::uint64_t nbytes) const {
    if (weights_.size() == 1) return nbytes;
    const std::uint64_t index = nbytes / stripe_, within = nbytes % stripe_;
    const std::uint64_t cycle = index / weights_[member], nth = index % weights_[member];
    const std::uint64_t logical = cycle * owner_.size() + places_[member][nth];
    return logical > UINT64_MAX / stripe_ - 1 ? UINT64_MAX : logical * stripe_ + within;
}

}  // namespace tz
