#include "engine.hpp"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>

#include "align.hpp"

namespace tz {

Engine::Engine(unsigned threads, std::size_t block, const SysCalls& calls)
    : calls_(calls), block_(block), completions_(std::make_shared<CompletionQueue>()) {
    if (threads < 1 || threads > 256)
        throw std::invalid_argument("an I/O engine takes 1 to 256 threads, not " + std::to_string(threads));
    if (block < kPage || block % kPage != 0 || block > (std::size_t{1} << 30))
        throw std::invalid_argument("an I/O block is a multiple of 4096 up to 1 GiB, not " +
                                    std::to_string(block));
    threads_.reserve(threads);
    try {
        for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
        close();
        throw;
    }
}

Engine::~Engine() {
    close();
    completions_->reap();  // unread tickets and their queue hold each other
}

std::shared_ptr<Ticket> Engine::transfer(Op op, const File& file, std::uint64_t offset, char* data,
                                         std::size_t n) {
    auto open = file.open();
    if (offset % open->alignment != 0)
        throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of " +
                                    std::to_string(open->alignment) + ", as direct I/O needs: " + open->path);
    const auto limit = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - kPage;
    if (offset > limit || n > limit - offset)
        throw std::invalid_argument("offset " + std::to_string(offset) + " + " + std::to_string(n) +
                                    " bytes is beyond the largest file: " + open->path);
    auto ticket = CompletionQueue::open_ticket(completions_);
    auto done = [home = completions_, ticket, n](const IoError* error) {
        Outcome outcome;
        outcome.bytes = n;
        home->complete(ticket, std::move(outcome), error ? std::optional<IoError>(*error) : std::nullopt);
    };
    try {
        submit(op, std::move(open), offset, data, n, done);
    } catch (const std::bad_alloc&) {
        const IoError error{ENOMEM, "no memory to queue the request", file.path()};
        done(&error);
    }
    return ticket;
}

void Engine::submit(Op op, std::shared_ptr<const OpenFile> file, std::uint64_t offset, char* data,
                    std::size_t n, Done done) {
    (op == Op::read ? reads_ : writes_).fetch_add(1, std::memory_order_relaxed);
    if (n == 0) return done(nullptr);
    auto request = std::make_shared<Request>();
    request->op = op;
    request->file = std::move(file);
    request->offset = offset;
    request->data = data;
    request->size = n;
    request->done = std::move(done);
    {
        std::lock_guard lock(mutex_);
        queue_.push_back(std::move(request));
    }
    if (n > block_)
        wake_.notify_all();
    else
        wake_.notify_one();
}

void Engine::work() {
    Mover mover(calls_, block_, bytes_read_, bytes_written_);
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        std::shared_ptr<Request> request = queue_.front();
        const std::size_t from = request->next;
        const std::size_t n = std::min(block_, request->size - from);
        request->next += n;
        if (request->next == request->size) queue_.pop_front();
        const bool skip = request->error.has_value();  // an earlier piece failed: the rest is moot
        lock.unlock();

        std::optional<IoError> error;
        if (!skip) {
            try {
                mover.move(request->op, *request->file, request->offset + from, request->data + from, n);
            } catch (const IoFailure& failure) {
                error = failure.error;
            } catch (const std::exception& other) {
                error = IoError{ENOMEM, other.what(), request->file->path};
            }
        }

        lock.lock();
        if (error && !request->error) request->error = std::move(error);
        request->moved += n;
        if (request->moved == request->size) {
            lock.unlock();
            request->done(request->error ? &*request->error : nullptr);
            request.reset();
            lock.lock();
        }
    }
}

Counters Engine::counters() const {
    return {bytes_read_.load(), bytes_written_.load(), reads_.load(), writes_.load()};
}

void Engine::close() {
    std::lock_guard once(closing_);
    completions_->refuse_new();
    completions_->wait_idle();
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_)
        if (thread.joinable()) thread.join();
    threads_.clear();
}

}  // namespace tz
