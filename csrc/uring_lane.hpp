// A lane that is one io_uring on one thread: many requests per system call, files and buffers known to the
// kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "lane.hpp"
#include "ring.hpp"
#include "slab.hpp"

namespace tz {

class UringLane final : public Lane, public std::enable_shared_from_this<UringLane> {
  public:
    // Null where the kernel has no usable io_uring; `reason` then says why.
    static std::shared_ptr<UringLane> make(const LaneOptions& options, Sink& sink, std::string& reason);
    UringLane(const LaneOptions& options, Sink& sink);
    ~UringLane() override;

    void submit(Piece* chain) override;
    bool stop(std::chrono::nanoseconds patience) override;
    bool fix(const char* data, std::size_t n) override;
    void unfix(const char* data) override;
    const char* name() const noexcept override { return "uring"; }
    const std::vector<std::string>& flags() const noexcept { return flags_; }
    bool fixed_files() const noexcept { return fixed_files_; }
    bool fixed_buffers() const noexcept { return fixed_buffers_; }

  private:
    struct Fixed {
        const char* data = nullptr;
        std::size_t size = 0;
        const char* whole = nullptr;  // the buffer that this is a part of
    };
    static constexpr unsigned kMost = 240;  // pieces in flight: the eventfd needs a place too
    void start(std::string& reason);
    void run();
    void take_orders();  // what other threads queued
    void hand_over();    // submissions -> the kernel
    void fill();         // pieces -> submissions
    bool room() const {  // for one more in flight
        return in_flight_ < kMost && (in_flight_ == 0 || bytes_in_flight_ < options_.block * options_.depth);
    }
    std::int64_t patience() const;  // nanoseconds until there is something to do; -1: when something ends
    bool issue(Piece& piece);
    void arm();
    void reap();
    void completed(Piece& piece, ssize_t result);
    void end(Piece& piece, std::optional<IoError> error);
    void fail_everything(int code);
    int slot_of(const Member& member);  // its fixed file, or -1
    int buffer_of(const char* data, std::size_t n) const;
    void wake();
    bool order(std::function<void()> what);  // to be run on the ring's thread; false once that has ended

    Sink& sink_;
    const pid_t owner_ = getpid();
    int eventfd_ = -1;
    std::thread thread_;
    std::vector<std::string> flags_;
    bool fixed_files_ = false, fixed_buffers_ = false;

    std::mutex mutex_;  // guards the next five
    std::condition_variable changed_;
    Piece* incoming_ = nullptr;
    Piece** incoming_end_ = &incoming_;
    std::deque<std::function<void()>> orders_;
    bool asleep_ = false, stop_ = false, ended_ = false;

    // Of the ring's thread alone.
    std::unique_ptr<Ring> ring_;
    PieceQueue queue_;
    std::vector<Piece*> later_;  // to be tried again at later_at_
    Piece* held_ = nullptr;      // its turn has come, and the limit does not let it go yet
    std::int64_t later_at_ = 0;
    std::size_t in_flight_ = 0, bytes_in_flight_ = 0;
    std::uint64_t wakeups_ = 0;  // where the kernel puts the eventfd's count
    bool armed_ = false, stopping_ = false;
    std::unordered_map<std::uint64_t, int> slots_;  // Member::id -> fixed file
    std::vector<int> free_slots_;
    std::vector<Fixed> buffers_;
    std::unique_ptr<Slab> bounce_;
    std::vector<char*> free_bounce_;
};

}  // namespace tz
