// The AVX-512 kernel: sixteen lanes.
#include "adam_element.hpp"
#include "lanes_avx512.hpp"

namespace tz {

#ifdef TZ_X86

namespace {

// Of up to fifteen elements the first eight, if there are that many, are no tail.
template <Dtype G, int O, bool L2, bool X>
struct Rest {
    TZ_AVX512 static void run(const AdamArrays& a, std::size_t n, const AdamScalars& s) {
        for (std::size_t i = 0; i < n / 8 * 8; ++i) adam_element<G, O, L2, X, false>(a, i, s);
        adam_tail<G, O, L2, X>(a, n, s);
    }
};
using L = Avx512Lanes;
#define TZ_TARGET TZ_AVX512
#include "adam_loop.inc"

}  // namespace

AdamKernel adam_kernel_avx512(const AdamTypes& types) {
    return pick_kernel<Vector>(types);
}

#else

AdamKernel adam_kernel_avx512(const AdamTypes&) {
    return nullptr;
}

#endif

}  // namespace tz
