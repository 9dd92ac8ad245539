// What this processor can do, and which kernels are chosen for it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#define TZ_X86 1
#define TZ_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TZ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#elif defined(__aarch64__)
#define TZ_NEON_CPU 1
#endif

namespace tz {

enum class Isa { scalar, avx2, avx512, neon };

std::vector<std::pair<std::string, bool>> cpu_features();
// Whether torch's AVX2 kernels, with their contractions, are the ones that run on this processor.
bool has_fma();

const char* isa_name(Isa isa);
bool isa_available(Isa isa);
// The best of this processor, or what TIERZERO_ISA asked for when it was first needed. An unknown name, or
// one that this processor cannot run, leaves the best and is said in isa_warning().
Isa isa();
const std::string& isa_warning();  // a sentence, or ""

// Eight lanes (AVX2 + FMA + F16C) may be used.
inline bool use_avx2() {
    return isa() == Isa::avx2 || isa() == Isa::avx512;
}

}  // namespace tz
