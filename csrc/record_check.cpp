// Whether a record's description is sound. Every check here stands between a caller's slip and a wild write.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "align.hpp"
#include "record.hpp"

namespace tz {

namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument(what);
}

std::string str(std::uint64_t n) {
    return std::to_string(n);
}

constexpr std::uint64_t kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - kPage;

void check_place(const char* name, const Place& place, std::uint64_t bytes) {
    if (place.offset % place.file->alignment != 0 || place.offset % kPage != 0)
        refuse(std::string(name) + " offset " + str(place.offset) +
               " is not a multiple of 4096: " + place.file->path());
    if (place.offset > kMaxOffset || bytes > kMaxOffset - place.offset)
        refuse(std::string(name) + " offset " + str(place.offset) +
               " is beyond the largest file: " + place.file->path());
}

// A byte range that a record touches: in a file, or in memory (no file).
struct Range {
    const OpenFile* file;
    std::uint64_t from, size;
};

Range in_file(const Place& place, std::uint64_t size) {
    return {place.file.get(), place.offset, round_up(size, kPage)};
}

Range in_memory(const void* data, std::uint64_t size) {
    return {nullptr, reinterpret_cast<std::uintptr_t>(data), size};
}

bool meet(const Range& a, const Range& b) {
    if ((a.file == nullptr) != (b.file == nullptr)) return false;
    if (a.file != nullptr && !a.file->same_file(*b.file)) return false;
    return a.size != 0 && b.size != 0 && a.from < b.from + b.size && b.from < a.from + a.size;
}

void check_segment(const Record& r, const Segment& s, std::size_t index) {
    const auto fail = [&](const std::string& why) { refuse("segment " + str(index) + ": " + why); };
    const std::uint64_t granule = r.format.granule();
    if (s.first % granule != 0) fail("state_elem " + str(s.first) + " is not a multiple of " + str(granule));
    if (s.first > r.elements || s.count > r.elements - s.first)
        fail("elements [" + str(s.first) + ", +" + str(s.count) + ") are beyond the record's " +
             str(r.elements));
    if (s.grad < -1 || s.out < -1) fail("an offset is negative (use -1 for none)");
    if (s.grad >= 0) {
        const std::uint64_t bytes = s.count * size_of(s.grad_type), at = static_cast<std::uint64_t>(s.grad);
        if (at > r.grads_size || bytes > r.grads_size - at)
            fail("gradient bytes [" + str(at) + ", +" + str(bytes) + ") are beyond the " + str(r.grads_size) +
                 " given");
    }
    if (r.format.master != Master::f32) {
        const bool split = r.format.master == Master::split;
        if (s.out < 0 || s.out_type != (split ? Dtype::bf16 : Dtype::f32))
            fail(std::string("the state format takes its master from ") + (split ? "bf16" : "f32") +
                 " parameters in out");
    }
    if (s.out < 0) return;
    const std::uint64_t bytes = s.count * size_of(s.out_type), at = static_cast<std::uint64_t>(s.out);
    if (r.out_file) {
        if (size_of(s.out_type) != 2) fail("out_file takes 2-byte parameter copies only");
        if (s.first < r.out_first || at != (s.first - r.out_first) * 2)
            fail("out_offset " + str(at) + " is not (state_elem - out_first) * 2");
        if (at > r.out_bytes || bytes > r.out_bytes - at)
            fail("copy bytes [" + str(at) + ", +" + str(bytes) + ") are beyond out_file's " +
                 str(r.out_bytes));
    } else {
        if (r.out == nullptr && bytes != 0) fail("out_offset is given, but neither out nor out_file");
        if (at > r.out_size || bytes > r.out_size - at)
            fail("copy bytes [" + str(at) + ", +" + str(bytes) + ") are beyond out's " + str(r.out_size));
    }
}

void check_overlaps(const Record& r) {
    for (std::size_t i = 1; i < r.segments.size(); ++i)
        if (r.segments[i].first < r.segments[i - 1].first + r.segments[i - 1].count)
            refuse("segments overlap at state element " + str(r.segments[i].first));
    if (r.out == nullptr) return;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> copies;
    for (const Segment& s : r.segments)
        if (s.out >= 0 && s.count != 0) copies.emplace_back(s.out, s.count * size_of(s.out_type));
    std::sort(copies.begin(), copies.end());
    for (std::size_t i = 1; i < copies.size(); ++i)
        if (copies[i].first < copies[i - 1].first + copies[i - 1].second)
            refuse("the segments' parameter copies overlap at byte " + str(copies[i].first) + " of out");
}

}  // namespace

void check_record(Record& r, std::uint64_t chunk) {
    if (r.elements == 0 || r.elements % 1024 != 0)
        refuse("elements must be a positive multiple of 1024, not " + str(r.elements));
    if (r.elements > kMaxOffset / 16) refuse("elements " + str(r.elements) + " is out of range");
    if (r.src.has_value() != r.dst.has_value()) refuse("src and dst go together");
    if (r.src.has_value() == (r.state != nullptr)) refuse("give either src and dst, or state");
    if (r.out != nullptr && r.out_file) refuse("give either out or out_file, not both");
    const std::uint64_t bytes = r.state_bytes(chunk);
    if (r.src) {
        check_place("src", *r.src, bytes);
        check_place("dst", *r.dst, bytes);
        const bool in_place = r.src->file->same_file(*r.dst->file) && r.src->offset == r.dst->offset;
        if (!in_place && meet(in_file(*r.src, bytes), in_file(*r.dst, bytes)))
            refuse("src and dst overlap without being the same place");
    }
    if (r.out_file) {
        check_place("out_file", *r.out_file, r.out_bytes);
        if (r.out_first % 2048 != 0 || r.out_first >= r.elements)
            refuse("out_first must be a multiple of 2048 below elements, not " + str(r.out_first));
        if (r.out_bytes == 0 || r.out_bytes > round_up(2 * (r.elements - r.out_first), kPage))
            refuse("out_file's " + str(r.out_bytes) +
                   " bytes are not what elements after out_first can fill");
        const Range copy = in_file(*r.out_file, r.out_bytes);
        if (r.src && (meet(copy, in_file(*r.src, bytes)) || meet(copy, in_file(*r.dst, bytes))))
            refuse("out_file overlaps src or dst");
    } else if (r.out_first != 0) {
        refuse("out_first is for out_file only");
    }
    if (r.format.master == Master::f32 ? r.params != nullptr : r.out == nullptr)
        refuse(r.params ? "params are for formats without a float32 master only"
                        : "a state format without a float32 master needs the parameters in out");
    const Range grads = in_memory(r.grads, r.grads_size), state = in_memory(r.state, r.state ? bytes : 0),
                out = in_memory(r.out, r.out_size);
    if (meet(grads, state) || meet(grads, out) || meet(state, out))
        refuse("grads, state and out share memory");
    const Range params = in_memory(r.params, r.params ? r.out_size : 0);
    if (meet(params, grads) || meet(params, state) || (r.params != r.out && meet(params, out)))
        refuse("params share memory with grads, state or out without being out");
    for (std::size_t i = 0; i < r.segments.size(); ++i) check_segment(r, r.segments[i], i);
    std::erase_if(r.segments, [](const Segment& s) { return s.count == 0; });
    std::sort(r.segments.begin(), r.segments.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    check_overlaps(r);
}

bool conflicts(const Record& later, const Record& earlier, std::uint64_t chunk) {
    // Memory needs no check: chunks are computed in order, and only that touches it.
    const auto touched = [chunk](const Record& r, bool reads) {
        std::vector<Range> out;
        if (reads && r.src) out.push_back(in_file(*r.src, r.state_bytes(chunk)));
        if (r.dst) out.push_back(in_file(*r.dst, r.state_bytes(chunk)));
        if (r.out_file) out.push_back(in_file(*r.out_file, r.out_bytes));
        return out;
    };
    for (const Range& write : touched(earlier, false))
        for (const Range& use : touched(later, true))
            if (meet(write, use)) return true;
    return false;
}

bool share(const Record& a, const Record& b, std::uint64_t chunk) {
    const auto meet_in_memory = [chunk](const Record& x, const Record& y) {
        return overlap(x.state, x.state ? x.state_bytes(chunk) : 0, y.state,
                       y.state ? y.state_bytes(chunk) : 0) ||
               overlap(x.out, x.out_size, y.out, y.out_size) ||
               overlap(x.params, x.params ? x.out_size : 0, y.params, y.params ? y.out_size : 0);
    };
    return conflicts(a, b, chunk) || conflicts(b, a, chunk) || meet_in_memory(a, b);
}

}  // namespace tz
