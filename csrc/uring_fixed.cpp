// The files and buffers of a ring that the kernel knows by number.
#include <algorithm>
#include <cerrno>
#include <future>

#include "uring_lane.hpp"

namespace tz {

namespace {

constexpr std::size_t kLargestBuffer = std::size_t{1} << 30;  // the kernel's limit for one

}  // namespace

// What is in the ring names files and buffers by number, and must be the kernel's before a number changes
// hands.
void UringLane::hand_over() {
    while (ring_->pending() > 0) {
        const int code = ring_->enter(0);
        reap();
        if (code != 0 && code != EINTR && code != EAGAIN && code != EBUSY) return;
    }
}

int UringLane::slot_of(const Member& member) {
    if (!fixed_files_) return -1;
    const auto found = slots_.find(member.id());
    if (found != slots_.end()) return found->second;
    if (free_slots_.empty()) return -1;
    const int slot = free_slots_.back();
    if (!ring_->set_file(static_cast<unsigned>(slot), member.fd())) return -1;
    free_slots_.pop_back();
    slots_.emplace(member.id(), slot);
    // The table keeps the file open: let go of it when its owner does.
    member.at_close([lane = weak_from_this(), id = member.id()] {
        if (const auto self = lane.lock())
            self->order([&lane = *self, id] {
                const auto known = lane.slots_.find(id);
                lane.ring_->set_file(static_cast<unsigned>(known->second), -1);
                lane.free_slots_.push_back(known->second);
                lane.slots_.erase(known);
            });
    });
    return slot;
}

int UringLane::buffer_of(const char* data, std::size_t n) const {
    if (!fixed_buffers_) return -1;
    for (std::size_t i = 0; i < buffers_.size(); ++i)
        if (data >= buffers_[i].data && data + n <= buffers_[i].data + buffers_[i].size)
            return static_cast<int>(i);
    return -1;
}

bool UringLane::fix(const char* data, std::size_t n) {
    if (!fixed_buffers_ || n == 0) return false;
    std::promise<bool> done;
    auto answer = done.get_future();
    const bool taken = order([&, this] {
        bool all = true;
        for (std::size_t at = 0; at < n && all; at += kLargestBuffer) {
            const std::size_t part = std::min(kLargestBuffer, n - at);
            const auto free =
                std::find_if(buffers_.begin(), buffers_.end(), [](const Fixed& b) { return !b.data; });
            all = free != buffers_.end() &&
                  ring_->set_buffer(static_cast<unsigned>(free - buffers_.begin()), data + at, part);
            if (all) *free = {data + at, part, data};
        }
        done.set_value(all);
    });
    const bool fixed = taken && answer.get();
    if (!fixed) unfix(data);
    return fixed;
}

void UringLane::unfix(const char* data) {
    order([this, data] {
        for (std::size_t i = 0; i < buffers_.size(); ++i)
            if (buffers_[i].whole == data) {
                ring_->set_buffer(static_cast<unsigned>(i), nullptr, 0);
                buffers_[i] = {};
            }
    });
}

}  // namespace tz
