// The NEON kernel: four lanes, of which a parameter has an even number before its tail.
#include "adam_element.hpp"
#include "lanes_neon.hpp"

namespace tz {

#ifdef TZ_NEON_CPU

namespace {

template <Dtype G, int O, bool L2, bool X>
struct Rest {
    static void run(const AdamArrays& a, std::size_t n, const AdamScalars& s) {
        adam_tail<G, O, L2, X>(a, n, s);
    }
};
using L = NeonLanes;
#define TZ_TARGET
#include "adam_loop.inc"

}  // namespace

AdamKernel adam_kernel_neon(const AdamTypes& types) {
    return pick_kernel<Vector>(types);
}

#else

AdamKernel adam_kernel_neon(const AdamTypes&) {
    return nullptr;
}

#endif

}  // namespace tz
