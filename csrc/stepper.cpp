#include "stepper.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "align.hpp"
#include "lane.hpp"
#include "slice.hpp"

namespace tz {

namespace {

constexpr std::uint64_t kMinSlots = 3, kMostSlots = 1024;
// Reads in flight, or a third of the slots in use if that is more: drives serve all that they are given side
// by side, so more of them would come later and not sooner, and what is wanted first would wait behind.
constexpr std::size_t kMinReads = 4;

std::uint64_t checked_chunk(std::uint64_t chunk) {
    if (chunk == 0 || chunk % 2048 != 0 || chunk > (std::uint64_t{1} << 40))
        throw std::invalid_argument("chunk must be a positive multiple of 2048 elements, not " +
                                    std::to_string(chunk));
    return chunk;
}

}  // namespace

Stepper::Stepper(std::shared_ptr<Engine> engine, char* buffers, std::size_t nbytes, std::uint64_t chunk,
                 unsigned threads, const StateFormat& format)
    : engine_(std::move(engine)),
      chunk_(checked_chunk(chunk)),
      state_bytes_(format.chunk_bytes(chunk)),
      format_(format),
      buffers_(buffers),
      buffers_size_(nbytes),
      crew_(threads),
      appetite_(std::clamp<std::size_t>(nbytes / (state_bytes_ + 2 * chunk), 1, kMostSlots)) {
    if (!is_aligned(buffers, kPage)) throw std::invalid_argument("buffers must start at a multiple of 4096");
    const std::size_t slot_bytes = state_bytes_ + 2 * chunk;
    if (nbytes / slot_bytes < kMinSlots)
        throw std::invalid_argument("buffers of " + std::to_string(nbytes) +
                                    " bytes are too small: chunks of " + std::to_string(chunk) +
                                    " elements need " + std::to_string(kMinSlots * slot_bytes));
    if (engine_->foreign()) throw std::invalid_argument("the I/O engine belongs to the parent process");
    slots_.resize(std::min<std::size_t>(nbytes / slot_bytes, kMostSlots));
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        slots_[i].memory = buffers + i * slot_bytes;
        free_.push_back(&slots_[i]);
    }
    engine_->fix(buffers, slots_.size() * slot_bytes);
    try {
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        engine_->unfix(buffers);
        throw;
    }
}

Stepper::~Stepper() {
    close();
}

std::shared_ptr<Ticket> Stepper::submit(Record record, std::shared_ptr<Ticket>* updated) {
    if (record.format.chunk_bytes(chunk_) > state_bytes_)
        throw std::invalid_argument("the record's state format has " +
                                    std::to_string(record.format.chunk_bytes(chunk_)) +
                                    " bytes a chunk, the stepper's buffers " + std::to_string(state_bytes_));
    check_record(record, chunk_);
    const auto hits = [this](const void* p, std::size_t n) { return overlap(p, n, buffers_, buffers_size_); };
    if (hits(record.grads, record.grads_size) || hits(record.out, record.out_size) ||
        hits(record.params, record.params ? record.out_size : 0) ||
        hits(record.state, record.state ? record.state_bytes(chunk_) : 0))
        throw std::invalid_argument("grads, state, out or params lie in the stepper's own buffers");
    if (foreign())
        throw std::invalid_argument("the stepper belongs to the parent process; make a new one after fork");
    std::list<Job> one;  // made before the ticket: nothing may fail once that is open
    one.emplace_back();
    one.back().record = std::move(record);
    std::lock_guard lock(mutex_);
    if (stop_) throw std::invalid_argument("the stepper is closed");
    if (overdue_)
        throw IoFailure(ETIMEDOUT,
                        "no update can start while the drive does not answer earlier requests: check it",
                        one.back().record.src ? one.back().record.src->file->path() : "");
    auto ticket = CompletionQueue::open_ticket(engine_->completions());
    one.back().ticket = ticket;
    if (updated != nullptr) {
        try {
            one.back().updated = *updated = CompletionQueue::open_ticket(engine_->completions());
        } catch (...) {
            engine_->completions()->complete(ticket, {}, std::nullopt);  // nobody has it
            throw;
        }
    }
    // In front of those that are due later, even half finished ones: what is left of them can wait.
    auto place = jobs_.end();
    while (place != jobs_.begin()) {
        const auto before = std::prev(place);
        if (before->record.due <= one.back().record.due || before->next == before->record.chunks(chunk_) ||
            share(before->record, one.back().record, chunk_))
            break;
        place = before;
    }
    jobs_.splice(place, one);
    wake_.notify_all();
    return ticket;
}

bool Stepper::close() {
    std::lock_guard once(closing_);
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
        crew_.stop();
        engine_->unfix(buffers_);
    }
    std::lock_guard lock(mutex_);
    return jobs_.empty();
}

void Stepper::run() {
    name_thread("tz-step");
    set_slice(kBackgroundSlice);
    std::unique_lock lock(mutex_);
    for (;;) {
        const auto over = [this] { return stop_ && (jobs_.empty() || overdue_); };
        if (hungry() && !can_fill()) appetite_.starved();
        wake_.wait(lock, [&] { return can_fill() || can_compute() || over(); });
        if (over()) return;
        // Reads go out first: they have the longest way to come.
        if (can_fill())
            fill();
        else
            compute(lock);
    }
}

// Whether one more slot should be filled, if there is something to fill it with.
bool Stepper::hungry() const {
    return slots_.size() - free_.size() < appetite_.limit() &&
           reading_ < std::max(kMinReads, appetite_.limit() / 3);
}

std::size_t Stepper::appetite() const {
    if (foreign()) return 0;  // the mutex may have been held when the process forked
    std::lock_guard lock(mutex_);
    return appetite_.limit();
}

bool Stepper::can_fill() const {
    if (slots_.size() - free_.size() >= appetite_.limit()) return false;
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
        if (job->next == job->record.chunks(chunk_)) continue;
        const bool reads = job->record.src && !job->error;
        if (reads && !hungry()) return false;
        // The first job with chunks left. It may start while earlier ones are being written, unless they
        // share bytes.
        return job->next != 0 || std::none_of(jobs_.begin(), job, [&](const Job& earlier) {
                   return conflicts(job->record, earlier.record, chunk_);
               });
    }
    return false;
}

void Stepper::fill() {
    const auto job = std::find_if(jobs_.begin(), jobs_.end(),
                                  [this](const Job& j) { return j.next != j.record.chunks(chunk_); });
    const Record& record = job->record;
    if (job->error && record.src) return skip_rest(*job);
    Slot& slot = *free_.back();
    free_.pop_back();
    slot.job = &*job;
    slot.filled = false;
    ChunkView& chunk = slot.chunk;
    chunk = {};
    chunk.begin = job->next * chunk_;
    chunk.count = std::min(chunk_, record.elements - chunk.begin);
    chunk.layout = record.format.layout(chunk.count);
    chunk.offset = (chunk.begin / chunk_) * record.format.chunk_bytes(chunk_);
    chunk.state = record.state ? record.state + chunk.offset : slot.memory;
    if (record.out_file && chunk.begin + chunk.count > record.out_first) {
        chunk.copy = slot.memory + state_bytes_;
        chunk.copy_begin = std::max(chunk.begin, record.out_first);
    }
    ++job->next;
    ready_.push_back(&slot);
    if (record.src) {
        ++reading_;
        transfer(Op::read, slot, *record.src, chunk.offset, slot.memory, chunk.layout.bytes);
    } else {
        slot.filled = true;
    }
}

bool Stepper::can_compute() const {
    return std::any_of(ready_.begin(), ready_.end(), [](const Slot* slot) { return slot->filled; });
}

void Stepper::compute(std::unique_lock<std::mutex>& lock) {
    const auto first =
        std::find_if(ready_.begin(), ready_.end(), [](const Slot* slot) { return slot->filled; });
    Slot& slot = **first;
    ready_.erase(first);
    Job& job = *slot.job;
    // A failed record on file is dropped whole; one in memory is finished, so that it is not left half
    // updated.
    if (job.error && job.record.src) return release(slot);
    lock.unlock();
    job.computes.begins(steady_now());
    const Sums sums = crew_.update(job.record, slot.chunk);
    job.computes.end = steady_now();
    lock.lock();
    job.sums.state += sums.state;
    job.sums.copy += sums.copy;
    if (job.error && job.record.src) return release(slot);
    if (++job.computed == job.record.chunks(chunk_) && job.updated)
        engine_->completions()->complete(job.updated, {}, std::nullopt);
    drain(slot);
}

void Stepper::drain(Slot& slot) {
    const Record& record = slot.job->record;
    const ChunkView& chunk = slot.chunk;
    ++slot.pending;  // this call's own, so that the slot is not released between the two writes
    if (record.dst) {
        std::memset(slot.memory + chunk.layout.used, 0, chunk.layout.bytes - chunk.layout.used);
        transfer(Op::write, slot, *record.dst, chunk.offset, slot.memory, chunk.layout.bytes);
    }
    if (chunk.copy != nullptr) {
        const std::uint64_t at = 2 * (chunk.copy_begin - record.out_first);
        const std::uint64_t filled = 2 * (chunk.begin + chunk.count - chunk.copy_begin);
        if (at < record.out_bytes) {
            const std::uint64_t n = round_up(std::min(filled, record.out_bytes - at), kPage);
            if (n > filled) std::memset(chunk.copy + filled, 0, n - filled);
            transfer(Op::write, slot, *record.out_file, at, chunk.copy, n);
        }
    }
    if (--slot.pending == 0) release(slot);
}

// Queues one transfer; its end comes back through ended(), on an I/O thread. The mutex is held.
void Stepper::transfer(Op op, Slot& slot, const Place& place, std::uint64_t at, char* data, std::size_t n) {
    ++slot.pending;
    span(op, *slot.job).begins(steady_now());
    // `overdue`: shared by the two calls, which come one after the other
    try {
        auto overdue = std::make_shared<bool>(false);
        const auto done = [this, op, &slot, overdue](const IoError* error) {
            std::lock_guard lock(mutex_);
            if (*overdue) --overdue_;
            ended(op, slot, error);
            wake_.notify_all();
        };
        const auto too_late = [this, overdue](const IoError& error) {
            std::lock_guard lock(mutex_);
            *overdue = true;
            late(error);
            wake_.notify_all();
        };
        engine_->submit(op, place.file, place.offset + at, data, n, done, too_late);
    } catch (const IoFailure& failure) {
        ended(op, slot, &failure.error);
    } catch (const std::bad_alloc&) {
        const IoError error{ENOMEM, "no memory to queue a transfer", place.file->path()};
        ended(op, slot, &error);
    }
}

void Stepper::ended(Op op, Slot& slot, const IoError* error) {
    Job& job = *slot.job;
    if (error && !job.error) job.error = *error;
    --slot.pending;
    span(op, job).end = steady_now();
    if (op == Op::read) {
        --reading_;
        slot.filled = true;
    } else if (slot.pending == 0) {
        release(slot);
    }
}

// The drive keeps a slot: what needs it cannot be relied on to go on, so everybody is told. A record in
// memory that was not begun is dropped, for whoever hears of it may submit it again; one that was needs no
// drive and is finished, lest it be done twice.
void Stepper::late(const IoError& error) {
    ++overdue_;
    for (Job& job : jobs_) {
        if (!job.record.src) {
            if (job.next != 0 && !job.record.out_file) continue;
            if (job.next == 0) job.next = job.ended = job.record.chunks(chunk_);
        }
        if (!job.error) job.error = error;
        Outcome outcome;
        outcome.record = true;
        if (job.updated) engine_->completions()->complete(job.updated, {}, job.error);
        engine_->completions()->complete(job.ticket, std::move(outcome), job.error, false);
    }
    finish();
}

void Stepper::release(Slot& slot) {
    Job& job = *slot.job;
    if (job.record.src && job.record.dst && !job.error)
        appetite_.moved(2 * slot.chunk.layout.bytes, steady_now());
    slot.job = nullptr;
    free_.push_back(&slot);
    ++job.ended;
    finish();
}

void Stepper::skip_rest(Job& job) {
    const std::uint64_t total = job.record.chunks(chunk_);
    job.ended += total - job.next;
    job.next = total;
    finish();
}

// Completes the jobs that are over: in order, unless the drive keeps one of them.
void Stepper::finish() {
    for (auto at = jobs_.begin(); at != jobs_.end();) {
        if (at->ended != at->record.chunks(chunk_)) {
            if (overdue_ == 0) return;
            ++at;
            continue;
        }
        Job job = std::move(*at);
        at = jobs_.erase(at);
        Outcome outcome;
        outcome.record = true;
        if (job.record.dst) outcome.state = job.sums.state;
        if (job.record.out_file) outcome.copy = job.sums.copy;
        outcome.reads = job.reads;
        outcome.computes = job.computes;
        outcome.writes = job.writes;
        if (job.updated) engine_->completions()->complete(job.updated, {}, job.error);
        engine_->completions()->complete(job.ticket, std::move(outcome), std::move(job.error));
    }
}

}  // namespace tz
