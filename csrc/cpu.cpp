#include "cpu.hpp"

#include <cstdlib>
#include <cstring>

namespace tz {

std::vector<std::pair<std::string, bool>> cpu_features() {
#ifdef TZ_X86
    __builtin_cpu_init();
    return {{"avx2", __builtin_cpu_supports("avx2") != 0},
            {"fma", __builtin_cpu_supports("fma") != 0},
            {"f16c", __builtin_cpu_supports("f16c") != 0},
            {"avx512f", __builtin_cpu_supports("avx512f") != 0},
            {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
            {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
            {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0}};
#elif defined(__aarch64__)
    return {{"neon", true}};
#else
    return {};
#endif
}

bool has_fma() {
#ifdef TZ_X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool use_avx2() {
    static const bool chosen = [] {
        const char* isa = std::getenv("TIERZERO_ISA");
        if (isa != nullptr && std::strcmp(isa, "scalar") == 0) return false;
#ifdef TZ_X86
        return has_fma() && __builtin_cpu_supports("f16c");
#else
        return false;
#endif
    }();
    return chosen;
}

}  // namespace tz
