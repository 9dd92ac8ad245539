// One io_uring, by raw system calls: made, filled, entered and reaped by the one thread that made it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "uring_abi.hpp"

namespace tz {

class Ring {
  public:
    // Null where the kernel has no usable io_uring; `reason` then says why.
    static std::unique_ptr<Ring> open(unsigned entries, std::string& reason);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // A blank submission, or null when the queue is full. It goes to the kernel with the next enter().
    uring::Sqe* next();
    std::uint32_t pending() const;  // submissions that the kernel has not taken yet
    // Submits, and waits for one completion or `timeout_ns` (negative: for ever). 0, or the errno; ETIME is
    // 0.
    int enter(std::int64_t timeout_ns);
    // Copies out what has completed, at most `n`; how many.
    unsigned reap(uring::Cqe* out, unsigned n);

    bool register_files(unsigned slots);   // an empty table
    bool set_file(unsigned slot, int fd);  // -1 empties the slot
    bool register_buffers(unsigned slots);
    bool set_buffer(unsigned slot, const char* data, std::size_t n);  // null empties the slot

    const std::vector<std::string>& flags() const noexcept { return flags_; }

  private:
    Ring() = default;
    bool map(const uring::Params& params, std::string& reason);

    int fd_ = -1;
    char* rings_ = nullptr;
    std::size_t rings_size_ = 0;
    uring::Sqe* sqes_ = nullptr;
    std::size_t sqes_size_ = 0;
    std::uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    std::uint32_t sq_mask_ = 0, cq_mask_ = 0, sq_entries_ = 0;
    uring::Cqe* cqes_ = nullptr;
    std::vector<std::string> flags_;
};

// "" when a read and a write really go through an io_uring in this process, else the reason. Tried until
// it has worked once: a limit that is in the way now may not be later.
std::string probe_uring();

}  // namespace tz
