// Vector and portable kernels give the same bits; conversions and checksums are their definitions.
#include <cmath>

#include "adam.hpp"
#include "check.hpp"
#include "checksum.hpp"
#include "cpu.hpp"
#include "norm.hpp"

using namespace tz;

static const Dtype kTypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

static std::vector<char> convert(const std::vector<float>& from, Dtype type, std::size_t shift) {
    std::vector<char> out(from.size() * size_of(type) + shift);
    cast_floats(from.data(), out.data() + shift, type, from.size());
    return out;
}

static void half_conversions_invert() {
    for (unsigned bits = 0; bits < 65536; ++bits) {
        const auto h = static_cast<std::uint16_t>(bits);
        const float f = f16_to_float(h), b = bf16_to_float(h);
        CHECK(f != f || float_to_f16(f) == h);
        CHECK(b != b || float_to_bf16(b) == h);
        CHECK(f == f || f16_to_float(float_to_f16(f)) != f16_to_float(float_to_f16(f)));
        CHECK(b == b || bf16_to_float(float_to_bf16(b)) != bf16_to_float(float_to_bf16(b)));
    }
}

// Every representable midpoint and its neighbours: nearest, ties to even.
static void half_rounding_is_nearest_even() {
    for (unsigned bits = 0; bits < 0x7bff; ++bits) {
        const auto low = static_cast<std::uint16_t>(bits), high = static_cast<std::uint16_t>(bits + 1);
        const float a = f16_to_float(low), b = f16_to_float(high), middle = a + (b - a) / 2;
        CHECK(float_to_f16(middle) == ((bits & 1) ? high : low));
        CHECK(float_to_f16(std::nextafterf(middle, a)) == low);
        CHECK(float_to_f16(std::nextafterf(middle, b)) == high);
    }
    CHECK(float_to_f16(65519.996f) == 0x7bff && float_to_f16(65520.0f) == 0x7c00);
}

static std::vector<Isa> isas() {
    std::vector<Isa> out;
    for (const Isa one : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon})
        if (isa_available(one)) out.push_back(one);
    return out;
}

static void kernels_agree() {
    AdamScalars s{1 - 1e-5f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 0.5f, 0.7f, 0.01f};
    for (const Isa isa : isas())
        for (const Dtype grad : kTypes)
            for (int flags = 0; flags < 8; ++flags)
                for (int out = -1; out < 3; ++out)
                    for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 15u, 16u, 23u, 24u, 25u, 63u, 1003u}) {
                        s.w1 = flags & 4 ? 0.75f : 0.1f;  // torch's lerp starts from the gradient or not
                        const AdamTypes types{grad, out >= 0, out >= 0 ? kTypes[out] : Dtype::f32,
                                              (flags & 1) != 0, (flags & 2) != 0};
                        const AdamKernel fast = adam_kernel(types, isa), plain = adam_kernel_scalar(types);
                        auto p = normal(n, 1), m = normal(n, 2), v = normal(n, 3), x = normal(n, 5);
                        for (float& value : v) value = value * value;
                        for (float& value : x) value = value * value;
                        const std::size_t shift = n % 3;  // records pack at any byte
                        const auto g = convert(normal(n, 4), grad, shift);
                        auto p2 = p, m2 = m, v2 = v, x2 = x;
                        std::vector<char> o(n * 4 + shift, 'x'), o2(n * 4 + shift, 'x');
                        fast({p.data(), m.data(), v.data(), flags & 2 ? x.data() : nullptr, g.data() + shift,
                              out < 0 ? nullptr : o.data() + shift},
                             n, s);
                        plain({p2.data(), m2.data(), v2.data(), flags & 2 ? x2.data() : nullptr,
                               g.data() + shift, out < 0 ? nullptr : o2.data() + shift},
                              n, s);
                        CHECK(same_bytes(p, p2) && same_bytes(m, m2) && same_bytes(v, v2) &&
                              same_bytes(x, x2));
                        CHECK(same_bytes(o, o2));
                    }
}

static void cutting_at_multiples_of_8_changes_nothing() {
    const AdamScalars s{1 - 1e-5f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 0.5f, 1.0f};
    const AdamTypes types{Dtype::f32, false, Dtype::f32};
    const std::size_t n = 1205;
    for (const std::size_t cut : {8u, 64u, 1200u}) {
        auto p = normal(n, 1), m = normal(n, 2), v = normal(n, 3);
        for (float& x : v) x = x * x;
        const auto g = convert(normal(n, 4), Dtype::f32, 0);
        auto p2 = p, m2 = m, v2 = v;
        adamw({p.data(), m.data(), v.data(), nullptr, g.data(), nullptr}, n, types, s, 3);
        const auto kernel = adam_kernel(types);
        kernel({p2.data(), m2.data(), v2.data(), nullptr, g.data(), nullptr}, cut, s);
        kernel({p2.data() + cut, m2.data() + cut, v2.data() + cut, nullptr, g.data() + 4 * cut, nullptr},
               n - cut, s);
        CHECK(same_bytes(p, p2) && same_bytes(m, m2) && same_bytes(v, v2));
    }
}

static void norms_agree() {
    for (const Dtype type : kTypes)
        for (std::size_t n = 0; n < 300; ++n) {
            const auto data = convert(normal(n, static_cast<unsigned>(n), 3.0f), type, n % 2);
            const float a = l2_norm(data.data() + n % 2, type, n).value,
                        b = l2_norm_scalar(data.data() + n % 2, type, n);
            CHECK(std::memcmp(&a, &b, 4) == 0);
        }
}

static void checksums_are_their_definition() {
    std::mt19937 generator(7);
    for (const std::size_t n : {0u, 1u, 3u, 4u, 63u, 64u, 65u, 127u, 128u, 1000u, 65537u}) {
        std::vector<unsigned char> data(n);
        for (auto& byte : data) byte = static_cast<unsigned char>(generator());
        const std::uint64_t offset = generator();
        Checksum want;
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint64_t part = static_cast<std::uint64_t>(data[i]) << (8 * (i % 4));
            want.s1 += part;
            want.s2 += (offset + i / 4 + 1) * part;
        }
        CHECK(checksum(data.data(), n, offset) == want);
        const std::size_t cut = n / 2 / 4 * 4;
        Checksum sum = checksum(data.data(), cut, offset);
        sum += checksum(data.data() + cut, n - cut, offset + cut / 4);
        CHECK(sum == want);
    }
}

int main() {
    half_conversions_invert();
    half_rounding_is_nearest_even();
    kernels_agree();
    cutting_at_multiples_of_8_changes_nothing();
    norms_agree();
    checksums_are_their_definition();
    std::printf("kernels (%s): ok\n", isa_name(isa()));
}
