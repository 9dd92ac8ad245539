// Tickets and the queue they complete into. A ticket is done exactly when it can be reaped.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "checksum.hpp"
#include "error.hpp"

namespace tz {

class CompletionQueue;

// What a finished request is worth: bytes moved, and the checksums of a record that was written.
struct Outcome {
    std::uint64_t bytes = 0;
    std::optional<Checksum> state, copy;
    bool record = false;  // a record update, not a plain transfer
    // Of a record: when its reads, arithmetic and writes began and ended, steady nanoseconds; 0: there were
    // none.
    struct Span {
        std::int64_t begin = 0, end = 0;
        void begins(std::int64_t now) {
            if (begin == 0) begin = now;
        }
    };
    Span reads, computes, writes;
};

class Ticket {
  public:
    explicit Ticket(std::shared_ptr<CompletionQueue> home) : home_(std::move(home)) {}

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // Whether the request's memory is the caller's again: not yet, when it is done only because its deadline
    // is over.
    bool released() const noexcept { return released_.load(std::memory_order_acquire); }
    // True when done within `timeout` (none: for ever). std::runtime_error in a forked child, where nobody
    // would.
    bool wait(std::optional<std::chrono::nanoseconds> timeout) const;
    // Valid once done; throws IoFailure when the request failed.
    const Outcome& outcome() const;

  private:
    friend class CompletionQueue;
    const std::shared_ptr<CompletionQueue> home_;
    std::atomic<bool> done_{false}, released_{false};
    Outcome outcome_;
    std::optional<IoError> error_;
};

class CompletionQueue {
  public:
    CompletionQueue();
    ~CompletionQueue();
    CompletionQueue(const CompletionQueue&) = delete;
    CompletionQueue& operator=(const CompletionQueue&) = delete;

    static std::shared_ptr<Ticket> open_ticket(const std::shared_ptr<CompletionQueue>& self);
    // The first outcome counts; `released` as in Ticket, by a second call if not by the first.
    void complete(const std::shared_ptr<Ticket>& ticket, Outcome outcome, std::optional<IoError> error,
                  bool released = true);
    std::vector<std::shared_ptr<Ticket>> reap();  // completed since the last call
    void refuse_new();                            // open_ticket throws std::invalid_argument from now on
    void wait_idle();                             // until every opened ticket is complete
    int eventfd() const noexcept { return eventfd_; }
    bool foreign() const noexcept;  // in a process forked after this was made: its threads do not exist here

  private:
    friend class Ticket;
    const pid_t owner_;
    int eventfd_ = -1;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::vector<std::shared_ptr<Ticket>> finished_;
    std::size_t outstanding_ = 0;
    bool refusing_ = false;
};

}  // namespace tz
