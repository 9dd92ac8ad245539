// The L2 norm of one array, bit for bit what torch.linalg.vector_norm(a.float()) gives on this processor.
#pragma once

#include <cstddef>

#include "dtype.hpp"

namespace tz {

struct Norm {
    float value = 0.0f;
    bool finite = true;  // every element is; the norm of finite elements may still overflow
};

// torch: eight lanes, multiply then add; lanes added in order 0..7; then the last n % 8 elements in order,
// four of them multiplied and added, the n % 4 after those contracted to fma (its compiler's doing; not on
// processors without AVX2). A single element gives its absolute value.
Norm l2_norm(const char* data, Dtype type, std::size_t n);
float l2_norm_scalar(const char* data, Dtype type, std::size_t n);  // the same value, portable C++

// into += more, rounded as torch's add_ does, and the norm of the sum, in one pass. `into` is float32 or of
// the same type as `more`.
Norm accumulate(char* into, Dtype into_type, const char* more, Dtype more_type, std::size_t n);

}  // namespace tz
