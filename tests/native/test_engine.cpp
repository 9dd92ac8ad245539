// The engine over system calls that are short, interrupted, busy, failing or slow.
#include <atomic>
#include <cerrno>
#include <thread>

#include "align.hpp"
#include "check.hpp"
#include "engine.hpp"
#include "ring.hpp"
#include "slab.hpp"

using namespace tz;

// How the next system calls misbehave.
static std::atomic<int> calls{0}, fail_at{-1}, fail_with{0};
static std::atomic<bool> hiccups{false};
static std::atomic<std::size_t> longest{SIZE_MAX};

static bool trouble(std::size_t& n) {
    const int call = calls++;
    if (call == fail_at) {
        errno = fail_with;
        return true;
    }
    if (hiccups && call % 3 != 2) {
        errno = call % 3 ? EAGAIN : EINTR;
        return true;
    }
    n = std::min(n, longest.load());
    return false;
}
static ssize_t rough_pread(int fd, void* p, std::size_t n, off_t at) {
    return trouble(n) ? -1 : ::pread(fd, p, n, at);
}
static ssize_t rough_pwrite(int fd, const void* p, std::size_t n, off_t at) {
    return trouble(n) ? -1 : ::pwrite(fd, p, n, at);
}
// A completion that claims trouble, or less than was moved.
static ssize_t rough_completion(Op, ssize_t result) {
    if (result < 0) return result;
    auto n = static_cast<std::size_t>(result);
    return trouble(n) ? -errno : static_cast<ssize_t>(n);
}
static const SysCalls kRough{.pread = rough_pread, .pwrite = rough_pwrite, .completion = rough_completion};

static EngineKind kind = EngineKind::pool;  // of all engines below

static EngineOptions make(unsigned depth, std::size_t block, const SysCalls& calls = SysCalls::real()) {
    EngineOptions options;
    options.kind = kind;
    options.depth = depth;
    options.block = block;
    options.calls = calls;
    return options;
}

static void reset() {
    calls = 0;
    fail_at = -1;
    hiccups = false;
    longest = SIZE_MAX;
}

static void wait(const std::shared_ptr<Ticket>& ticket) {
    CHECK(ticket->wait(std::nullopt));
    ticket->outcome();
}

static void round_trip(Engine& engine, File& file) {
    std::mt19937 generator(1);
    Slab from(1 << 20), to(1 << 20);
    for (std::size_t i = 0; i < from.size(); ++i) from.data()[i] = static_cast<char>(generator());
    for (const std::size_t n : {1u, 511u, 4096u, 4097u, 65536u, 65537u, 300001u})
        for (const std::size_t shift : {0u, 1u, 512u}) {
            std::memset(to.data(), 0, to.size());
            wait(engine.transfer(Op::write, file, 8192, from.data() + shift, n));
            wait(engine.transfer(Op::read, file, 8192, to.data() + 3 * shift, n));
            CHECK(std::memcmp(from.data() + shift, to.data() + 3 * shift, n) == 0);
        }
}

static void every_kind_of_short_transfer(TempDir& dir) {
    for (const bool direct : {true, false}) {
        File file(dir.file(direct ? "direct" : "buffered"), true, direct);
        Engine engine(make(3, 65536, kRough));
        for (const std::size_t limit : {SIZE_MAX, std::size_t{8192}, std::size_t{4096}}) {
            for (const bool busy : {false, true}) {
                reset();
                longest = limit;
                hiccups = busy;
                round_trip(engine, file);
            }
        }
        if (!file.direct()) {
            reset();
            longest = 1000;
            round_trip(engine, file);
        }
    }
    reset();
}

static void a_failure_is_reported_once_and_the_engine_goes_on(TempDir& dir) {
    File file(dir.file("fails"), true, true);
    Engine engine(make(2, 4096, kRough));
    Slab data(1 << 16);
    reset();
    wait(engine.transfer(Op::write, file, 0, data.data(), data.size()));
    for (const int code : {EIO, ENOSPC, EBADF, EINVAL})
        for (const Op op : {Op::read, Op::write}) {
            reset();
            fail_with = code;
            fail_at = 5;
            const auto ticket = engine.transfer(op, file, 0, data.data(), data.size());
            CHECK(ticket->wait(std::nullopt));
            const auto failure = must_throw<IoFailure>([&] { ticket->outcome(); });
            CHECK(failure.error.code == code && failure.error.path == file.path());
            CHECK(failure.error.message.find("offset") != std::string::npos);
        }
    reset();
    wait(engine.transfer(Op::read, file, 0, data.data(), data.size()));
    CHECK(engine.completions()->reap().size() == 10);
}

static void the_end_of_a_file_is_an_error(TempDir& dir) {
    File file(dir.file("ends"), true, true);
    Engine engine(make(1, 65536));
    Slab data(65536);
    wait(engine.transfer(Op::write, file, 0, data.data(), 8192));
    const auto ticket = engine.transfer(Op::read, file, 4096, data.data(), 8192);
    CHECK(ticket->wait(std::nullopt));
    const auto failure = must_throw<IoFailure>([&] { ticket->outcome(); });
    CHECK(failure.error.code == EIO && failure.error.message.find("ends at 8192") != std::string::npos);
}

static void closing_drains(TempDir& dir) {
    const std::string path = dir.file("drains");
    Slab data(1 << 16);
    std::vector<std::shared_ptr<Ticket>> tickets;
    {
        Engine engine(make(2, 4096));
        File file(path, true, true);
        for (int i = 0; i < 50; ++i)
            tickets.push_back(engine.transfer(Op::write, file, static_cast<std::uint64_t>(i) << 16,
                                              data.data(), data.size()));
        file.close();  // requests hold the descriptor
        must_throw<std::invalid_argument>([&] { engine.transfer(Op::read, file, 0, data.data(), 1); });
    }
    for (const auto& ticket : tickets) CHECK(ticket->done() && ticket->outcome().bytes == data.size());
    File file(path, false, true);
    CHECK(file.size() == 50u << 16);
    Engine engine(make(1, 4096));
    engine.close();
    engine.close();
    must_throw<std::invalid_argument>([&] { engine.transfer(Op::read, file, 0, data.data(), 1); });
}

static void bad_arguments(TempDir& dir) {
    File file(dir.file("bad"), true, true);
    Engine engine(make(1, 4096));
    char byte = 0;
    if (file.direct())
        must_throw<std::invalid_argument>([&] { engine.transfer(Op::read, file, 512, &byte, 1); });
    must_throw<std::invalid_argument>(
        [&] { engine.transfer(Op::read, file, UINT64_MAX / 4096 * 4096, &byte, 1); });
    must_throw<std::invalid_argument>([&] { Engine(make(0, 4096)); });
    must_throw<std::invalid_argument>([&] { Engine(make(1, 100)); });
    must_throw<std::invalid_argument>([&] { Slab(0); });
    must_throw<IoFailure>([&] { File(dir.file("no/such"), true, true); });
    wait(engine.transfer(Op::read, file, 4096, nullptr, 0));
}

// A drive that does not answer: the error comes in time, names everything, and the memory stays until it
// does.
static std::atomic<int> lost{0}, lost_reads{0};
static std::atomic<bool> frozen{false};
static ssize_t lost_completion(Op op, ssize_t result) {
    if (op == Op::read && lost_reads > 0 && lost_reads-- > 0) return SysCalls::kLost;
    return lost > 0 && lost-- > 0 ? SysCalls::kLost : result;
}
static ssize_t slow_pwrite(int fd, const void* p, std::size_t n, off_t at) {
    while (frozen) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ::pwrite(fd, p, n, at);
}

static void expect_timeout(Ticket& ticket, const File& file) {
    CHECK(ticket.wait(std::chrono::seconds(20)));
    const auto failure = must_throw<IoFailure>([&] { ticket.outcome(); });
    CHECK(failure.error.code == ETIMEDOUT && failure.error.path == file.path());
    CHECK(failure.error.message.find("at offset") != std::string::npos);
    CHECK(failure.error.message.find("pending there:") != std::string::npos);
}

static void a_request_that_never_completes(TempDir& dir) {
    File file(dir.file("silent"), true, true), other(dir.file("other"), true, true);
    Slab data(1 << 20);
    EngineOptions options =
        make(2, 65536, {.pread = ::pread, .pwrite = slow_pwrite, .completion = lost_completion});
    options.deadline = std::chrono::seconds(1);
    auto engine = std::make_unique<Engine>(options);
    const bool ring = kind == EngineKind::uring && file.direct();
    if (ring)
        lost = 2;
    else
        frozen = true;
    const auto first = engine->transfer(Op::write, file, 0, data.data(), 65536);
    const auto second = engine->transfer(Op::write, file, 65536, data.data() + 65536, 1 << 19);  // behind it
    expect_timeout(*first, file);
    expect_timeout(*second, file);
    CHECK(!first->released());
    const auto third = engine->transfer(Op::write, file, 0, data.data(), 65536);
    CHECK(third->wait(std::nullopt));
    CHECK(must_throw<IoFailure>([&] { third->outcome(); }).error.code == ETIMEDOUT);
    if (!ring) {  // here the answer does come, and everything goes on
        frozen = false;
        while (!first->released() || !second->released())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        wait(engine->transfer(Op::write, file, 0, data.data(), 65536));
        frozen = true;
        const auto last = engine->transfer(Op::write, file, 0, data.data(), 65536);
        expect_timeout(*last, file);
    }
    engine.reset();  // does not hang
    frozen = false;
    if (ring) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the thread that was left writes and goes
}

static ssize_t slow_pread(int fd, void* p, std::size_t n, off_t at) {
    while (frozen) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ::pread(fd, p, n, at);
}

// A read that is overdue keeps its memory, and neither other reads nor writes from going on.
static void a_read_that_never_completes(TempDir& dir) {
    for (const bool bounced : {false, true}) {
        File file(dir.file("deaf"), true, true);
        Slab data(1 << 20);
        EngineOptions options =
            make(4, 65536, {.pread = slow_pread, .pwrite = ::pwrite, .completion = lost_completion});
        options.deadline = std::chrono::seconds(1);
        auto engine = std::make_unique<Engine>(options);
        wait(engine->transfer(Op::write, file, 0, data.data(), 1 << 19));
        const bool ring = kind == EngineKind::uring && file.direct();
        if (ring)
            lost_reads = 1;
        else
            frozen = true;
        const auto first = engine->transfer(Op::read, file, 0, data.data() + bounced, 65536);
        expect_timeout(*first, file);
        CHECK(!first->released());
        wait(engine->transfer(Op::write, file, 0, data.data() + (1 << 19), 65536));
        CHECK(engine->completions()->reap().size() == 3);
        if (!ring) {
            frozen = false;
            while (!first->released()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        wait(engine->transfer(Op::read, file, 65536, data.data() + (1 << 19), 65536));
        if (!ring) frozen = true;
        const auto last = engine->transfer(Op::read, file, 0, data.data(), 65536);
        if (!ring) {
            CHECK(last->wait(std::nullopt) && !last->released());
        }
        engine.reset();  // does not hang
        frozen = false;
        if (!ring) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

static void a_buffer_registered_twice(TempDir& dir) {
    File file(dir.file("twice"), true, true);
    Engine engine(make(2, 65536));
    Slab data(1 << 20);
    wait(engine.transfer(Op::write, file, 0, data.data(), 4096));
    for (int i = 0; i < 100; ++i) {  // more often than there are places
        engine.fix(data.data(), data.size());
        engine.fix(data.data(), 4096);
        engine.fix(data.data() + 4096, data.size() - 4096);
    }
    wait(engine.transfer(Op::write, file, 0, data.data(), data.size()));
    engine.unfix(data.data());
    engine.unfix(data.data());
    CHECK(!engine.fix(data.data(), 0));
    wait(engine.transfer(Op::read, file, 0, data.data(), data.size()));
    const auto drives = engine.drives();
    CHECK(drives.size() == 1 && drives[0].bytes_read == data.size());
}

static void striped_files(TempDir& dir) {
    std::mt19937 generator(2);
    Slab from(1 << 20), to(1 << 20);
    for (std::size_t i = 0; i < from.size(); ++i) from.data()[i] = static_cast<char>(generator());
    for (const std::vector<unsigned>& weights :
         {std::vector<unsigned>{1, 1}, {3, 1}, {1, 2, 3}, {5, 1, 2, 7}}) {
        std::vector<std::string> paths;
        for (std::size_t i = 0; i < weights.size(); ++i)
            paths.push_back(
                dir.file(("part" + std::to_string(paths.size()) + std::to_string(weights.size())).c_str()));
        File file(paths, true, true, weights, 8192);
        Engine engine(make(3, 16384));
        file.preallocate(from.size());
        CHECK(file.size() >= from.size());
        for (const std::size_t n :
             {std::size_t{1}, std::size_t{8191}, std::size_t{8193}, std::size_t{300001}, from.size()})
            for (const std::uint64_t at : {0u, 4096u, 8192u, 20480u}) {
                if (at + n > from.size()) continue;
                std::memset(to.data(), 0, n);
                wait(engine.transfer(Op::write, file, at, from.data(), n));
                wait(engine.transfer(Op::read, file, at, to.data(), n));
                CHECK(std::memcmp(from.data(), to.data(), n) == 0);
            }
        std::uint64_t sum = 0;
        for (const auto& path : paths) sum += File(path, false, true).size();
        CHECK(sum == from.size());
        file.truncate(50000);
        CHECK(file.size() == 50000);
    }
}

static void everything(TempDir& dir) {
    every_kind_of_short_transfer(dir);
    a_failure_is_reported_once_and_the_engine_goes_on(dir);
    the_end_of_a_file_is_an_error(dir);
    closing_drains(dir);
    bad_arguments(dir);
    striped_files(dir);
    a_buffer_registered_twice(dir);
    a_request_that_never_completes(dir);
    a_read_that_never_completes(dir);
}

int main() {
    {
        TempDir dir;
        everything(dir);
    }
    if (!probe_uring().empty()) {
        std::printf("engine: ok (no io_uring: %s)\n", probe_uring().c_str());
        return 0;
    }
    TempDir dir;
    kind = EngineKind::uring;
    everything(dir);
    std::printf("engine: ok\n");
}
