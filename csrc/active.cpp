#include "active.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "align.hpp"
#include "slice.hpp"

namespace tz {

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::size_t kShown = 8;  // pieces in a dump

std::string seconds(std::int64_t nanoseconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) / kSecond);
    return text;
}

// Calls emit(member, offset there, byte of the request, bytes, bounce) for each piece.
template <class Emit>
void for_each_piece(const Request& request, const char* data, std::size_t block, Emit emit) {
    for (std::size_t at = 0; at < request.size;) {
        const auto run = request.file->map.first_run(request.offset + at, request.size - at);
        const Member& member = *request.file->members[run.member];
        const std::size_t end = at + run.length;
        std::uint64_t offset = run.offset;
        while (at < end) {
            const bool aligned = !member.direct() || is_aligned(data + at, kPage);
            const std::size_t whole = member.direct() ? round_down(end - at, kPage) : end - at;
            const bool bounce = !aligned || whole == 0;
            const std::size_t n = bounce ? std::min(end - at, kBounce) : std::min(whole, block);
            emit(member, offset, at, n, bounce);
            at += n;
            offset += n;
        }
    }
}

}  // namespace

void cut(Request& request, char* data, std::size_t block) {
    std::size_t count = 0;
    for_each_piece(request, data, block,
                   [&](const Member&, std::uint64_t, std::size_t, std::size_t, bool) { ++count; });
    request.pieces = std::make_unique<Piece[]>(count);
    request.count = request.left = count;
    Piece* piece = request.pieces.get();
    const std::int64_t now = steady_now();
    for_each_piece(
        request, data, block,
        [&](const Member& member, std::uint64_t offset, std::size_t at, std::size_t n, bool bounce) {
            piece->op = request.op;
            piece->member = &member;
            piece->request = &request;
            piece->offset = offset;
            piece->data = data + at;
            piece->size = n;
            piece->bounce = bounce;
            piece->queued = now;
            ++piece;
        });
}

Active::Active(std::chrono::nanoseconds deadline) : deadline_(deadline.count()) {
    thread_ = std::thread([this] { watch(); });
}

Active::~Active() {
    stop();
}

void Active::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
}

bool Active::empty() const {
    std::lock_guard lock(mutex_);
    return requests_.empty();
}

void Active::add_busy(Counters& sum) const {
    std::lock_guard lock(mutex_);
    const std::int64_t now = steady_now();
    sum.read_ns += busy_[0].total(now);
    sum.write_ns += busy_[1].total(now);
    sum.busy_ns += busy_[2].total(now);
}

void Active::refuse_behind_late_writes(const OpenFile& file) const {
    if (late_writes_.load(std::memory_order_relaxed) == 0) return;
    std::lock_guard lock(mutex_);
    for (const auto& request : requests_)
        if (request->told_late && request->op == Op::write && request->file->same_file(file))
            throw IoFailure(ETIMEDOUT,
                            "nothing can be written while the write of " + std::to_string(request->size) +
                                " bytes at offset " + std::to_string(request->offset) +
                                " is overdue and may still land: check the drive",
                            file.path());
}

void Active::add(std::shared_ptr<Request> request) {
    std::list<std::shared_ptr<Request>> one;
    one.push_back(std::move(request));
    one.front()->place = one.begin();
    std::lock_guard lock(mutex_);
    const std::int64_t now = one.front()->queued = steady_now();
    busy_[one.front()->op == Op::read ? 0 : 1].begin(now);
    busy_[2].begin(now);
    if (requests_.empty()) wake_.notify_all();
    requests_.splice(requests_.end(), one);
}

bool Active::moot(const Piece& piece) const noexcept {
    return piece.request->failed.load(std::memory_order_relaxed);
}

void Active::ended(Piece& piece, std::optional<IoError> error) noexcept {
    std::shared_ptr<Request> request;
    {
        std::lock_guard lock(mutex_);
        Request& owner = *piece.request;
        if (error && !owner.error) {
            owner.error = std::move(error);
            owner.failed.store(true, std::memory_order_relaxed);
        }
        if (--owner.left != 0) return;
        const std::int64_t now = steady_now();
        busy_[owner.op == Op::read ? 0 : 1].end(now);
        busy_[2].end(now);
        request = std::move(*owner.place);
        requests_.erase(owner.place);
        if (request->told_late && request->op == Op::write) --late_writes_;
    }
    std::lock_guard telling(request->telling);
    request->told_done = true;
    request->done(request->error ? &*request->error : nullptr);
}

bool Active::overdue(const Piece& piece, std::int64_t now) const {
    const std::int64_t since = piece.since.load(std::memory_order_relaxed);
    if (since == Piece::kEnded) return false;
    if (since != Piece::kQueued) return now - since > deadline_;
    // A queue may be long; it is stuck when the lane has ended nothing for so long.
    return now - std::max(piece.request->queued, piece.lane->last_end()) > deadline_;
}

IoError Active::late_error(const Piece& piece, std::int64_t now) const {
    const auto age = [now](const Piece& p) {
        const std::int64_t since = p.since.load(std::memory_order_relaxed);
        return now - (since > 0 ? since : p.request->queued);
    };
    std::string text = describe(piece) + ": the drive has not answered for " + seconds(age(piece)) +
                       " (the deadline is " + seconds(deadline_) + "); pending there:";
    std::size_t shown = 0, more = 0;
    for (const auto& other : requests_)
        for (std::size_t i = 0; i < other->count; ++i) {
            const Piece& p = other->pieces[i];
            if (p.since.load(std::memory_order_relaxed) == Piece::kEnded || p.lane != piece.lane) continue;
            if (shown++ < kShown)
                text +=
                    (shown > 1 ? ", " : " ") + describe(p) +
                    (p.since.load(std::memory_order_relaxed) == Piece::kQueued ? " queued " : " in flight ") +
                    "for " + seconds(age(p));
            else
                ++more;
        }
    if (more) text += " and " + std::to_string(more) + " more";
    return {ETIMEDOUT, text, piece.member->path()};
}

void Active::watch() {
    name_thread("tz-deadlines");
    const auto tick =
        std::chrono::nanoseconds(std::clamp<std::int64_t>(deadline_ / 8, kSecond / 200, kSecond));
    std::unique_lock lock(mutex_);
    while (!stop_) {
        if (requests_.empty()) {
            wake_.wait(lock, [this] { return stop_ || !requests_.empty(); });
            continue;
        }
        wake_.wait_for(lock, tick, [this] { return stop_; });
        const std::int64_t now = steady_now();
        std::vector<std::pair<std::shared_ptr<Request>, IoError>> late;
        for (const auto& request : requests_) {
            if (request->told_late) continue;
            const Piece* const first = request->pieces.get();
            const Piece* const stuck = std::find_if(first, first + request->count,
                                                    [&](const Piece& piece) { return overdue(piece, now); });
            if (stuck == first + request->count) continue;
            request->told_late = true;
            if (request->op == Op::write) ++late_writes_;
            request->failed.store(true, std::memory_order_relaxed);
            late.emplace_back(request, late_error(*stuck, now));
        }
        if (late.empty()) continue;
        lock.unlock();
        for (auto& [request, error] : late) {
            std::lock_guard telling(request->telling);
            if (!request->told_done) request->late(error);
        }
        late.clear();
        lock.lock();
    }
}

}  // namespace tz
