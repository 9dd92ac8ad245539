// A limit of bytes per second: never faster, no deadline counts the waiting, and the bytes are the same.
#include <algorithm>
#include <chrono>
#include <vector>

#include "check.hpp"
#include "engine.hpp"
#include "pacer.hpp"
#include "ring.hpp"
#include "slab.hpp"

using namespace tz;

constexpr std::uint64_t kRate = 20'000'000;
constexpr std::size_t kBytes = 2 << 20;

static EngineKind kind = EngineKind::pool;

static EngineOptions limited(std::uint64_t rate) {
    EngineOptions options;
    options.kind = kind;
    options.depth = 4;
    options.block = 65536;
    options.limit = rate;
    return options;
}

static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static void wait_all(const std::vector<std::shared_ptr<Ticket>>& tickets) {
    for (const auto& ticket : tickets) {
        CHECK(ticket->wait(std::nullopt));
        ticket->outcome();
    }
}

// The shares of one rate, whatever the pieces: no two at once, none before it was asked for.
static void shares_do_not_overlap() {
    std::mt19937 generator(3);
    for (const std::uint64_t rate : {1'000'000ull, 999'999'937ull, 40'000'000'000ull}) {
        Pacer pacer(rate);
        std::int64_t now = 1'000'000'000'000, before = now, bytes = 0;
        const std::int64_t begun = now;
        for (int i = 0; i < 1000; ++i) {
            const std::size_t n = 1 + generator() % 100'000;
            const std::int64_t due = pacer.take(begun, n);
            CHECK(due >= before + static_cast<std::int64_t>(static_cast<double>(n) * 1e9 /
                                                            static_cast<double>(rate)));
            before = due;
            bytes += static_cast<std::int64_t>(n);
        }
        CHECK(static_cast<double>(before - begun) >=
              static_cast<double>(bytes) * 1e9 / static_cast<double>(rate));
        now = before + 5'000'000'000;  // idle meanwhile, which earns nothing
        CHECK(pacer.take(now, 1'000'000) > now);
    }
}

static void bytes_take_their_time(TempDir& dir) {
    for (const bool direct : {true, false}) {
        File file(dir.file(direct ? "limited" : "limited-buffered"), true, direct);
        Engine engine(limited(kRate));
        Slab from(kBytes), to(kBytes);
        std::mt19937 generator(4);
        for (std::size_t i = 0; i < kBytes; ++i) from.data()[i] = static_cast<char>(generator());
        auto start = std::chrono::steady_clock::now();
        wait_all({engine.transfer(Op::write, file, 0, from.data(), kBytes)});
        CHECK(seconds_since(start) >= static_cast<double>(kBytes) / kRate);
        start = std::chrono::steady_clock::now();
        std::vector<std::shared_ptr<Ticket>> tickets;  // of both kinds and all sizes, bounced ones too
        std::size_t moved = 0;
        for (std::size_t at = 0, n = 4096; at + n <= kBytes; at += n, n = n * 2 + 4096 * (at % 3)) {
            const std::size_t part = n - at % 2 * 100;
            tickets.push_back(engine.transfer(Op::read, file, at, to.data() + at, part));
            moved += part;
        }
        tickets.push_back(engine.transfer(Op::write, file, 4096, from.data() + 4096, 102'400));
        wait_all(tickets);
        CHECK(seconds_since(start) >= static_cast<double>(moved + 102'400) / kRate);
        std::memset(to.data(), 0, kBytes);
        wait_all({engine.transfer(Op::read, file, 0, to.data(), kBytes)});
        CHECK(std::memcmp(from.data(), to.data(), kBytes) == 0);
    }
}

// One drive has one limit, though its direct and its buffered files have lanes of their own.
static void lanes_of_a_drive_share_the_limit(TempDir& dir) {
    File direct(dir.file("shared-direct"), true, true), buffered(dir.file("shared-buffered"), true, false);
    Engine engine(limited(kRate));
    Slab data(kBytes);
    const auto start = std::chrono::steady_clock::now();
    wait_all({engine.transfer(Op::write, direct, 0, data.data(), kBytes / 2),
              engine.transfer(Op::write, buffered, 0, data.data(), kBytes / 2)});
    CHECK(seconds_since(start) >= static_cast<double>(kBytes) / kRate);
}

static void waiting_for_the_limit_is_not_late(TempDir& dir) {
    File file(dir.file("slow"), true, true);
    auto options = limited(1'000'000);
    options.block = 262'144;  // a block takes several deadlines
    options.deadline = std::chrono::milliseconds(50);
    Engine engine(options);
    Slab data(1 << 20);
    wait_all({engine.transfer(Op::write, file, 0, data.data(), data.size())});
}

// A close waits for what the limit still holds, and loses nothing.
static void closing_waits(TempDir& dir) {
    File file(dir.file("closing"), true, true);
    Engine engine(limited(kRate));
    Slab data(kBytes);
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (std::size_t at = 0; at < kBytes; at += kBytes / 8)
        tickets.push_back(engine.transfer(Op::write, file, at, data.data() + at, kBytes / 8));
    engine.close();
    for (const auto& ticket : tickets) {
        CHECK(ticket->done());
        ticket->outcome();
    }
    CHECK(engine.counters().bytes_written == kBytes);
}

static ssize_t no_space(int, const void*, std::size_t, off_t) {
    errno = ENOSPC;
    return -1;
}
static ssize_t fails_at_the_ring(Op, ssize_t) {
    return -ENOSPC;
}

// The rest of a request that has failed is not waited for: the whole of it would take over a minute.
static void a_failed_request_ends_at_once(TempDir& dir) {
    File file(dir.file("fails"), true, true);
    auto options = limited(1'000'000);
    options.calls = {.pread = ::pread, .pwrite = no_space, .completion = fails_at_the_ring};
    Engine engine(options);
    Slab data(64 << 20);
    const auto ticket = engine.transfer(Op::write, file, 0, data.data(), data.size());
    CHECK(ticket->wait(std::chrono::seconds(30)));
    CHECK(must_throw<IoFailure>([&] { ticket->outcome(); }).error.code == ENOSPC);
}

static void a_limit_out_of_range() {
    must_throw<std::invalid_argument>([] { Engine engine(limited(999'999)); });
}

static void everything(TempDir& dir) {
    bytes_take_their_time(dir);
    lanes_of_a_drive_share_the_limit(dir);
    waiting_for_the_limit_is_not_late(dir);
    closing_waits(dir);
    a_failed_request_ends_at_once(dir);
    a_limit_out_of_range();
}

int main() {
    shares_do_not_overlap();
    {
        TempDir dir;
        everything(dir);
    }
    if (!probe_uring().empty()) {
        std::printf("limit: ok (no io_uring: %s)\n", probe_uring().c_str());
        return 0;
    }
    TempDir dir;
    kind = EngineKind::uring;
    everything(dir);
    std::printf("limit: ok\n");
}
