// A lane of threads doing pread and pwrite: works everywhere, and is right for buffered files, where copying
// takes time.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lane.hpp"

namespace tz {

class PoolLane final : public Lane, public std::enable_shared_from_this<PoolLane> {
  public:
    static std::shared_ptr<Lane> make(const LaneOptions& options, Sink& sink);
    PoolLane(const LaneOptions& options, Sink& sink) : Lane(options), sink_(sink) {}

    void submit(Piece* chain) override;
    bool stop(std::chrono::nanoseconds patience) override;
    bool fix(const char*, std::size_t) override { return false; }
    void unfix(const char*) override {}
    const char* name() const noexcept override { return "pool"; }

  private:
    void work();
    void pace(Piece& piece, std::unique_lock<std::mutex>& lock);
    void move(Piece& piece);

    Sink& sink_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    PieceQueue queue_;
    unsigned busy_ = 0;
    bool stop_ = false;
    bool pacing_ =
        false;  // a thread waits with its piece for the limit: the next piece's turn comes after it
    std::vector<std::thread> threads_;
};

}  // namespace tz
