#include "slab.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include "align.hpp"
#include "error.hpp"
#include "numa.hpp"

namespace tz {

namespace {
constexpr std::size_t kHuge = std::size_t{2} << 20;
}

Slab::Slab(std::size_t nbytes, int node) : size_(nbytes) {
    if (nbytes == 0) throw std::invalid_argument("a slab needs at least 1 byte");
    if (nbytes > std::numeric_limits<std::ptrdiff_t>::max() - 2 * kHuge)
        throw std::invalid_argument("a slab of " + std::to_string(nbytes) +
                                    " bytes is beyond the address space");
    mapped_ = round_up(nbytes, kPage);
    // NORESERVE: a budget is a limit, not a claim; untouched pages cost nothing.
    void* raw = mmap(nullptr, mapped_ + kHuge, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        const int code = errno;
        throw IoFailure(code, "cannot map a slab of " + std::to_string(nbytes) + " bytes", "");
    }
    char* base = static_cast<char*>(raw);
    const auto at = reinterpret_cast<std::uintptr_t>(base);
    const std::size_t lead = round_up(at, kHuge) - at;
    if (lead) munmap(base, lead);
    if (lead < kHuge) munmap(base + lead + mapped_, kHuge - lead);
    data_ = base + lead;
    madvise(data_, mapped_, MADV_HUGEPAGE);  // a hint: refusal costs speed only
    prefer_node(data_, mapped_, node);
}

Slab::~Slab() {
    munmap(data_, mapped_);
}

std::size_t Slab::huge_bytes() const {
    std::ifstream smaps("/proc/self/smaps");
    const auto first = reinterpret_cast<std::uintptr_t>(data_);
    const auto last = first + mapped_;
    std::size_t total = 0;
    bool inside = false;
    for (std::string line; std::getline(smaps, line);) {
        unsigned long from = 0, to = 0, kib = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2)
            inside = from < last && first < to;
        else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1)
            total += std::size_t{kib} << 10;
    }
    return total < mapped_ ? total : mapped_;
}

}  // namespace tz
