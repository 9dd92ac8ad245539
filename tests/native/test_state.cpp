// State formats: every float32 survives the split, the 8-bit errors are within the stated bounds, rounding is
// right on average, and all instruction sets, chunks and cuts give the same bytes.
#include <bit>
#include <cmath>
#include <cstdlib>

#include "check.hpp"
#include "cpu.hpp"
#include "noise.hpp"
#include "state_codec.hpp"
#include "state_update.hpp"

using namespace tz;

static std::vector<Isa> isas() {
    std::vector<Isa> out;
    for (const Isa one : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon})
        if (isa_available(one)) out.push_back(one);
    return out;
}

// Every high half with all low halves near a boundary, or with TIERZERO_TEST_ALL all 2^32 patterns.
static void split_is_exact() {
    const bool all = std::getenv("TIERZERO_TEST_ALL") != nullptr;
    std::vector<std::uint32_t> lows;
    for (std::uint32_t low = 0; low < 65536; ++low)
        if (all || low < 3 || low % 0x1999 == 0 || (low > 0x7ffc && low < 0x8004) || low > 0xfffc)
            lows.push_back(low);
    const std::size_t n = lows.size();
    std::vector<float> p(n), sq(n), back(n);
    std::vector<std::uint16_t> high(n), low(n);
    for (const Isa isa : isas()) {
        const StateCodec& codec = state_codec(isa);
        for (std::uint32_t h = 0; h < 65536; ++h) {
            for (std::size_t i = 0; i < n; ++i) {
                p[i] = std::bit_cast<float>(h << 16 | lows[i]);
                high[i] = float_to_bf16(p[i]);
                sq[i] = static_cast<float>(i);
            }
            codec.cut(p.data(), low.data(), sq.data(), n);
            codec.join(reinterpret_cast<const char*>(high.data()), low.data(), sq.data(), back.data(), n);
            for (std::size_t i = 0; i < n; ++i) {
                const auto want = std::bit_cast<std::uint32_t>(p[i]),
                           got = std::bit_cast<std::uint32_t>(back[i]);
                CHECK(got == (p[i] == p[i] ? want : want | 0x400000u));
                CHECK(sq[i] == static_cast<float>(i));
            }
        }
    }
    // A parameter that somebody set to zero stays one, whatever its low bits were.
    const std::uint16_t zeros[2] = {0, 0x8000}, rest[2] = {0xffff, 0x9000};
    float ones[2] = {1, 1}, masters[2];
    state_codec().join(reinterpret_cast<const char*>(zeros), rest, ones, masters, 2);
    CHECK(std::fabs(masters[0]) < 1e-40f && std::fabs(masters[1]) < 1e-40f);
}

static void codecs_agree() {
    const std::size_t n = 256;
    for (const Isa isa : isas())
        for (unsigned seed = 0; seed < 300; ++seed) {
            const StateCodec &a = state_codec(isa), &b = state_codec_scalar();
            const std::size_t count = seed % 3 ? n : 1 + seed % n;
            auto from = normal(n, seed, std::pow(10.0f, static_cast<float>(seed % 80) - 45.0f));
            for (std::size_t i = 0; i < n; ++i)
                if (i % 7 == seed % 7) from[i] *= 1e-6f;
            if (seed % 50 == 49) from[3] = std::nanf("");
            std::vector<std::uint32_t> x(n), y(n);
            a.noise(seed, (std::uint64_t{1} << 32) - 100, x.data(), n);
            b.noise(seed, (std::uint64_t{1} << 32) - 100, y.data(), n);
            CHECK(same_bytes(x, y));
            std::vector<std::uint16_t> h(n), h2(n);
            a.narrow(from.data(), h.data(), x.data(), 16, n);
            b.narrow(from.data(), h2.data(), x.data(), 16, n);
            CHECK(same_bytes(h, h2));
            std::vector<std::uint8_t> c(n), c2(n);
            std::vector<float> v(n), v2(n);
            float s, s2;
            a.signed_codes(from.data(), c.data(), &s, x.data(), 0, count);
            b.signed_codes(from.data(), c2.data(), &s2, x.data(), 0, count);
            CHECK(same_bytes(c, c2) && std::memcmp(&s, &s2, 4) == 0);
            a.signed_values(c.data(), s, v.data(), count);
            b.signed_values(c.data(), s, v2.data(), count);
            CHECK(same_bytes(v, v2));
            a.square_codes(from.data(), c.data(), &s, x.data(), 0, count);
            b.square_codes(from.data(), c2.data(), &s2, x.data(), 0, count);
            CHECK(same_bytes(c, c2) && std::memcmp(&s, &s2, 4) == 0);
            a.square_values(c.data(), s, v.data(), count);
            b.square_values(c.data(), s, v2.data(), count);
            CHECK(same_bytes(v, v2));
        }
}

static void errors_are_bounded_and_average_out() {
    const std::size_t n = kBlock;
    const StateCodec& codec = state_codec();
    for (unsigned seed = 0; seed < 20; ++seed) {
        auto m = normal(n, seed, std::pow(10.0f, static_cast<float>(seed) - 12.0f));
        for (std::size_t i = 0; i < n; i += 3) m[i] *= 1e-3f;
        auto sq = m;
        for (float& x : sq) x = x * x;
        std::vector<double> sum_m(n), sum_sq(n), sum_half(n);
        std::vector<std::uint32_t> noise(n);
        std::vector<std::uint8_t> codes(n);
        std::vector<std::uint16_t> half(n);
        std::vector<float> back(n);
        float scale = 0, sq_scale = 0;
        const int rounds = 4000;
        for (int round = 0; round < rounds; ++round) {
            codec.noise(static_cast<std::uint64_t>(round), 1000 * seed, noise.data(), n);
            codec.signed_codes(m.data(), codes.data(), &scale, noise.data(), 0, n);
            codec.signed_values(codes.data(), scale, back.data(), n);
            for (std::size_t i = 0; i < n; ++i) {
                const double s = scale, t = std::fabs(m[i]) / s;
                CHECK(std::fabs(double(back[i]) - m[i]) <=
                      s * (2 * std::sqrt(t) / 127 + 1 / 16129.0) * 1.00001);
                sum_m[i] += back[i];
            }
            codec.square_codes(sq.data(), codes.data(), &sq_scale, noise.data(), 16, n);
            codec.square_values(codes.data(), sq_scale, back.data(), n);
            for (std::size_t i = 0; i < n; ++i) {
                const double s = sq_scale, t = sq[i] / s;
                CHECK(std::fabs(std::sqrt(double(back[i])) - std::sqrt(double(sq[i]))) <=
                      std::sqrt(s) * (2 * std::pow(t, 0.25) / 255 + 1 / 65025.0) * 1.00001);
                CHECK(sq[i] == 0 || back[i] > 0);
                sum_sq[i] += back[i];
            }
            codec.narrow(m.data(), half.data(), noise.data(), 0, n);
            codec.widen(half.data(), back.data(), n);
            for (std::size_t i = 0; i < n; ++i) {
                CHECK(std::fabs(back[i] - m[i]) <= std::fabs(m[i]) / 128);
                sum_half[i] += back[i];
            }
        }
        // Six standard deviations of a mean of `rounds` draws between two neighbouring codes.
        const double six = 6 * 0.5 / std::sqrt(double(rounds));
        for (std::size_t i = 0; i < n; ++i) {
            const double t = std::fabs(m[i]) / scale, root = std::pow(sq[i] / sq_scale, 0.25);
            const double step = scale * (2 * std::sqrt(t) / 127 + 1 / 16129.0);
            CHECK(std::fabs(sum_m[i] / rounds - m[i]) <= six * step);
            CHECK(std::fabs(sum_half[i] / rounds - m[i]) <= six * std::fabs(m[i]) / 128);
            if (root * 255 < 1) continue;  // held above zero: too large on purpose
            const double width = sq_scale * (std::pow(root + 1 / 255.0, 4) - std::pow(root - 1 / 255.0, 4));
            CHECK(std::fabs(sum_sq[i] / rounds - sq[i]) <= six * width);
        }
    }
}

static void noise_is_even() {
    std::vector<std::uint32_t> words(1 << 16);
    for (const std::uint64_t key : {0ull, 1ull, 2ull, 1ull << 63}) {
        state_codec().noise(key, 0, words.data(), words.size());
        int ones[32] = {}, same = 0;
        for (std::size_t i = 0; i < words.size(); ++i) {
            for (int bit = 0; bit < 32; ++bit) ones[bit] += (words[i] >> bit) & 1;
            same += (words[i] & 0xffff) == (words[i] >> 16);
        }
        for (const int count : ones) CHECK(std::abs(count - 32768) < 6 * 128);
        CHECK(same < 12);
    }
}

static const StateFormat kFormats[] = {
    {},
    {.amsgrad = true},
    {.avg = Moment::bf16, .sq = Moment::bf16},
    {.avg = Moment::u8, .sq = Moment::u8},
    {.avg = Moment::u8, .sq = Moment::f32, .amsgrad = true},
    {.master = Master::split},
    {.master = Master::split, .avg = Moment::bf16, .sq = Moment::bf16, .amsgrad = true},
    {.master = Master::split, .avg = Moment::u8, .sq = Moment::u8, .amsgrad = true},
    {.master = Master::none, .avg = Moment::u8, .sq = Moment::bf16},
};

static void layouts_hold_every_byte_once() {
    CHECK(StateFormat{}.record_bytes(31744, 2048) == 12 * 31744);
    CHECK((StateFormat{.master = Master::split}.chunk_bytes(4096) == 10 * 4096));
    for (const StateFormat& format : kFormats)
        for (const std::uint64_t c : {1024u, 2048u, 7168u}) {
            const StateLayout layout = format.layout(c);
            std::vector<char> seen(layout.bytes, 0);
            for (const Stream* stream : layout.streams())
                for (std::uint64_t e = 0; stream->size && e < c; e += stream->per)
                    for (std::uint64_t b = 0; b < stream->size; ++b) CHECK(seen.at(stream->at(e) + b)++ == 0);
            for (std::uint64_t b = 0; b < layout.bytes; ++b) CHECK(seen[b] == (b < layout.used));
            CHECK(layout.bytes % 4096 == 0 && layout.bytes - layout.used < 4096);
        }
}

// One parameter, whole or cut anywhere the format allows: the same state, step after step.
static void cuts_change_nothing() {
    const std::size_t n = 3 * 1024 - 5, c = 3 * 1024;
    for (const StateFormat& format : kFormats) {
        const StateLayout layout = format.layout(c);
        const Dtype out_type = format.master == Master::none ? Dtype::f32 : Dtype::bf16;
        const AdamTypes types{Dtype::f32, true, out_type, false, format.amsgrad};
        std::vector<char> a(layout.bytes), params(4 * c);
        auto p = normal(c, 1), m = normal(c, 2), v = normal(c, 3);
        for (float& x : v) x = x * x;
        pack_stretch(format, layout, a.data(), 0, c, {p.data(), m.data(), v.data(), v.data()}, params.data());
        auto b = a, params2 = params;
        for (unsigned step = 1; step < 5; ++step) {
            const AdamScalars s{1 - 1e-5f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 0.5f, 1.0f};
            const auto g = normal(c, 10 + step);
            const auto stretch = [&](std::vector<char>& state, std::vector<char>& out, std::size_t at,
                                     std::size_t count) {
                const std::size_t size = size_of(out_type);
                return Stretch{.state = state.data(),
                               .at = at,
                               .count = count,
                               .params = out.data() + at * size,
                               .grad = reinterpret_cast<const char*>(g.data() + at),
                               .out = out.data() + at * size,
                               .noise = {step, (std::uint64_t{1} << 32) - 999 + at}};
            };
            update_stretch(format, layout, stretch(a, params, 0, n), types, s);
            const std::size_t cut = step * format.granule();
            update_stretch(format, layout, stretch(b, params2, cut, n - cut), types, s);
            update_stretch(format, layout, stretch(b, params2, 0, cut), types, s);
            CHECK(same_bytes(a, b) && same_bytes(params, params2));
        }
        std::vector<float> q(c), r(c), t(c), u(c);
        const auto before = a;
        unpack_stretch(format, layout, a.data(), 0, c, params.data(),
                       {q.data(), r.data(), t.data(), u.data()});
        CHECK(same_bytes(a, before));
        for (const float x : t) CHECK(x >= 0 && !std::signbit(x));
        auto params3 = params;
        pack_stretch(format, layout, b.data(), 0, c, {q.data(), r.data(), t.data(), u.data()},
                     params3.data());
        CHECK(same_bytes(a, b) && same_bytes(params, params3));
    }
}

int main() {
    split_is_exact();
    codecs_agree();
    errors_are_bounded_and_average_out();
    noise_is_even();
    layouts_hold_every_byte_once();
    cuts_change_nothing();
    std::printf("state formats (%s): ok\n", isa_name(isa()));
}
