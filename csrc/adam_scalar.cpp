// The portable kernel: the oracle for processors without a vector path.
#include "adam_element.hpp"

namespace tz {

namespace {

template <Dtype G, int O, bool L2, bool X>
struct Scalar {
    static void run(const AdamArrays& a, std::size_t n, const AdamScalars& s) {
        for (std::size_t i = 0; i < n / 8 * 8; ++i) adam_element<G, O, L2, X, false>(a, i, s);
        adam_tail<G, O, L2, X>(a, n, s);
    }
};

}  // namespace

AdamKernel adam_kernel_scalar(const AdamTypes& types) {
    return pick_kernel<Scalar>(types);
}

}  // namespace tz
