// The L2 norm of one array, bit for bit what torch.linalg.vector_norm(a.float()) gives on this processor.
#pragma once

#include <cstddef>

#include "dtype.hpp"

namespace tz {

// torch: eight lanes, multiply then add; lanes added in order 0..7; then the last n % 8 elements in order,
// four of them multiplied and added, the n % 4 after those contracted to fma (its compiler's doing; not on
// processors without AVX2). A single element gives its absolute value.
float l2_norm(const char* data, Dtype type, std::size_t n);
float l2_norm_scalar(const char* data, Dtype type, std::size_t n);  // the same value, portable C++

}  // namespace tz
