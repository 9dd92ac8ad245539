#include "pool_lane.hpp"

#include <cerrno>
#include <chrono>

#include "numa.hpp"
#include "slab.hpp"
#include "slice.hpp"

namespace tz {

std::shared_ptr<Lane> PoolLane::make(const LaneOptions& options, Sink& sink) {
    auto lane = std::make_shared<PoolLane>(options, sink);
    try {
        // A thread holds the lane: one that the kernel never lets go must not find it gone.
        for (unsigned i = 0; i < options.threads; ++i) lane->threads_.emplace_back([lane] { lane->work(); });
    } catch (...) {
        lane->stop(std::chrono::hours(1));
        throw;
    }
    return lane;
}

void PoolLane::submit(Piece* chain) {
    const bool several = chain->next != nullptr;
    {
        std::lock_guard lock(mutex_);
        queue_.push_chain(chain);
    }
    if (several)
        wake_.notify_all();
    else
        wake_.notify_one();
}

void PoolLane::work() {
    name_thread("tz-io");
    run_on_node(options_.node);
    std::unique_ptr<Slab> bounce;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return queue_.empty() ? stop_ : !pacing_; });
        Piece* const piece = queue_.pop();
        if (piece == nullptr) return;
        ++busy_;
        if (!sink_.moot(*piece)) pace(*piece, lock);
        lock.unlock();
        std::optional<IoError> error;
        if (!sink_.moot(*piece)) {
            try {
                if (piece->bounce) {
                    if (!bounce) bounce = std::make_unique<Slab>(kBounce);
                    piece->block = bounce->data();
                }
                move(*piece);
            } catch (const IoFailure& failure) {
                error = failure.error;
            } catch (const std::exception& other) {
                error = IoError{ENOMEM, other.what(), piece->member->path()};
            }
        }
        finished(*piece);
        sink_.ended(*piece, std::move(error));
        lock.lock();
        --busy_;
        idle_.notify_all();
    }
}

void PoolLane::pace(Piece& piece, std::unique_lock<std::mutex>& lock) {
    std::int64_t left = wait_for_limit(piece);
    if (left == 0) return;
    pacing_ = true;
    lock.unlock();
    for (; left > 0; left = wait_for_limit(piece))
        std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    lock.lock();
    pacing_ = false;
    wake_.notify_all();
}

void PoolLane::move(Piece& piece) {
    prepare(piece);
    piece.since.store(steady_now(), std::memory_order_relaxed);
    for (;;) {
        const Wish want = wish(piece);
        const auto at = static_cast<off_t>(want.offset);
        const int fd = piece.member->fd();
        const ssize_t result = piece.op == Op::read ? options_.calls.pread(fd, want.data, want.n, at)
                                                    : options_.calls.pwrite(fd, want.data, want.n, at);
        Step step = advance(piece, result < 0 ? -errno : result, counts_);
        if (step.error) throw IoFailure(std::move(*step.error));
        if (step.next == Next::finished) return;
        if (step.next == Next::later) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

bool PoolLane::stop(std::chrono::nanoseconds patience) {
    bool stuck = false;
    {
        std::unique_lock lock(mutex_);
        stop_ = true;
        wake_.notify_all();
        stuck = !idle_.wait_for(lock, patience, [this] { return busy_ == 0 && queue_.empty(); });
    }
    for (auto& thread : threads_) {
        if (stuck)
            thread.detach();
        else
            thread.join();
    }
    threads_.clear();
    return !stuck;
}

}  // namespace tz
