// A lane: what moves the pieces of one drive. A queue that takes reads before writes is part of it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "pacer.hpp"
#include "piece.hpp"

namespace tz {

std::int64_t steady_now() noexcept;  // nanoseconds

// Hears of every piece once, on a lane's thread, when the kernel is through with its memory.
class Sink {
  public:
    virtual void ended(Piece& piece, std::optional<IoError> error) noexcept = 0;
    virtual bool moot(const Piece& piece) const noexcept = 0;  // its request has failed already
  protected:
    ~Sink() = default;
};

struct LaneOptions {
    std::size_t block = 0;
    unsigned depth = 0, threads = 0;
    int node = -1;  // NUMA node of the drive
    SysCalls calls;
    std::shared_ptr<Pacer> pacer;  // of the drive; null: as fast as it goes
};

class Lane {
  public:
    explicit Lane(const LaneOptions& options) : options_(options) {}
    virtual ~Lane() = default;
    virtual void submit(Piece* chain) = 0;  // linked by `next`
    // Ends the threads once the queue is empty; false when pieces stay in flight for longer than `patience`:
    // then the lane must be kept for ever.
    virtual bool stop(std::chrono::nanoseconds patience) = 0;
    virtual bool fix(const char* data, std::size_t n) = 0;  // a registered buffer from now on, if possible
    virtual void unfix(const char* data) = 0;
    virtual const char* name() const noexcept = 0;
    const ByteCounts& counts() const noexcept { return counts_; }
    // When a piece last ended, or was last let go by the limit: later, then, than the present at times.
    std::int64_t last_end() const noexcept { return last_end_.load(std::memory_order_relaxed); }
    int node() const noexcept { return options_.node; }

  protected:
    void finished(Piece& piece) noexcept {
        piece.since.store(Piece::kEnded, std::memory_order_relaxed);
        not_stuck_before(steady_now());
    }
    // How long the piece must still wait for the limit, in nanoseconds. To be asked in the order of service;
    // the time until then is not the drive's, so no deadline counts it.
    std::int64_t wait_for_limit(Piece& piece) noexcept {
        if (!options_.pacer) return 0;
        if (piece.due == 0) {
            piece.due = options_.pacer->take(piece.queued, piece.size);
            not_stuck_before(piece.due);
        }
        return std::max<std::int64_t>(piece.due - steady_now(), 0);
    }
    const LaneOptions options_;
    ByteCounts counts_;

  private:
    void not_stuck_before(std::int64_t when) noexcept {
        std::int64_t known = last_end_.load(std::memory_order_relaxed);
        while (known < when && !last_end_.compare_exchange_weak(known, when, std::memory_order_relaxed)) {
        }
    }
    std::atomic<std::int64_t> last_end_{0};  // steady nanoseconds
};

// Pieces waiting for their turn, in order of arrival but reads first. Not thread-safe.
class PieceQueue {
  public:
    void push(Piece* piece);        // one
    void push_chain(Piece* chain);  // each of them
    void push_front(Piece* piece);
    bool empty() const noexcept { return !heads_[0] && !heads_[1]; }
    // The next one: a read if there is one, but a write after every kReadsAtOnce reads that overtook it.
    Piece* pop();

  private:
    static constexpr int kReadsAtOnce = 8;
    Piece* take(int which);
    Piece *heads_[2] = {nullptr, nullptr}, *tails_[2] = {nullptr, nullptr};
    int overtakes_ = 0;
};

}  // namespace tz
