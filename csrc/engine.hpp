// A pool of threads doing pread and pwrite, several block-sized pieces of a request at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "error.hpp"
#include "file.hpp"
#include "ticket.hpp"
#include "transfer.hpp"

namespace tz {

struct Counters {
    std::uint64_t bytes_read = 0, bytes_written = 0;  // really transferred, padding included
    std::uint64_t reads = 0, writes = 0;              // requests, not pieces
};

class Engine {
  public:
    // Called once, on an I/O thread, with the first error or nullptr.
    using Done = std::function<void(const IoError*)>;

    // `block`: bytes of a piece, a multiple of 4096. std::invalid_argument for sizes out of range.
    Engine(unsigned threads, std::size_t block, const SysCalls& calls = SysCalls::real());
    ~Engine();  // drains

    // Queues a transfer of n bytes. The memory stays the caller's until the ticket is done.
    // std::invalid_argument: closed engine or file, or an offset that the file's alignment forbids.
    std::shared_ptr<Ticket> transfer(Op op, const File& file, std::uint64_t offset, char* data,
                                     std::size_t n);

    // The same without a ticket, for users inside the library that hold an open ticket meanwhile.
    void submit(Op op, std::shared_ptr<const OpenFile> file, std::uint64_t offset, char* data, std::size_t n,
                Done done);

    const std::shared_ptr<CompletionQueue>& completions() const noexcept { return completions_; }
    Counters counters() const;
    void close();  // waits for every open ticket, then ends the threads; idempotent
    bool foreign() const noexcept { return completions_->foreign(); }

  private:
    struct Request {
        Op op;
        std::shared_ptr<const OpenFile> file;
        std::uint64_t offset;
        char* data;
        std::size_t size;
        Done done;
        std::size_t next = 0;   // bytes handed to threads so far
        std::size_t moved = 0;  // bytes whose piece has ended
        std::optional<IoError> error;
    };
    void work();

    const SysCalls calls_;
    const std::size_t block_;
    const std::shared_ptr<CompletionQueue> completions_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Request>> queue_;
    bool stop_ = false;
    std::atomic<std::uint64_t> bytes_read_{0}, bytes_written_{0}, reads_{0}, writes_{0};
    std::mutex closing_;
    std::vector<std::thread> threads_;
};

}  // namespace tz
