#include "parallel.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace tz {

void parallel(unsigned threads, std::size_t parts, const std::function<void(std::size_t)>& part) {
    std::atomic<std::size_t> next{0};
    const auto drain = [&] {
        for (std::size_t i; (i = next.fetch_add(1)) < parts;) part(i);
    };
    std::vector<std::thread> helpers;
    const std::size_t wanted = std::min<std::size_t>(threads, parts);
    try {
        if (wanted > 1) helpers.reserve(wanted - 1);
        for (std::size_t i = 1; i < wanted; ++i) helpers.emplace_back(drain);
    } catch (const std::exception&) {
        // fewer helpers: the caller does the rest
    }
    drain();
    for (auto& helper : helpers) helper.join();
}

}  // namespace tz
