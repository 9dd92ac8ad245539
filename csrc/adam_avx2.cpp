// The AVX2 + FMA kernel: eight lanes.
#include "adam_element.hpp"
#include "lanes_avx2.hpp"

namespace tz {

#ifdef TZ_X86

namespace {

template <Dtype G, int O, bool L2, bool X>
struct Rest {
    TZ_AVX2 static void run(const AdamArrays& a, std::size_t n, const AdamScalars& s) {
        adam_tail<G, O, L2, X>(a, n, s);
    }
};
using L = Avx2Lanes;
#define TZ_TARGET TZ_AVX2
#include "adam_loop.inc"

}  // namespace

AdamKernel adam_kernel_avx2(const AdamTypes& types) {
    return pick_kernel<Vector>(types);
}

#else

AdamKernel adam_kernel_avx2(const AdamTypes&) {
    return nullptr;
}

#endif

}  // namespace tz
