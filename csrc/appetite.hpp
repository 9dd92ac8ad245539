// How many chunk buffers the streamed step keeps in use.
//
// Note [appetite]
// A drive gets faster with more requests in flight, up to a number that differs from drive to drive. More
// than that wait in its queue, in front of what becomes urgent meanwhile, and use memory that no cache holds:
// a drive that writes into caches (a virtual machine's, or through DDIO) may even be slower. So the number is
// found while training: the present one and a neighbour take turns, window by window, until one is ahead by
// more than chance, and the winner meets its own neighbour. A smaller number need only be as good. Windows in
// which there was not always something to do say nothing about the drive and do not count. When neither
// neighbour wins there is a rest, twice as long each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tz {

class Appetite {
  public:
    // `most`: buffers there are, at least 1.
    explicit Appetite(std::size_t most);
    // Buffers to have in use at once.
    std::size_t limit() const noexcept { return rungs_[present_]; }
    // A buffer's bytes have come and gone. `now`: nanoseconds.
    void moved(std::uint64_t bytes, std::int64_t now) noexcept;
    // A buffer was free and there was nothing to fill it with.
    void starved() noexcept { window(present_); }

  private:
    void window(std::size_t rung) noexcept;
    void meet(int direction) noexcept;
    void over(double rate) noexcept;
    void judge() noexcept;
    void ends(bool won) noexcept;

    std::vector<std::size_t> rungs_;          // ascending
    std::size_t best_, rival_, present_ = 0;  // of the rungs; `present_` is one of the other two
    int direction_ = -1, lost_ = 0;           // of the rival; rivals in a row that did not win
    std::size_t rest_ = 0, resting_ = 0;      // windows: of the next rest, left of this one
    std::size_t skip_ = 0, left_ = 0;         // buffers: that this window does not count, and still counts
    std::uint64_t bytes_ = 0;
    std::int64_t since_ = 0;
    double first_ = 0.0;  // rate of the pair's first window
    bool second_ = false;
    int pairs_ = 0;
    double sum_ = 0.0, squares_ = 0.0;  // of the logarithms of rival's over best's rate
};

}  // namespace tz
