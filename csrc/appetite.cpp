#include "appetite.hpp"

#include <algorithm>
#include <cmath>

namespace tz {

namespace {

constexpr std::size_t kLeast = 4, kFirst = 12;
constexpr std::size_t kWindow = 24;                 // buffers that a window counts
constexpr int kFewest = 4, kMost = 24;              // pairs of windows to decide by
constexpr double kMargin = 0.01;                    // by how much a larger number must be faster
constexpr std::size_t kRest = 64, kLongest = 4096;  // windows

}  // namespace

Appetite::Appetite(std::size_t most) : best_(0), rival_(0), rest_(kRest) {
    for (std::size_t rung = kLeast; rung < most; rung *= 2)  // 4, 6, 8, 12, 16, 24, ...
        for (const std::size_t each : {rung, rung + rung / 2})
            if (each < most) rungs_.push_back(each);
    rungs_.push_back(std::max<std::size_t>(most, 1));
    while (best_ + 1 < rungs_.size() && rungs_[best_ + 1] <= kFirst) ++best_;
    meet(-1);
}

void Appetite::moved(std::uint64_t bytes, std::int64_t now) noexcept {
    if (rungs_.size() == 1) return;
    if (skip_ > 0) {
        if (--skip_ == 0) since_ = now;
        return;
    }
    bytes_ += bytes;
    if (--left_ == 0)
        over(static_cast<double>(bytes_) / static_cast<double>(std::max<std::int64_t>(now - since_, 1)));
}

// A window begins: what is under way of another number goes first.
void Appetite::window(std::size_t rung) noexcept {
    skip_ = std::max(rungs_[present_], rungs_[rung]);
    present_ = rung;
    left_ = kWindow;
    bytes_ = 0;
}

// Pairs with the neighbour in that direction, or with the other one where there is none.
void Appetite::meet(int direction) noexcept {
    const bool none = direction < 0 ? best_ == 0 : best_ + 1 == rungs_.size();
    direction_ = none ? -direction : direction;
    rival_ = rungs_.size() == 1 ? best_ : best_ + static_cast<std::size_t>(direction_);
    pairs_ = 0;
    sum_ = squares_ = 0.0;
    second_ = false;
    window(best_);
}

void Appetite::over(double rate) noexcept {
    if (resting_ > 0) {
        if (--resting_ == 0) return meet(direction_);
        return window(best_);
    }
    if (!second_) {
        first_ = rate;
        second_ = true;
        return window(present_ == best_ ? rival_ : best_);
    }
    const double gain = std::log(present_ == rival_ ? rate / first_ : first_ / rate);
    sum_ += gain;
    squares_ += gain * gain;
    ++pairs_;
    second_ = false;
    if (pairs_ >= kFewest) return judge();
    window(present_);  // the next pair begins with the number that this one ended with
}

void Appetite::judge() noexcept {
    const double mean = sum_ / pairs_, variance = std::max(0.0, squares_ / pairs_ - mean * mean);
    const double error = std::sqrt(variance / (pairs_ - 1));
    const double ahead = mean - direction_ * kMargin;
    if (std::abs(ahead) > 2 * error || pairs_ == kMost) return ends(ahead > 0);
    window(present_);
}

void Appetite::ends(bool won) noexcept {
    if (won) {
        best_ = rival_;
        rest_ = kRest;
        lost_ = 0;
        return meet(direction_);
    }
    if (++lost_ < 2 && best_ != 0 && best_ + 1 != rungs_.size()) return meet(-direction_);
    lost_ = 0;
    resting_ = rest_;
    rest_ = std::min(2 * rest_, kLongest);
    window(best_);
}

}  // namespace tz
