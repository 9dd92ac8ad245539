// What this processor can do, and which kernels are chosen for it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#define TZ_X86 1
#define TZ_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace tz {

std::vector<std::pair<std::string, bool>> cpu_features();
// Whether torch's AVX2 kernels, with their contractions, are the ones that run on this processor.
bool has_fma();
// AVX2 + FMA + F16C, unless TIERZERO_ISA=scalar was set when the library was loaded.
bool use_avx2();

}  // namespace tz
