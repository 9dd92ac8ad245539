// The portable kernel: the oracle for processors without a vector path.
#include "adam_element.hpp"
#include "adam_table.hpp"

namespace tz {

namespace {

template <Dtype G, int O>
struct Scalar {
    static void run(float* p, float* m, float* v, const char* grad, char* out, std::size_t n,
                    const AdamScalars& s) {
        const std::size_t body = n / 8 * 8;
        for (std::size_t i = 0; i < body; ++i) {
            const float value =
                adam_element<false>(p + i, m + i, v + i, load_as_float<G>(grad + i * size_of(G)), s);
            if constexpr (O >= 0)
                store_float<static_cast<Dtype>(O)>(out + i * size_of(static_cast<Dtype>(O)), value);
        }
        adam_tail<G, O>(p, m, v, grad, out, body, n, s);
    }
};

}  // namespace

AdamKernel adam_kernel_scalar(const AdamTypes& types) {
    return pick_kernel<Scalar>(types);
}

}  // namespace tz
