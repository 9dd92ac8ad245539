#include "cpu.hpp"

#include <cstdlib>

namespace tz {

namespace {

constexpr Isa kAll[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::neon};

struct Choice {
    Isa isa;
    std::string warning;
};

Choice choose() {
    Isa best = Isa::scalar;
    std::string names;
    for (const Isa one : kAll)
        if (isa_available(one)) {
            best = one;
            names += (names.empty() ? "" : ", ") + std::string(isa_name(one));
        }
    const char* asked = std::getenv("TIERZERO_ISA");
    if (asked == nullptr || *asked == '\0') return {best, ""};
    for (const Isa one : kAll)
        if (std::string(asked) == isa_name(one) && isa_available(one)) return {one, ""};
    return {best, "TIERZERO_ISA=" + std::string(asked) + " cannot be used on this processor: using " +
                      isa_name(best) + "; it may be one of " + names};
}

const Choice& choice() {
    static const Choice chosen = choose();
    return chosen;
}

}  // namespace

std::vector<std::pair<std::string, bool>> cpu_features() {
#ifdef TZ_X86
    __builtin_cpu_init();
    return {{"avx2", __builtin_cpu_supports("avx2") != 0},
            {"fma", __builtin_cpu_supports("fma") != 0},
            {"f16c", __builtin_cpu_supports("f16c") != 0},
            {"avx512f", __builtin_cpu_supports("avx512f") != 0},
            {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
            {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
            {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
            {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0}};
#elif defined(TZ_NEON_CPU)
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

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::scalar:
            return "scalar";
        case Isa::avx2:
            return "avx2";
        case Isa::avx512:
            return "avx512";
        case Isa::neon:
            return "neon";
    }
    return "?";
}

bool isa_available(Isa isa) {
    if (isa == Isa::scalar) return true;
#ifdef TZ_X86
    const bool avx2 = has_fma() && __builtin_cpu_supports("f16c");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(TZ_NEON_CPU)
    if (isa == Isa::neon) return true;
#endif
    return false;
}

Isa isa() {
    return choice().isa;
}

const std::string& isa_warning() {
    return choice().warning;
}

}  // namespace tz
