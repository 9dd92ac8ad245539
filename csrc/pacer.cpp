#include "pacer.hpp"

#include <algorithm>
#include <cmath>

namespace tz {

std::int64_t Pacer::take(std::int64_t queued, std::size_t n) noexcept {
    const double nanoseconds = std::ceil(static_cast<double>(n) * 1e9 / static_cast<double>(rate_));
    std::lock_guard lock(mutex_);
    free_ = std::max(free_, queued) + static_cast<std::int64_t>(nanoseconds);
    return free_;
}

}  // namespace tz
