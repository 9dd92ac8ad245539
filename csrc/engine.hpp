// The I/O engine: cuts requests into pieces, gives each drive's pieces to that drive's lane, and keeps the
// deadlines.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "error.hpp"
#include "file.hpp"
#include "piece.hpp"
#include "ticket.hpp"

namespace tz {

class Lanes;
class Active;

enum class EngineKind { automatic, uring, pool };

struct EngineOptions {
    EngineKind kind = EngineKind::automatic;
    std::size_t block = 4 << 20;  // bytes of a piece, a multiple of 4096; the kernel may split larger ones
    unsigned depth = 32;          // blocks in flight per drive
    unsigned threads = 0;         // of a pool, per drive; 0: depth, at most 16
    std::chrono::nanoseconds deadline = std::chrono::seconds(60);
    std::uint64_t limit = 0;  // bytes per second of each drive, reads and writes together; 0: none
    SysCalls calls = SysCalls::real();
};

struct Counters {
    std::uint64_t bytes_read = 0, bytes_written = 0;  // really transferred, padding included
    std::uint64_t reads = 0, writes = 0;              // requests, not pieces
    // Nanoseconds in which at least one request was under way: a read, a write, any.
    std::uint64_t read_ns = 0, write_ns = 0, busy_ns = 0;
};

struct DriveInfo {
    std::string device;  // "254:0"
    std::string engine;  // "uring" or "pool"
    std::string reason;  // why not io_uring, where it was wanted
    bool direct = false, fixed_files = false, fixed_buffers = false;
    std::vector<std::string> flags;
    int node = -1;
    std::uint64_t bytes_read = 0, bytes_written = 0;
};

class Engine {
  public:
    // Called once, on an I/O thread, with the first error or nullptr: the memory is the caller's again.
    using Done = std::function<void(const IoError*)>;
    // Called at most once and before Done: the deadline is over, and the memory is still the kernel's.
    using Late = std::function<void(const IoError&)>;

    // std::invalid_argument for options out of range; IoFailure where io_uring is demanded and does not work.
    explicit Engine(const EngineOptions& options);
    ~Engine();  // drains

    // Queues a transfer of n bytes. The memory stays the caller's until the ticket is released.
    // std::invalid_argument: closed engine or file, or an offset that the file's alignment forbids.
    std::shared_ptr<Ticket> transfer(Op op, const File& file, std::uint64_t offset, char* data,
                                     std::size_t n);

    // The same without a ticket, for users inside the library that hold an open ticket meanwhile. Throws
    // (std::bad_alloc, IoFailure) before anything is queued, or not at all.
    void submit(Op op, std::shared_ptr<const OpenFile> file, std::uint64_t offset, char* data, std::size_t n,
                Done done, Late late);

    // Makes [data, data + n) known to the kernel, for cheaper requests; false where it cannot be.
    // std::invalid_argument in a forked child, as for counters() and drives().
    bool fix(char* data, std::size_t n);
    void unfix(char* data);

    const std::shared_ptr<CompletionQueue>& completions() const noexcept { return completions_; }
    const EngineOptions& options() const noexcept { return options_; }
    const char* name() const noexcept;           // "uring" or "pool": what direct I/O goes through
    const std::string& reason() const noexcept;  // why not io_uring, if it was not forbidden
    Counters counters() const;
    std::vector<DriveInfo> drives() const;
    void close();  // waits for every open ticket, then ends the threads; idempotent
    bool foreign() const noexcept { return completions_->foreign(); }

  private:
    void refuse_child() const;

    const EngineOptions options_;
    const std::shared_ptr<CompletionQueue> completions_;
    std::shared_ptr<Active> active_;
    std::shared_ptr<Lanes> lanes_;
    std::atomic<std::uint64_t> reads_{0}, writes_{0};
    std::mutex closing_;
    std::atomic<bool> closed_{false};
};

}  // namespace tz
