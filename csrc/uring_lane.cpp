#include "uring_lane.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>

#include "numa.hpp"
#include "slice.hpp"

namespace tz {

using namespace uring;

namespace {

constexpr unsigned kEntries = 256;  // submissions
constexpr unsigned kFiles = 64, kBuffers = 64, kBounceBlocks = 16;
constexpr std::int64_t kMillisecond = 1'000'000;

}  // namespace

std::shared_ptr<UringLane> UringLane::make(const LaneOptions& options, Sink& sink, std::string& reason) {
    auto lane = std::make_shared<UringLane>(options, sink);
    lane->start(reason);
    return reason.empty() ? lane : nullptr;
}

UringLane::UringLane(const LaneOptions& options, Sink& sink) : Lane(options), sink_(sink) {}

UringLane::~UringLane() {
    if (eventfd_ >= 0) ::close(eventfd_);
}

void UringLane::start(std::string& reason) {
    eventfd_ = ::eventfd(0, EFD_CLOEXEC);
    if (eventfd_ < 0) {
        reason = "cannot make an eventfd: " + errno_text(errno);
        return;
    }
    for (int i = kFiles; i-- > 0;) free_slots_.push_back(i);
    buffers_.resize(kBuffers);
    later_.reserve(kMost);
    std::promise<std::string> ready;
    auto answer = ready.get_future();
    // The thread holds the lane: a request that the kernel never gives back must not find it gone.
    thread_ = std::thread([self = shared_from_this(), &ready] {
        std::string why;
        name_thread("tz-io");
        run_on_node(self->options_.node);
        self->ring_ = Ring::open(kEntries, why);  // here: the kernel binds a ring to the thread that made it
        if (self->ring_) {
            self->flags_ = self->ring_->flags();
            self->fixed_files_ = self->ring_->register_files(kFiles);
            self->fixed_buffers_ = self->ring_->register_buffers(kBuffers);
        }
        const bool works = self->ring_ != nullptr;
        ready.set_value(why);
        if (works) self->run();
    });
    reason = answer.get();
    if (!reason.empty()) thread_.join();
}

void UringLane::wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written =
        ::write(eventfd_, &one, sizeof one);  // cannot block: it is read at once
}

void UringLane::submit(Piece* chain) {
    Piece* last = chain;
    while (last->next) last = last->next;
    bool sleeping;
    {
        std::lock_guard lock(mutex_);
        *incoming_end_ = chain;
        incoming_end_ = &last->next;
        sleeping = std::exchange(asleep_, false);
    }
    if (sleeping) wake();
}

bool UringLane::order(std::function<void()> what) {
    if (getpid() != owner_) return false;  // a forked child closes a file: neither thread nor lock is its own
    bool sleeping;
    {
        std::lock_guard lock(mutex_);
        if (ended_) return false;
        orders_.push_back(std::move(what));
        sleeping = std::exchange(asleep_, false);
    }
    if (sleeping) wake();
    return true;
}

bool UringLane::stop(std::chrono::nanoseconds patience) {
    bool sleeping, stuck;
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
        sleeping = std::exchange(asleep_, false);
    }
    if (sleeping) wake();
    {
        std::unique_lock lock(mutex_);
        stuck = !changed_.wait_for(lock, patience, [this] { return ended_; });
    }
    if (!thread_.joinable()) return true;
    if (stuck)
        thread_.detach();
    else
        thread_.join();
    return !stuck;
}

void UringLane::run() {
    for (;;) {
        take_orders();
        if (stopping_ && queue_.empty() && in_flight_ == 0 && later_.empty() && !held_) break;
        fill();
        arm();
        {
            std::lock_guard lock(mutex_);
            if (incoming_ || !orders_.empty() || stop_ != stopping_) continue;
            asleep_ = true;
        }
        const int code = ring_->enter(patience());
        {
            std::lock_guard lock(mutex_);
            asleep_ = false;
        }
        reap();
        if (code != 0 && code != EINTR && code != EAGAIN && code != EBUSY) fail_everything(code);
        if (!later_.empty() && steady_now() >= later_at_) {
            for (Piece* piece : later_) queue_.push_front(piece);
            later_.clear();
        }
    }
    std::deque<std::function<void()>> last;
    {
        std::lock_guard lock(mutex_);
        ended_ = true;
        last.swap(orders_);
    }
    for (const auto& what : last) what();  // somebody may be waiting for them
    ring_.reset();
    changed_.notify_all();
}

void UringLane::take_orders() {
    std::deque<std::function<void()>> orders;
    {
        std::lock_guard lock(mutex_);
        queue_.push_chain(incoming_);
        incoming_ = nullptr;
        incoming_end_ = &incoming_;
        orders.swap(orders_);
        stopping_ = stop_;
    }
    if (!orders.empty()) hand_over();
    for (const auto& what : orders) what();
}

void UringLane::fill() {
    while ((held_ || !queue_.empty()) && room()) {
        Piece* const piece = held_ ? std::exchange(held_, nullptr) : queue_.pop();
        if (sink_.moot(*piece)) {
            end(*piece, std::nullopt);
            continue;
        }
        if (wait_for_limit(*piece) > 0) {
            held_ = piece;
            break;
        }
        if (!issue(*piece)) {
            queue_.push_front(piece);
            break;
        }
    }
}

std::int64_t UringLane::patience() const {
    const std::int64_t retry = later_.empty() ? -1 : kMillisecond;
    if (!held_ || !room()) return retry;
    const std::int64_t left = std::max<std::int64_t>(held_->due - steady_now(), 0);
    return retry < 0 ? left : std::min(left, retry);
}

// False when it must wait for a bounce block or a place in the ring.
bool UringLane::issue(Piece& piece) {
    if (piece.bounce && piece.block == nullptr) {
        if (!bounce_) {
            try {
                bounce_ = std::make_unique<Slab>(kBounce * kBounceBlocks);
            } catch (const std::exception& error) {
                end(piece, IoError{ENOMEM, error.what(), piece.member->path()});
                return true;
            }
            for (unsigned i = 0; i < kBounceBlocks; ++i)
                free_bounce_.push_back(bounce_->data() + i * kBounce);
        }
        if (free_bounce_.empty()) return false;
        piece.block = free_bounce_.back();
        free_bounce_.pop_back();
        prepare(piece);
    }
    Sqe* const sqe = ring_->next();
    if (sqe == nullptr) return false;
    const Wish want = wish(piece);
    const std::size_t n = std::min<std::size_t>(want.n, std::size_t{1} << 30);
    const int file = slot_of(*piece.member), buffer = buffer_of(want.data, n);
    const bool reading = piece.op == Op::read;
    sqe->opcode = buffer >= 0 ? (reading ? kOpReadFixed : kOpWriteFixed) : (reading ? kOpRead : kOpWrite);
    sqe->flags = file >= 0 ? kFixedFile : 0;
    sqe->fd = file >= 0 ? file : piece.member->fd();
    sqe->offset = want.offset;
    sqe->address = reinterpret_cast<std::uint64_t>(want.data);
    sqe->length = static_cast<std::uint32_t>(n);
    sqe->buffer_index = static_cast<std::uint16_t>(std::max(buffer, 0));
    sqe->user_data = reinterpret_cast<std::uint64_t>(&piece);
    if (piece.since.load(std::memory_order_relaxed) == Piece::kQueued)
        piece.since.store(steady_now(), std::memory_order_relaxed);
    ++in_flight_;
    bytes_in_flight_ += piece.size;
    return true;
}

// Keeps a read of the eventfd in the ring, so that other threads can end the wait.
void UringLane::arm() {
    if (armed_) return;
    Sqe* const sqe = ring_->next();
    if (sqe == nullptr) return;
    sqe->opcode = kOpRead;
    sqe->fd = eventfd_;
    sqe->address = reinterpret_cast<std::uint64_t>(&wakeups_);
    sqe->length = sizeof wakeups_;
    sqe->user_data = 0;
    armed_ = true;
}

void UringLane::reap() {
    Cqe batch[64];
    while (const unsigned n = ring_->reap(batch, std::size(batch)))
        for (unsigned i = 0; i < n; ++i) {
            if (batch[i].user_data == 0) {
                armed_ = false;
                continue;
            }
            Piece& piece = *reinterpret_cast<Piece*>(batch[i].user_data);
            ssize_t result = batch[i].result;
            if (options_.calls.completion) result = options_.calls.completion(piece.op, result);
            if (result == SysCalls::kLost) continue;
            completed(piece, result);
        }
}

void UringLane::completed(Piece& piece, ssize_t result) {
    --in_flight_;
    bytes_in_flight_ -= piece.size;
    Step step = advance(piece, result, counts_);
    if (step.next == Next::finished)
        end(piece, std::move(step.error));
    else if (step.next == Next::again)
        queue_.push_front(&piece);
    else {
        if (later_.empty()) later_at_ = steady_now() + kMillisecond;
        later_.push_back(&piece);
    }
}

void UringLane::end(Piece& piece, std::optional<IoError> error) {
    if (piece.block) free_bounce_.push_back(std::exchange(piece.block, nullptr));
    finished(piece);
    sink_.ended(piece, std::move(error));
}

// The ring itself fails (it should not): whatever has not been submitted ends with the error.
void UringLane::fail_everything(int code) {
    if (held_) queue_.push_front(std::exchange(held_, nullptr));
    while (Piece* const piece = queue_.pop())
        end(*piece,
            IoError{code, describe(*piece) + ": io_uring_enter: " + errno_text(code), piece->member->path()});
    std::this_thread::sleep_for(std::chrono::nanoseconds(kMillisecond));
}

}  // namespace tz
