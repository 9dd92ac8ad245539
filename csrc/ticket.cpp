#include "ticket.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace tz {

bool Ticket::wait(std::optional<std::chrono::nanoseconds> timeout) const {
    if (done()) return true;
    if (home_->foreign())
        throw std::runtime_error(
            "this request belongs to the parent process; wait for it there, not in a forked child");
    std::unique_lock lock(home_->mutex_);
    const auto is_done = [this] { return done(); };
    if (!timeout) {
        home_->changed_.wait(lock, is_done);
        return true;
    }
    return home_->changed_.wait_for(lock, *timeout, is_done);
}

const Outcome& Ticket::outcome() const {
    if (error_) throw IoFailure(*error_);
    return outcome_;
}

CompletionQueue::CompletionQueue() : owner_(getpid()), eventfd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (eventfd_ < 0) {
        const int code = errno;
        throw IoFailure(code, "cannot make an eventfd: " + errno_text(code), "");
    }
}

CompletionQueue::~CompletionQueue() {
    ::close(eventfd_);
}

bool CompletionQueue::foreign() const noexcept {
    return getpid() != owner_;
}

std::shared_ptr<Ticket> CompletionQueue::open_ticket(const std::shared_ptr<CompletionQueue>& self) {
    if (self->foreign())
        throw std::invalid_argument(
            "the I/O engine belongs to the parent process; make a new one after fork");
    auto ticket = std::make_shared<Ticket>(self);
    std::lock_guard lock(self->mutex_);
    if (self->refusing_) throw std::invalid_argument("the I/O engine is closed");
    self->finished_.reserve(self->finished_.size() + self->outstanding_ +
                            1);  // completing must not fail for memory
    ++self->outstanding_;
    return ticket;
}

void CompletionQueue::complete(const std::shared_ptr<Ticket>& ticket, Outcome outcome,
                               std::optional<IoError> error, bool released) {
    std::lock_guard lock(mutex_);
    if (released) ticket->released_.store(true, std::memory_order_release);
    if (ticket->done()) return;
    ticket->outcome_ = std::move(outcome);
    ticket->error_ = std::move(error);
    ticket->done_.store(true, std::memory_order_release);
    finished_.push_back(ticket);
    --outstanding_;
    const std::uint64_t one = 1;
    // The counter cannot overflow and the write cannot block: it is only ever drained to zero.
    [[maybe_unused]] const auto written = ::write(eventfd_, &one, sizeof one);
    changed_.notify_all();
}

std::vector<std::shared_ptr<Ticket>> CompletionQueue::reap() {
    if (foreign()) throw std::invalid_argument("the I/O engine belongs to the parent process");
    std::uint64_t count = 0;
    std::lock_guard lock(mutex_);
    [[maybe_unused]] const auto got = ::read(eventfd_, &count, sizeof count);
    std::vector<std::shared_ptr<Ticket>> out;
    out.swap(finished_);
    finished_.reserve(outstanding_);
    return out;
}

void CompletionQueue::refuse_new() {
    std::lock_guard lock(mutex_);
    refusing_ = true;
}

void CompletionQueue::wait_idle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return outstanding_ == 0; });
}

}  // namespace tz
