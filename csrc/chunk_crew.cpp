#include "chunk_crew.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "align.hpp"

namespace tz {

namespace {

unsigned checked_threads(unsigned threads) {
    if (threads < 1 || threads > 256)
        throw std::invalid_argument("a stepper takes 1 to 256 threads, not " + std::to_string(threads));
    return threads;
}

}  // namespace

ChunkCrew::ChunkCrew(unsigned threads) : crew_(checked_threads(threads)), partial_(crew_.size()) {}

Sums ChunkCrew::update(const Record& record, const ChunkView& chunk) {
    const std::uint64_t end = chunk.begin + chunk.count;
    const std::uint64_t share =
        round_up((chunk.count + crew_.size() - 1) / crew_.size(), record.format.granule());
    crew_.run([&](unsigned i) {
        const std::uint64_t from = std::min(end, chunk.begin + i * share), to = std::min(end, from + share);
        partial_[i] = update_range(record, chunk, from, to, record.dst || record.out_file);
    });
    Sums total;
    for (const Sums& part : partial_) {
        total.state += part.state;
        total.copy += part.copy;
    }
    return total;
}

}  // namespace tz
