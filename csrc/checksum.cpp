#include "checksum.hpp"

#include <bit>
#include <cstring>

#include "cpu.hpp"

#ifdef TZ_X86
#include <immintrin.h>
#endif

namespace tz {

namespace {

std::uint32_t word_at(const unsigned char* p, std::size_t nbytes) {
    unsigned char raw[4] = {0, 0, 0, 0};
    std::memcpy(raw, p, nbytes < 4 ? nbytes : 4);
    std::uint32_t w;
    std::memcpy(&w, raw, 4);
    if constexpr (std::endian::native == std::endian::big) w = __builtin_bswap32(w);
    return w;
}

Checksum words(const unsigned char* p, std::size_t nbytes, std::uint64_t offset) {
    Checksum sum;
    for (std::size_t i = 0; i < nbytes; i += 4) {
        const std::uint64_t w = word_at(p + i, nbytes - i);
        sum.s1 += w;
        sum.s2 += (offset + i / 4 + 1) * w;
    }
    return sum;
}

#ifdef TZ_X86
// Lane j sums its words (S) and its running sums (T): with k rounds, sum_k k*w = k_total*S - T.
TZ_AVX2 Checksum words_avx2(const unsigned char* p, std::size_t rounds, std::uint64_t offset) {
    constexpr int kLanes = 16;
    const __m256i low = _mm256_set1_epi64x(0xffffffff);
    __m256i s[4], t[4];
    for (int j = 0; j < 4; ++j) s[j] = t[j] = _mm256_setzero_si256();
    for (std::size_t k = 0; k < rounds; ++k, p += 64) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
        s[0] = _mm256_add_epi64(s[0], _mm256_and_si256(a, low));
        s[1] = _mm256_add_epi64(s[1], _mm256_srli_epi64(a, 32));
        s[2] = _mm256_add_epi64(s[2], _mm256_and_si256(b, low));
        s[3] = _mm256_add_epi64(s[3], _mm256_srli_epi64(b, 32));
        for (int j = 0; j < 4; ++j) t[j] = _mm256_add_epi64(t[j], s[j]);
    }
    Checksum sum;
    for (int j = 0; j < 4; ++j) {
        alignas(32) std::uint64_t ls[4], lt[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(ls), s[j]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lt), t[j]);
        for (int i = 0; i < 4; ++i) {
            const std::uint64_t lane = static_cast<std::uint64_t>((j / 2) * 8 + 2 * i + (j & 1));
            sum.s1 += ls[i];
            sum.s2 += (offset + lane + 1) * ls[i] + kLanes * (rounds * ls[i] - lt[i]);
        }
    }
    return sum;
}
#endif

}  // namespace

Checksum checksum(const void* data, std::size_t nbytes, std::uint64_t word_offset) {
    const auto* p = static_cast<const unsigned char*>(data);
    Checksum sum;
    std::size_t done = 0;
#ifdef TZ_X86
    if (use_avx2() && nbytes >= 64) {
        done = nbytes / 64 * 64;
        sum = words_avx2(p, nbytes / 64, word_offset);
    }
#endif
    if (done < nbytes) sum += words(p + done, nbytes - done, word_offset + done / 4);
    return sum;
}

}  // namespace tz
