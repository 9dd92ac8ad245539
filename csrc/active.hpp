// The requests under way: their pieces, their ends, and the watch that reports those the drive does not
// answer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine.hpp"
#include "lane.hpp"

namespace tz {

struct Request {
    Op op = Op::read;
    std::shared_ptr<const OpenFile> file;
    std::uint64_t offset = 0;
    std::size_t size = 0;
    Engine::Done done;
    Engine::Late late;
    std::unique_ptr<Piece[]> pieces;
    std::size_t count = 0;

    std::int64_t queued = 0;          // steady nanoseconds
    std::atomic<bool> failed{false};  // a piece has failed: the rest is moot
    std::size_t left = 0;             // pieces that have not ended; this and `error` under Active's mutex
    std::optional<IoError> error;
    std::list<std::shared_ptr<Request>>::iterator place;

    std::mutex telling;  // done and late, one after the other
    bool told_late = false, told_done = false;
};

// How long something was under way, in nanoseconds.
class Busy {
  public:
    void begin(std::int64_t now) {
        if (under_way_++ == 0) since_ = now;
    }
    void end(std::int64_t now) {
        if (--under_way_ == 0) total_ += now - since_;
    }
    std::uint64_t total(std::int64_t now) const {
        return static_cast<std::uint64_t>(total_ + (under_way_ ? now - since_ : 0));
    }

  private:
    std::int64_t total_ = 0, since_ = 0;
    std::size_t under_way_ = 0;
};

// Cuts a request of `n` bytes at `offset` into the pieces of its members.
void cut(Request& request, char* data, std::size_t block);

class Active final : public Sink {
  public:
    explicit Active(std::chrono::nanoseconds deadline);
    ~Active();

    void add(std::shared_ptr<Request> request);
    void ended(Piece& piece, std::optional<IoError> error) noexcept override;
    bool moot(const Piece& piece) const noexcept override;
    // IoFailure(ETIMEDOUT) while a write to this file is overdue: it may still land, where later data would
    // be.
    void refuse_behind_late_writes(const OpenFile& file) const;
    bool empty() const;  // no request is under way
    void add_busy(Counters& sum) const;
    void stop();  // ends the watch

  private:
    void watch();
    bool overdue(const Piece& piece, std::int64_t now) const;
    IoError late_error(const Piece& piece, std::int64_t now) const;

    const std::int64_t deadline_;  // nanoseconds
    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::list<std::shared_ptr<Request>> requests_;
    Busy busy_[3];  // reads, writes, either
    std::atomic<int> late_writes_{0};
    bool stop_ = false;
    std::thread thread_;
};

}  // namespace tz
