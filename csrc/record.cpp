#include "record.hpp"

#include <algorithm>
#include <cstring>

#include "state_update.hpp"

namespace tz {

namespace {

constexpr std::uint64_t kSub =
    8192;  // elements: 112 KiB of state and copy, so that checksums find them in cache

void zero_copy(const ChunkView& chunk, std::uint64_t from, std::uint64_t to) {
    if (chunk.copy == nullptr) return;
    from = std::max(from, chunk.copy_begin);
    if (from < to) std::memset(chunk.copy + (from - chunk.copy_begin) * 2, 0, (to - from) * 2);
}

// Elements [from, to) of one segment; `to` is a multiple of the granule from its start, or its end.
void update_segment(const Record& record, const ChunkView& chunk, const Segment& seg, std::uint64_t from,
                    std::uint64_t to) {
    Stretch stretch{.state = chunk.state, .at = from - chunk.begin, .count = to - from, .noise = seg.noise};
    stretch.noise.first += from - seg.first;
    const std::uint64_t at = from - seg.first;
    if (seg.out >= 0) {
        const std::uint64_t byte = seg.out + at * size_of(seg.out_type);
        if (chunk.copy != nullptr)
            stretch.out = chunk.copy + (from - chunk.copy_begin) * 2;
        else if (record.out != nullptr)
            stretch.out = record.out + byte;
        if (record.format.master != Master::f32)
            stretch.params = record.params ? record.params + byte : stretch.out;
    }
    char* const out = stretch.out;
    if (out == nullptr) zero_copy(chunk, from, to);
    if (seg.grad >= 0) {
        stretch.grad = record.grads + seg.grad + at * size_of(seg.grad_type);
        const AdamTypes types{seg.grad_type, out != nullptr, seg.out_type, seg.scalars.l2 != 0.0f,
                              record.format.amsgrad};
        update_stretch(record.format, chunk.layout, stretch, types, seg.scalars);
    } else if (stretch.params != nullptr) {
        if (stretch.params != out) std::memcpy(out, stretch.params, stretch.count * size_of(seg.out_type));
    } else if (out != nullptr) {
        const char* const master = chunk.state + chunk.layout.master.at(stretch.at);
        cast_floats(reinterpret_cast<const float*>(master), out, seg.out_type, stretch.count);
    }
}

Checksum sum_state(const ChunkView& chunk, std::uint64_t from, std::uint64_t to) {
    Checksum sum;
    for (const Stream* stream : chunk.layout.streams()) {
        const std::uint64_t at = stream->at(from - chunk.begin);
        sum += checksum(chunk.state + at, stream->bytes(to - from), (chunk.offset + at) / 4);
    }
    return sum;
}

}  // namespace

Sums update_range(const Record& record, const ChunkView& chunk, std::uint64_t from, std::uint64_t to,
                  bool sums) {
    Sums total;
    auto seg = std::partition_point(record.segments.begin(), record.segments.end(),
                                    [from](const Segment& s) { return s.first + s.count <= from; });
    for (std::uint64_t begin = from; begin < to; begin += kSub) {
        const std::uint64_t end = std::min(begin + kSub, to);
        std::uint64_t at = begin;
        while (seg != record.segments.end() && seg->first < end) {
            const std::uint64_t first = std::max(at, seg->first),
                                last = std::min(end, seg->first + seg->count);
            zero_copy(chunk, at, first);
            update_segment(record, chunk, *seg, first, last);
            at = last;
            if (seg->first + seg->count > end) break;  // goes on in the next stretch
            ++seg;
        }
        zero_copy(chunk, at, end);
        if (!sums) continue;
        if (record.dst) total.state += sum_state(chunk, begin, end);
        const std::uint64_t low = std::max(begin, chunk.copy_begin);
        if (chunk.copy != nullptr && low < end)
            total.copy += checksum(chunk.copy + (low - chunk.copy_begin) * 2, (end - low) * 2,
                                   (low - record.out_first) / 2);
    }
    return total;
}

}  // namespace tz
