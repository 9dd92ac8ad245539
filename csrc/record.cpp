#include "record.hpp"

#include <algorithm>
#include <cstring>

namespace tz {

namespace {

constexpr std::uint64_t kSub =
    8192;  // elements: 112 KiB of state and copy, so that checksums find them in cache

void zero_copy(const ChunkView& chunk, std::uint64_t from, std::uint64_t to) {
    if (chunk.copy == nullptr) return;
    from = std::max(from, chunk.copy_begin);
    if (from < to) std::memset(chunk.copy + (from - chunk.copy_begin) * 2, 0, (to - from) * 2);
}

// Elements [from, to) of one segment; `to` is a multiple of 8 from its start, or its end.
void update_segment(const Record& record, const ChunkView& chunk, const Segment& seg, std::uint64_t from,
                    std::uint64_t to) {
    const std::size_t local = from - chunk.begin, n = to - from;
    float* const p = chunk.state + local;
    char* out = nullptr;
    if (seg.out >= 0) {
        if (chunk.copy != nullptr)
            out = chunk.copy + (from - chunk.copy_begin) * 2;
        else if (record.out != nullptr)
            out = record.out + seg.out + (from - seg.first) * size_of(seg.out_type);
    }
    if (out == nullptr) zero_copy(chunk, from, to);
    if (seg.grad >= 0) {
        const char* grad = record.grads + seg.grad + (from - seg.first) * size_of(seg.grad_type);
        const AdamKernel kernel = adam_kernel({seg.grad_type, out != nullptr, seg.out_type});
        kernel(p, p + chunk.count, p + 2 * chunk.count, grad, out, n, seg.scalars);
    } else if (out != nullptr) {
        cast_floats(p, out, seg.out_type, n);
    }
}

Checksum sum_state(const ChunkView& chunk, std::uint64_t from, std::uint64_t to) {
    Checksum sum;
    for (std::uint64_t part = 0; part < 3; ++part) {
        const std::uint64_t at = part * chunk.count + (from - chunk.begin);
        sum += checksum(chunk.state + at, (to - from) * 4, 3 * chunk.begin + at);
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
