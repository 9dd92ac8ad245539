// A drive's bytes per second, held below a limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tz {

// Shares time out: a piece goes to the drive once its bytes have been earned, so that n bytes take at least
// n / rate seconds however they are cut. Time in which nothing was asked for earns nothing.
class Pacer {
  public:
    explicit Pacer(std::uint64_t rate) : rate_(rate) {}  // bytes per second, not 0
    // When `n` bytes asked for at `queued` may go to the drive; both steady nanoseconds. Each call takes the
    // bytes' time.
    std::int64_t take(std::int64_t queued, std::size_t n) noexcept;

  private:
    const std::uint64_t rate_;
    std::mutex mutex_;  // a drive has one lane for direct and one for buffered files
    std::int64_t free_ = 0;
};

}  // namespace tz
