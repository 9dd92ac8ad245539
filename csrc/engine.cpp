#include "engine.hpp"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>

#include "active.hpp"
#include "align.hpp"
#include "forever.hpp"
#include "lanes.hpp"

namespace tz {

namespace {

constexpr std::chrono::nanoseconds kMoment = std::chrono::milliseconds(200),
                                   kPatience = std::chrono::hours(1);

constexpr std::uint64_t kLeastLimit = 1'000'000;  // a block must not take minutes

EngineOptions checked(const EngineOptions& options) {
    const auto refuse = [](const std::string& text) { throw std::invalid_argument(text); };
    if (options.threads > 256)
        refuse("an I/O engine takes up to 256 threads, not " + std::to_string(options.threads));
    if (options.depth < 1 || options.depth > 256)
        refuse("a queue depth is 1 to 256, not " + std::to_string(options.depth));
    if (options.block < kPage || options.block % kPage != 0 || options.block > (std::size_t{1} << 30))
        refuse("an I/O block is a multiple of 4096 up to 1 GiB, not " + std::to_string(options.block));
    if (options.limit != 0 && options.limit < kLeastLimit)
        refuse("a drive's limit is at least " + std::to_string(kLeastLimit) + " bytes per second, not " +
               std::to_string(options.limit));
    if (options.deadline < std::chrono::milliseconds(10)) refuse("an I/O deadline is at least 0.01 seconds");
    return options;
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(checked(options)),
      completions_(std::make_shared<CompletionQueue>()),
      active_(std::make_shared<Active>(options.deadline)),
      lanes_(std::make_shared<Lanes>(options_, *active_)) {}

Engine::~Engine() {
    close();
    completions_->reap();  // unread tickets and their queue hold each other
}

std::shared_ptr<Ticket> Engine::transfer(Op op, const File& file, std::uint64_t offset, char* data,
                                         std::size_t n) {
    auto open = file.open();
    if (offset % open->alignment != 0)
        throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of " +
                                    std::to_string(open->alignment) +
                                    ", as direct I/O needs: " + open->path());
    const auto limit = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - kPage;
    if (offset > limit || n > limit - offset)
        throw std::invalid_argument("offset " + std::to_string(offset) + " + " + std::to_string(n) +
                                    " bytes is beyond the largest file: " + open->path());
    auto ticket = CompletionQueue::open_ticket(completions_);
    const auto done = [home = completions_, ticket, n](const IoError* error) {
        Outcome outcome;
        outcome.bytes = n;
        home->complete(ticket, std::move(outcome), error ? std::optional<IoError>(*error) : std::nullopt);
    };
    const auto late = [home = completions_, ticket](const IoError& error) {
        home->complete(ticket, {}, error, false);
    };
    try {
        submit(op, std::move(open), offset, data, n, done, late);
    } catch (const IoFailure& failure) {
        done(&failure.error);
    } catch (const std::bad_alloc&) {
        const IoError error{ENOMEM, "no memory to queue the request", file.path()};
        done(&error);
    }
    return ticket;
}

void Engine::submit(Op op, std::shared_ptr<const OpenFile> file, std::uint64_t offset, char* data,
                    std::size_t n, Done done, Late late) {
    if (n == 0) {
        (op == Op::read ? reads_ : writes_).fetch_add(1, std::memory_order_relaxed);
        return done(nullptr);
    }
    if (closed_)  // by a stepper that goes on after its drive answered too late
        throw IoFailure(ECANCELED, "the I/O engine is closed", file->path());
    if (op == Op::write) active_->refuse_behind_late_writes(*file);
    auto request = std::make_shared<Request>();
    request->op = op;
    request->file = std::move(file);
    request->offset = offset;
    request->size = n;
    request->done = std::move(done);
    request->late = std::move(late);
    cut(*request, data, options_.block);

    struct Chain {
        Lane* lane;
        Piece *first, *last;
    };
    std::vector<Chain> chains;
    for (std::size_t i = 0; i < request->count; ++i) {
        Piece& piece = request->pieces[i];
        piece.lane = !chains.empty() && piece.member == chains.back().last->member
                         ? chains.back().lane
                         : &lanes_->of(*piece.member);
        const auto known =
            std::find_if(chains.begin(), chains.end(), [&](const Chain& c) { return c.lane == piece.lane; });
        if (known == chains.end()) {
            chains.push_back({piece.lane, &piece, &piece});
        } else {
            known->last->next = &piece;
            known->last = &piece;
        }
    }
    (op == Op::read ? reads_ : writes_).fetch_add(1, std::memory_order_relaxed);
    active_->add(std::move(request));
    for (const auto& chain : chains) chain.lane->submit(chain.first);
}

// The locks of a parent may be held by threads that do not exist in its child.
void Engine::refuse_child() const {
    if (foreign())
        throw std::invalid_argument(
            "the I/O engine belongs to the parent process; make a new one after fork");
}

bool Engine::fix(char* data, std::size_t n) {
    refuse_child();
    return lanes_->fix(data, n);
}

void Engine::unfix(char* data) {
    refuse_child();
    lanes_->unfix(data);
}

const char* Engine::name() const noexcept {
    return lanes_->wants_ring() ? "uring" : "pool";
}

const std::string& Engine::reason() const noexcept {
    return lanes_->reason();
}

Counters Engine::counters() const {
    refuse_child();
    Counters sum = lanes_->counters();
    sum.reads = reads_.load();
    sum.writes = writes_.load();
    active_->add_busy(sum);
    return sum;
}

std::vector<DriveInfo> Engine::drives() const {
    refuse_child();
    return lanes_->describe();
}

void Engine::close() {
    std::lock_guard once(closing_);
    completions_->refuse_new();
    completions_->wait_idle();
    if (closed_) return;
    closed_ = true;
    // What nobody waits for any more but the drive still has is given a moment, everything else its time.
    const bool all_ended = lanes_->stop(active_->empty() ? kPatience : kMoment);
    active_->stop();
    if (all_ended) return;
    // The kernel still has memory of ours: the lanes and their requests outlive this engine.
    keep_for_ever(lanes_);
    keep_for_ever(active_);
}

}  // namespace tz
