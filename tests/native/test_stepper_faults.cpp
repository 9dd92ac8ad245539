// The streamed step on drives that fail, are short or do not answer, through the ring and through the pool.
#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "engine.hpp"
#include "ring.hpp"
#include "slab.hpp"
#include "stepper.hpp"

using namespace tz;

static constexpr std::uint64_t kChunk = 2048, kElements = 8 * kChunk, kSpan = 12 * kElements;

// What the drive does wrong: the call numbered `at` of operation `which`.
enum class Fault { none, fails, lost, dead };  // dead: that call and all after it are lost
static std::atomic<Fault> fault{Fault::none};
static std::atomic<Op> which{Op::read};
static std::atomic<int> at{0};
static std::atomic<bool> halves{false}, frozen{false};

static Fault now(Op op) {
    if (op != which || fault == Fault::none) return Fault::none;
    const int left = at--;
    if (fault == Fault::dead) return left <= 0 ? Fault::lost : Fault::none;
    return left == 0 ? fault.load() : Fault::none;
}

static ssize_t completion(Op op, ssize_t result) {
    const Fault what = now(op);
    if (what == Fault::lost) return SysCalls::kLost;
    if (what == Fault::fails) return -EIO;
    return halves && result > 4096 ? result / 2 / 4096 * 4096 : result;
}

// A pool cannot lose a request: it waits instead until the drive is thawed.
template <class Call>
static ssize_t call(Op op, std::size_t n, Call real) {
    const Fault what = now(op);
    if (what == Fault::fails) {
        errno = EIO;
        return -1;
    }
    if (what == Fault::lost)
        while (frozen) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return real(halves && n > 4096 ? n / 2 / 4096 * 4096 : n);
}
static ssize_t rough_pread(int fd, void* p, std::size_t n, off_t offset) {
    return call(Op::read, n, [&](std::size_t m) { return ::pread(fd, p, m, offset); });
}
static ssize_t rough_pwrite(int fd, const void* p, std::size_t n, off_t offset) {
    return call(Op::write, n, [&](std::size_t m) { return ::pwrite(fd, p, m, offset); });
}

static EngineKind kind = EngineKind::pool;

static std::shared_ptr<Engine> make_engine(std::chrono::milliseconds deadline) {
    EngineOptions options;
    options.kind = kind;
    options.depth = 3;
    options.block = 8192;
    options.deadline = deadline;
    options.calls = {.pread = rough_pread, .pwrite = rough_pwrite, .completion = completion};
    return std::make_shared<Engine>(options);
}

struct Rig {
    explicit Rig(TempDir& dir, std::chrono::milliseconds deadline = std::chrono::seconds(60), int slots = 4)
        : engine(make_engine(deadline)),
          file(dir.file("records"), true, true),
          grads(4 * kElements),
          buffers(14 * kChunk * slots),
          stepper(std::make_unique<Stepper>(engine, buffers.data(), buffers.size(), kChunk, 1)) {
        auto state = normal(3 * kElements, 1);
        for (float& x : state) x = x * x;
        const auto patient = make_engine(std::chrono::seconds(60));
        const auto ticket =
            patient->transfer(Op::write, file, 0, reinterpret_cast<char*>(state.data()), kSpan);
        CHECK(ticket->wait(std::nullopt));
        ticket->outcome();
        std::memset(grads.data(), 0, grads.size());
    }
    std::shared_ptr<Ticket> submit(float* state = nullptr, bool copy = true, std::uint64_t due = 0) {
        Record r;
        r.elements = kElements;
        r.segments = {{.first = 0,
                       .count = kElements,
                       .grad = 0,
                       .grad_type = Dtype::f32,
                       .out = 0,
                       .out_type = Dtype::bf16,
                       .scalars = {1 - 1e-5f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 0.5f, 0.25f}}};
        r.grads = grads.data();
        r.grads_size = grads.size();
        r.due = due;
        if (state) {
            r.state = reinterpret_cast<char*>(state);
        } else {
            r.src = Place{file.open(), 0};
            r.dst = Place{file.open(), kSpan};
        }
        if (copy) {
            r.out_file = Place{file.open(), 2 * kSpan};
            r.out_bytes = 2 * kElements;
        } else {
            r.segments[0].out = -1;
        }
        return stepper->submit(std::move(r));
    }
    std::vector<char> content(std::uint64_t offset, std::size_t n) {
        std::vector<char> out(n);
        const auto ticket = engine->transfer(Op::read, file, offset, out.data(), n);
        CHECK(ticket->wait(std::nullopt));
        ticket->outcome();
        return out;
    }

    std::shared_ptr<Engine> engine;
    File file;
    std::vector<char> grads;
    Slab buffers;
    std::unique_ptr<Stepper> stepper;
};

static void calm() {
    fault = Fault::none;
    halves = frozen = false;
}

static void short_transfers_change_nothing(TempDir& dir) {
    Rig rig(dir);
    CHECK(rig.submit()->wait(std::nullopt));
    const auto want = rig.content(0, 2 * kSpan + 2 * kElements);
    halves = true;
    const auto ticket = rig.submit();
    CHECK(ticket->wait(std::nullopt));
    ticket->outcome();
    calm();
    CHECK(same_bytes(rig.content(0, 2 * kSpan + 2 * kElements), want));
}

static void every_transfer_may_fail(TempDir& dir) {
    Rig rig(dir);
    CHECK(rig.submit()->wait(std::nullopt));
    const auto want = rig.content(0, 2 * kSpan + 2 * kElements);
    for (const Op op : {Op::read, Op::write})
        for (int n = 0; n < 12; ++n) {
            which = op;
            at = n;
            fault = Fault::fails;
            const auto bad = rig.submit();
            CHECK(bad->wait(std::nullopt));
            const auto failure = must_throw<IoFailure>([&] { bad->outcome(); });
            CHECK(failure.error.code == EIO && failure.error.path == rig.file.path());
            CHECK(failure.error.message.find("at offset") != std::string::npos);
            CHECK(bad->released());
            calm();
            const auto good = rig.submit();
            CHECK(good->wait(std::nullopt));
            good->outcome();
            CHECK(same_bytes(rig.content(0, 2 * kSpan + 2 * kElements), want));
        }
}

// Everything of these outlives a drive that never answers.
static void a_lost_transfer_tells_everybody(TempDir& dir, Op op, int n, bool engine_first, bool in_memory) {
    static auto& kept = *new std::vector<std::pair<std::unique_ptr<Rig>, std::vector<float>>>;
    kept.emplace_back(std::make_unique<Rig>(dir, std::chrono::milliseconds(100)),
                      std::vector<float>(3 * kElements, 1.0f));
    Rig& rig = *kept.back().first;
    std::vector<float>& state = kept.back().second;
    which = op;
    at = n;
    frozen = true;
    fault = Fault::lost;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int i = 0; i < 3; ++i) tickets.push_back(rig.submit());
    if (in_memory) tickets.push_back(rig.submit(state.data()));
    for (const auto& ticket : tickets) {
        CHECK(ticket->wait(std::chrono::seconds(20)));
        const auto failure = must_throw<IoFailure>([&] { ticket->outcome(); });
        CHECK(failure.error.code == ETIMEDOUT && failure.error.path == rig.file.path());
    }
    CHECK(must_throw<IoFailure>([&] { rig.submit(); }).error.code == ETIMEDOUT);
    if (engine_first) rig.engine->close();
    if (kind == EngineKind::uring || n % 2) {
        CHECK(!rig.stepper->close());
        rig.engine->close();
    }
    calm();  // a pool's answers do come
    if (kind == EngineKind::uring && rig.file.direct()) return;
    rig.engine->close();
    // Closed before the answer came, it leaves its jobs as they are; closed after it, it ends them.
    if (rig.stepper->close())
        for (const auto& ticket : tickets) CHECK(ticket->released());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // what is left of the engine writes and goes
}

// A record in memory either is finished or was never begun, whatever its drive does to the others.
static void memory_needs_no_drive(TempDir& dir) {
    static auto& kept = *new std::vector<std::pair<std::unique_ptr<Rig>, std::vector<float>>>;
    std::vector<float> want(3 * kElements, 1.0f);
    CHECK(Rig(dir).submit(want.data(), false)->wait(std::nullopt));
    for (const bool begun : {true, false}) {
        kept.emplace_back(std::make_unique<Rig>(dir, std::chrono::milliseconds(100)),
                          std::vector<float>(3 * kElements, 1.0f));
        Rig& rig = *kept.back().first;
        std::vector<float>& state = kept.back().second;
        const std::vector<float> before = state;
        which = Op::read;
        at = 0;
        frozen = true;
        fault = Fault::lost;
        const auto lost = rig.submit();
        // begun: no byte is shared with the lost one; else it waits for that
        const auto memory = rig.submit(state.data(), !begun);
        CHECK(memory->wait(std::chrono::seconds(20)));
        CHECK(lost->wait(std::chrono::seconds(20)));
        CHECK(must_throw<IoFailure>([&] { lost->outcome(); }).error.code == ETIMEDOUT);
        if (begun)
            memory->outcome();
        else
            CHECK(must_throw<IoFailure>([&] { memory->outcome(); }).error.code == ETIMEDOUT);
        CHECK(state == (begun ? want : before));
        calm();
        rig.engine->close();
        rig.stepper->close();
        CHECK(state == (begun ? want : before));
    }
}

// One that is due sooner does not even wait for the reads of the others.
static void memory_waits_for_no_reads(TempDir& dir) {
    static auto& kept = *new std::vector<std::pair<std::unique_ptr<Rig>, std::vector<float>>>;
    std::vector<float> want(3 * kElements, 1.0f);
    CHECK(Rig(dir).submit(want.data(), false)->wait(std::nullopt));
    kept.emplace_back(std::make_unique<Rig>(dir, std::chrono::milliseconds(300), 12),
                      std::vector<float>(3 * kElements, 1.0f));
    Rig& rig = *kept.back().first;
    which = Op::read;
    at = 0;
    frozen = true;
    fault = Fault::dead;
    const auto lost = rig.submit(nullptr, true, 5);
    const auto memory = rig.submit(kept.back().second.data(), false, 1);
    CHECK(memory->wait(std::chrono::seconds(20)));
    memory->outcome();
    CHECK(kept.back().second == want);
    CHECK(lost->wait(std::chrono::seconds(20)));
    CHECK(must_throw<IoFailure>([&] { lost->outcome(); }).error.code == ETIMEDOUT);
    calm();
    rig.engine->close();
    rig.stepper->close();
    CHECK(kept.back().second == want);
}

static void everything(TempDir& dir) {
    memory_waits_for_no_reads(dir);
    memory_needs_no_drive(dir);
    short_transfers_change_nothing(dir);
    every_transfer_may_fail(dir);
    for (const Op op : {Op::read, Op::write})
        for (const int n : {0, 3})
            for (const bool engine_first : {false, true})
                for (const bool in_memory : {false, true})
                    a_lost_transfer_tells_everybody(dir, op, n, engine_first, in_memory);
}

int main() {
    {
        TempDir dir;
        everything(dir);
    }
    if (!probe_uring().empty()) {
        std::printf("stepper faults: ok (no io_uring: %s)\n", probe_uring().c_str());
        return 0;
    }
    TempDir dir;
    kind = EngineKind::uring;
    everything(dir);
    std::printf("stepper faults: ok\n");
}
