// The streamed step against whole-parameter adamw, over several files, threads and failing system calls.
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "adam.hpp"
#include "check.hpp"
#include "engine.hpp"
#include "slab.hpp"
#include "stepper.hpp"

using namespace tz;

static constexpr std::uint64_t kChunk = 10240, kElements = 31744, kSpan = 12 * kElements;

static std::atomic<int> writes_left{-1};
static ssize_t failing_pwrite(int fd, const void* p, std::size_t n, off_t at) {
    if (writes_left >= 0 && writes_left-- == 0) {
        errno = ENOSPC;
        return -1;
    }
    return ::pwrite(fd, p, n, at);
}
static const SysCalls kFailing{.pread = ::pread, .pwrite = failing_pwrite};

static std::shared_ptr<Engine> make_engine(unsigned depth, std::size_t block,
                                           EngineKind kind = EngineKind::automatic,
                                           const SysCalls& calls = SysCalls::real()) {
    EngineOptions options;
    options.kind = kind;
    options.depth = depth;
    options.block = block;
    options.calls = calls;
    return std::make_shared<Engine>(options);
}

struct Planes {
    std::vector<float> p, m, v;
};

static AdamScalars scalars(int turn) {
    return {1 - 1e-5f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f / static_cast<float>(turn + 1), 0.5f, 0.25f};
}

static Planes make_planes(unsigned seed) {
    Planes out{normal(kElements, seed), normal(kElements, seed + 1), normal(kElements, seed + 2)};
    for (float& x : out.v) x = x * x;
    return out;
}

static std::vector<float> layout(const Planes& a, std::uint64_t chunk) {
    std::vector<float> out;
    for (std::uint64_t at = 0; at < kElements; at += chunk) {
        const auto n = static_cast<std::ptrdiff_t>(std::min(chunk, kElements - at));
        for (const auto* plane : {&a.p, &a.m, &a.v})
            out.insert(out.end(), plane->begin() + static_cast<std::ptrdiff_t>(at),
                       plane->begin() + static_cast<std::ptrdiff_t>(at) + n);
    }
    return out;
}

// Three parameters: across two chunks, without a gradient, and to the record's very end.
static std::vector<Segment> segments(int turn) {
    return {{.first = 64,
             .count = 3001,
             .grad = 1,
             .grad_type = Dtype::bf16,
             .out = 128,
             .out_type = Dtype::bf16,
             .scalars = scalars(turn)},
            {.first = 3072, .count = 100, .out = 6144, .out_type = Dtype::f16, .scalars = scalars(turn)},
            {.first = 3200,
             .count = kElements - 3200,
             .grad = 8192,
             .grad_type = Dtype::f32,
             .out = 6400,
             .out_type = Dtype::bf16,
             .scalars = scalars(turn)}};
}

static void step_whole(Planes& a, const std::vector<char>& grads, int turn) {
    for (const Segment& s : segments(turn))
        if (s.grad >= 0)
            adamw({a.p.data() + s.first, a.m.data() + s.first, a.v.data() + s.first, nullptr,
                   grads.data() + s.grad, nullptr},
                  s.count, {s.grad_type, false, Dtype::f32}, s.scalars, 1);
}

static std::vector<char> copy_of(const Planes& a) {
    std::vector<char> out(2 * kElements, 0);
    for (const Segment& s : segments(0))
        cast_floats(a.p.data() + s.first, out.data() + s.out, s.out_type, s.count);
    return out;
}

static std::vector<char> make_grads() {
    const auto g = normal(kElements, 99);
    std::vector<char> out(8192 + 4 * kElements);
    cast_floats(g.data(), out.data() + 1, Dtype::bf16, 3001);
    std::memcpy(out.data() + 8192, g.data(), 4 * (kElements - 3200));
    return out;
}

static void put(Engine& engine, File& file, std::uint64_t at, std::vector<float> data) {
    const auto ticket =
        engine.transfer(Op::write, file, at, reinterpret_cast<char*>(data.data()), 4 * data.size());
    CHECK(ticket->wait(std::nullopt));
    ticket->outcome();
}

template <class T>
static std::vector<T> get(Engine& engine, File& file, std::uint64_t at, std::size_t n) {
    std::vector<T> data(n);
    const auto ticket =
        engine.transfer(Op::read, file, at, reinterpret_cast<char*>(data.data()), n * sizeof(T));
    CHECK(ticket->wait(std::nullopt));
    ticket->outcome();
    return data;
}

static Record record_on(const File& file, std::uint64_t src, std::uint64_t dst, std::uint64_t out,
                        const std::vector<char>& grads, int turn) {
    Record r;
    r.elements = kElements;
    r.segments = segments(turn);
    r.grads = grads.data();
    r.grads_size = grads.size();
    r.src = Place{file.open(), src};
    r.dst = Place{file.open(), dst};
    r.out_file = Place{file.open(), out};
    r.out_bytes = 2 * kElements;
    return r;
}

// Every turn reads what the turn before wrote, all queued at once, with slots enough to run ahead of the
// writes.
static void streams_records(TempDir& dir, std::size_t records, std::uint64_t chunk, std::size_t slots,
                            bool direct, unsigned threads) {
    const auto grads = make_grads();
    auto engine = make_engine(4, 8192);
    File file(dir.file("stream"), true, direct);
    Slab buffers(14 * chunk * slots);
    std::memset(buffers.data(), 0x5a, buffers.size());
    Stepper stepper(engine, buffers.data(), buffers.size(), chunk, threads);
    const std::uint64_t copies = 16 * kSpan, copy_span = 2 * kElements + 2048;
    std::vector<Planes> planes;
    for (unsigned i = 0; i < records; ++i) {
        planes.push_back(make_planes(10 * i));
        put(*engine, file, 2 * i * kSpan, layout(planes[i], chunk));
    }
    const unsigned turns = 6;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (unsigned turn = 0; turn < turns; ++turn)
        for (std::uint64_t i = 0; i < records; ++i)
            tickets.push_back(
                stepper.submit(record_on(file, (2 * i + turn % 2) * kSpan, (2 * i + 1 - turn % 2) * kSpan,
                                         copies + i * copy_span, grads, static_cast<int>(turn))));
    for (std::size_t t = 0; t < tickets.size(); ++t) {
        CHECK(tickets[t]->wait(std::nullopt));
        Planes& a = planes[t % records];
        step_whole(a, grads, static_cast<int>(t / records));
        const auto want = layout(a, chunk);
        const auto copy = copy_of(a);
        CHECK(tickets[t]->outcome().state == checksum(want.data(), 4 * want.size(), 0));
        CHECK(tickets[t]->outcome().copy == checksum(copy.data(), copy.size(), 0));
    }
    CHECK(engine->completions()->reap().size() == tickets.size() + records);
    for (std::size_t i = 0; i < records; ++i) {
        auto copy = copy_of(planes[i]);
        copy.resize(copy_span, 0);  // padded with zero bytes to 4096
        CHECK(same_bytes(get<float>(*engine, file, 2 * i * kSpan, 3 * kElements), layout(planes[i], chunk)));
        CHECK(same_bytes(get<char>(*engine, file, copies + i * copy_span, copy_span), copy));
    }
}

static void every_write_may_fail(TempDir& dir) {
    const auto grads = make_grads();
    auto engine = make_engine(2, 8192, EngineKind::pool, kFailing);
    File file(dir.file("fails"), true, true);
    Slab buffers(14 * kChunk * 3);
    Stepper stepper(engine, buffers.data(), buffers.size(), kChunk, 1);
    const auto before = layout(make_planes(5), kChunk);
    put(*engine, file, 0, before);
    put(*engine, file, kSpan, before);
    for (int n = 0; n < 12; ++n) {
        writes_left = n;
        const auto bad = stepper.submit(record_on(file, 0, kSpan, 2 * kSpan, grads, 0));
        CHECK(bad->wait(std::nullopt));
        const auto failure = must_throw<IoFailure>([&] { bad->outcome(); });
        CHECK(failure.error.code == ENOSPC && failure.error.path == file.path());
        writes_left = -1;
        CHECK(same_bytes(get<float>(*engine, file, 0, 3 * kElements), before));
        const auto good = stepper.submit(record_on(file, 0, kSpan, 2 * kSpan, grads, 0));
        CHECK(good->wait(std::nullopt));
        good->outcome();
    }
    // In memory the state is finished all the same: it must not be left half a step behind.
    Planes a = make_planes(5);
    auto state = layout(a, kChunk);
    Record r = record_on(file, 0, kSpan, 2 * kSpan, grads, 0);
    r.src.reset();
    r.dst.reset();
    r.state = reinterpret_cast<char*>(state.data());
    writes_left = 0;
    const auto bad = stepper.submit(std::move(r));
    CHECK(bad->wait(std::nullopt));
    must_throw<IoFailure>([&] { bad->outcome(); });
    writes_left = -1;
    step_whole(a, grads, 0);
    CHECK(same_bytes(state, layout(a, kChunk)));
}

static void closes_with_work_queued(TempDir& dir) {
    const auto grads = make_grads();
    File file(dir.file("closes"), true, true);
    Slab buffers(14 * kChunk * 3);
    for (const bool engine_first : {false, true}) {
        auto engine = make_engine(2, 8192);
        put(*engine, file, 0, layout(make_planes(1), kChunk));
        std::vector<std::shared_ptr<Ticket>> tickets;
        Stepper stepper(engine, buffers.data(), buffers.size(), kChunk, 2);
        for (int i = 0; i < 10; ++i)
            tickets.push_back(stepper.submit(record_on(file, 0, kSpan, 2 * kSpan, grads, i)));
        if (engine_first) engine->close();
        stepper.close();
        for (const auto& ticket : tickets) {
            CHECK(ticket->done());
            ticket->outcome();
        }
        must_throw<std::invalid_argument>(
            [&] { stepper.submit(record_on(file, 0, kSpan, 2 * kSpan, grads, 0)); });
    }
}

int main() {
    TempDir dir;
    for (const bool direct : {true, false})
        for (const unsigned threads : {1u, 3u}) {
            streams_records(dir, 4, 2048, 4, direct, threads);
            streams_records(dir, 1, 2048, 40, direct, threads);
            streams_records(dir, 1, 10240, 12, direct, threads);
            streams_records(dir, 2, 20480, 3, direct, threads);
        }
    every_write_may_fail(dir);
    closes_with_work_queued(dir);
    std::printf("stepper: ok\n");
}
