#include "ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "error.hpp"

namespace tz {

using namespace uring;

namespace {

struct NamedFlag {
    std::uint32_t bit;
    const char* name;
};
// In the order in which they are given up where the kernel refuses them.
constexpr NamedFlag kWanted[] = {{kSetupDeferTaskrun, "DEFER_TASKRUN"},
                                 {kSetupSingleIssuer, "SINGLE_ISSUER"},
                                 {kSetupCoopTaskrun, "COOP_TASKRUN"}};

int setup(unsigned entries, Params& params) {
    return static_cast<int>(syscall(kSetup, entries, &params));
}

int do_register(int fd, unsigned what, const void* argument, unsigned n) {
    int rc;
    do {
        rc = static_cast<int>(syscall(kRegister, fd, what, argument, n));
    } while (rc < 0 && errno == EINTR);
    return rc;
}

std::uint32_t load(const std::uint32_t* p) {
    return std::atomic_ref<std::uint32_t>(*const_cast<std::uint32_t*>(p)).load(std::memory_order_acquire);
}

void store(std::uint32_t* p, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_release);
}

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned entries, std::string& reason) {
    std::unique_ptr<Ring> ring(new Ring);
    std::uint32_t flags = kSetupCqSize;
    for (const auto& flag : kWanted) flags |= flag.bit;
    Params params;
    for (std::size_t given_up = 0;; ++given_up) {
        std::memset(&params, 0, sizeof params);
        params.flags = flags;
        params.cq_entries = 2 * entries;
        ring->fd_ = setup(entries, params);
        if (ring->fd_ >= 0) break;
        if (errno != EINVAL || given_up == std::size(kWanted)) {
            reason = "io_uring_setup: " + errno_text(errno);
            return nullptr;
        }
        flags &= ~kWanted[given_up].bit;
    }
    for (const auto& flag : kWanted)
        if (flags & flag.bit) ring->flags_.push_back(flag.name);
    const std::uint32_t needed = kFeatSingleMmap | kFeatNoDrop | kFeatExtArg;
    if ((params.features & needed) != needed) {
        reason = "io_uring of this kernel is too old (5.11 or later is needed)";
        return nullptr;
    }
    return ring->map(params, reason) ? std::move(ring) : nullptr;
}

bool Ring::map(const Params& params, std::string& reason) {
    const auto mapping = [this](std::size_t n, std::uint64_t at) {
        void* const p =
            mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(at));
        if (p != MAP_FAILED) madvise(p, n, MADV_DONTFORK);  // a child must not touch the parent's ring
        return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    };
    rings_size_ = std::max(params.sq.array + params.sq_entries * sizeof(std::uint32_t),
                           params.cq.cqes + params.cq_entries * sizeof(Cqe));
    sqes_size_ = params.sq_entries * sizeof(Sqe);
    rings_ = mapping(rings_size_, kOffRings);
    sqes_ = reinterpret_cast<Sqe*>(mapping(sqes_size_, kOffSqes));
    if (!rings_ || !sqes_) {
        reason = "cannot map the io_uring: " + errno_text(errno);
        return false;
    }
    const auto word = [this](std::uint32_t at) { return reinterpret_cast<std::uint32_t*>(rings_ + at); };
    sq_head_ = word(params.sq.head);
    sq_tail_ = word(params.sq.tail);
    sq_mask_ = *word(params.sq.ring_mask);
    sq_entries_ = params.sq_entries;
    cq_head_ = word(params.cq.head);
    cq_tail_ = word(params.cq.tail);
    cq_mask_ = *word(params.cq.ring_mask);
    cqes_ = reinterpret_cast<Cqe*>(rings_ + params.cq.cqes);
    for (std::uint32_t i = 0; i < sq_entries_; ++i) word(params.sq.array)[i] = i;
    return true;
}

Ring::~Ring() {
    if (sqes_) munmap(sqes_, sqes_size_);
    if (rings_) munmap(rings_, rings_size_);
    if (fd_ >= 0) ::close(fd_);
}

Sqe* Ring::next() {
    const std::uint32_t tail = *sq_tail_;
    if (tail - load(sq_head_) == sq_entries_) return nullptr;
    Sqe* const sqe = &sqes_[tail & sq_mask_];
    std::memset(sqe, 0, sizeof *sqe);
    store(sq_tail_, tail + 1);  // the kernel looks at it in enter() only, on this same thread
    return sqe;
}

std::uint32_t Ring::pending() const {
    return *sq_tail_ - load(sq_head_);
}

int Ring::enter(std::int64_t timeout_ns) {
    const Timespec until{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    EnterArg argument{};
    argument.sigmask_size = _NSIG / 8;
    if (timeout_ns >= 0) argument.timespec = reinterpret_cast<std::uint64_t>(&until);
    const long rc =
        syscall(kEnter, fd_, pending(), 1u, kEnterGetEvents | kEnterExtArg, &argument, sizeof argument);
    return rc >= 0 || errno == ETIME ? 0 : errno;
}

unsigned Ring::reap(Cqe* out, unsigned n) {
    std::uint32_t head = *cq_head_;
    const std::uint32_t tail = load(cq_tail_);
    unsigned count = 0;
    for (; head != tail && count < n; ++head) out[count++] = cqes_[head & cq_mask_];
    store(cq_head_, head);
    return count;
}

bool Ring::register_files(unsigned slots) {
    const std::vector<std::int32_t> none(slots, -1);
    return do_register(fd_, kRegisterFiles, none.data(), slots) >= 0;
}

bool Ring::set_file(unsigned slot, int fd) {
    const std::int32_t value = fd;
    const FilesUpdate update{slot, 0, reinterpret_cast<std::uint64_t>(&value)};
    return do_register(fd_, kRegisterFilesUpdate, &update, 1) >= 0;
}

bool Ring::register_buffers(unsigned slots) {
    const ResourceRegister table{slots, kSparse, 0, 0, 0};
    return do_register(fd_, kRegisterBuffers2, &table, sizeof table) >= 0;
}

bool Ring::set_buffer(unsigned slot, const char* data, std::size_t n) {
    const struct {
        const char* base;
        std::size_t length;
    } vector{data, n};
    const ResourceUpdate update{slot, 0, reinterpret_cast<std::uint64_t>(&vector), 0, 1, 0};
    return do_register(fd_, kRegisterBuffersUpdate, &update, sizeof update) >= 0;
}

namespace {

// One write and one read of 8 bytes through a memfd.
std::string round_trip() {
    std::string reason;
    const auto ring = Ring::open(4, reason);
    if (!ring) return reason;
    const int fd = memfd_create("tierzero-probe", MFD_CLOEXEC);
    if (fd < 0) return "cannot make a file to try io_uring on: " + errno_text(errno);
    char word[8] = {'t', 'i', 'e', 'r', 'z', 'e', 'r', 'o'};
    for (const std::uint8_t opcode : {kOpWrite, kOpRead}) {
        Sqe* const sqe = ring->next();
        sqe->opcode = opcode;
        sqe->fd = fd;
        sqe->address = reinterpret_cast<std::uint64_t>(word);
        sqe->length = sizeof word;
        Cqe cqe{};
        int code = 0;
        for (int tries = 0; tries < 100; ++tries) {
            code = ring->enter(100'000'000);
            if (ring->reap(&cqe, 1)) break;
            if (code != 0 && code != EINTR && code != EAGAIN) break;
            cqe.result = -ETIME;
        }
        if (code != 0 && code != EINTR && code != EAGAIN)
            reason = "io_uring_enter: " + errno_text(code);
        else if (cqe.result < 0)
            reason = "an io_uring request fails: " + errno_text(-cqe.result);
        else if (cqe.result != sizeof word)
            reason = "an io_uring request moves too little";
        if (!reason.empty()) break;
        if (opcode == kOpWrite) std::memset(word, 0, sizeof word);
    }
    ::close(fd);
    if (reason.empty() && std::memcmp(word, "tierzero", sizeof word) != 0)
        reason = "io_uring moves wrong bytes";
    return reason;
}

}  // namespace

std::string probe_uring() {
    static std::atomic<bool> works{false};
    if (works) return {};
    std::string reason = round_trip();
    if (reason.empty()) works = true;
    return reason;
}

}  // namespace tz
