// The streamed step: read chunk i+1, update chunk i and write chunk i-1 at the same time, over record after
// record.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "appetite.hpp"
#include "chunk_crew.hpp"
#include "engine.hpp"
#include "record.hpp"
#include "ticket.hpp"

namespace tz {

class Stepper {
  public:
    // `buffers` (4096-aligned) is cut into slots: a chunk of `format`, at most which every record's may take,
    // and 2 bytes of parameter copy per element. `chunk`: elements, a multiple of 2048. std::invalid_argument
    // names the bytes that at least 3 slots need.
    Stepper(std::shared_ptr<Engine> engine, char* buffers, std::size_t nbytes, std::uint64_t chunk,
            unsigned threads, const StateFormat& format = {});
    ~Stepper();  // drains

    // Checks the record and queues it. Its memory and files stay in use until the ticket is released.
    // IoFailure(ETIMEDOUT) while the drive does not answer.
    // `updated`: becomes a ticket that is done as soon as everything is computed, parameters in memory
    // included, though not written yet; it fails where the record does before that.
    std::shared_ptr<Ticket> submit(Record record, std::shared_ptr<Ticket>* updated = nullptr);
    // Finishes what was queued, then ends the thread; idempotent. False when the drive keeps some of the
    // buffers: then this object must be kept for ever.
    bool close();
    const StateFormat& format() const noexcept { return format_; }
    std::uint64_t state_bytes(const Record& record) const { return record.state_bytes(chunk_); }
    bool foreign() const noexcept { return engine_->foreign(); }
    // Slots that are kept in use at present; 0 in a forked process.
    std::size_t appetite() const;

  private:
    struct Job {
        Record record;
        std::shared_ptr<Ticket> ticket, updated;  // the second may be null
        std::uint64_t next = 0;                   // chunks handed to slots so far
        std::uint64_t computed = 0;
        std::uint64_t ended = 0;  // chunks that are through
        std::optional<IoError> error;
        Sums sums;
        Outcome::Span reads, computes, writes;
    };
    // A slot's life: free -> filling (being read) -> ready -> computed -> draining (being written) -> free.
    struct Slot {
        char* memory = nullptr;
        Job* job = nullptr;
        ChunkView chunk;
        int pending = 0;  // reads or writes in flight
        bool filled = false;
    };

    void run();
    bool hungry() const;
    bool can_fill() const;
    void fill();
    bool can_compute() const;
    void compute(std::unique_lock<std::mutex>& lock);
    void drain(Slot& slot);
    void transfer(Op op, Slot& slot, const Place& place, std::uint64_t at, char* data, std::size_t n);
    void ended(Op op, Slot& slot, const IoError* error);
    void late(const IoError& error);
    static Outcome::Span& span(Op op, Job& job) { return op == Op::read ? job.reads : job.writes; }
    void release(Slot& slot);
    void skip_rest(Job& job);
    void finish();

    const std::shared_ptr<Engine> engine_;
    const std::uint64_t chunk_, state_bytes_;  // elements; bytes of state in a slot
    const StateFormat format_;
    char* const buffers_;
    const std::size_t buffers_size_;
    ChunkCrew crew_;

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::list<Job> jobs_;  // in order: all handed out, then the rest
    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::deque<Slot*> ready_;  // filling or filled, in order
    bool stop_ = false;
    Appetite appetite_;
    std::size_t reading_ = 0;  // slots being read
    int overdue_ = 0;          // transfers that the drive does not answer
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace tz
