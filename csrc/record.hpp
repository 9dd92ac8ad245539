// One state record's update: what it is made of, whether it is sound, and the arithmetic of one chunk.
//
// State layout, in a file or in memory: chunks of c = min(chunk, what is left) elements, consecutive, each
// laid out as the record's format says (state_format.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "adam.hpp"
#include "checksum.hpp"
#include "file.hpp"
#include "noise.hpp"
#include "state_format.hpp"

namespace tz {

// One parameter inside the record. Byte offsets are -1 where there is nothing.
struct Segment {
    std::uint64_t first = 0;  // state element, a multiple of the format's granule
    std::uint64_t count = 0;  // elements
    std::int64_t grad = -1;   // byte offset in the gradients
    Dtype grad_type = Dtype::f32;
    std::int64_t out = -1;  // byte offset in the parameter copy
    Dtype out_type = Dtype::f32;
    AdamScalars scalars{};
    Noise noise{};  // of moments that are not float32
};

// A place in a file.
struct Place {
    std::shared_ptr<const OpenFile> file;
    std::uint64_t offset = 0;  // bytes
};

struct Record {
    std::uint64_t elements = 0;  // a multiple of 1024
    StateFormat format;
    std::vector<Segment> segments;
    const char* grads = nullptr;
    std::size_t grads_size = 0;
    std::optional<Place> src, dst;  // both, or
    char* state = nullptr;          // in memory
    char* out = nullptr;            // the parameter copy in memory, or
    std::size_t out_size = 0;
    // Where the format keeps no master: the parameters before, laid out as `out`; null: `out` itself. In
    // place, a record that fails leaves them partly updated.
    const char* params = nullptr;
    std::optional<Place> out_file;  // in a file: byte (e - out_first) * 2 belongs to state element e
    std::uint64_t out_bytes = 0;    // of the record in out_file
    std::uint64_t out_first = 0;    // a multiple of 2048
    std::uint64_t due = 0;          // when it is wanted, in any unit

    std::uint64_t chunks(std::uint64_t chunk) const { return (elements + chunk - 1) / chunk; }
    std::uint64_t state_bytes(std::uint64_t chunk) const { return format.record_bytes(elements, chunk); }
};

// Sorts the segments and checks everything against everything; std::invalid_argument says what does not fit.
// `chunk`: elements, as in all of these.
void check_record(Record& record, std::uint64_t chunk);

// Whether `later` must not start before `earlier` is written (they share bytes that one of them writes).
bool conflicts(const Record& later, const Record& earlier, std::uint64_t chunk);

// Whether the order of the two matters: one writes what the other reads or writes.
bool share(const Record& a, const Record& b, std::uint64_t chunk);

// One chunk in memory.
struct ChunkView {
    std::uint64_t begin = 0, count = 0;  // state elements
    char* state = nullptr;
    std::uint64_t offset = 0;      // of the state in the record, bytes
    StateLayout layout;            // of `count` elements
    char* copy = nullptr;          // where its part of the out_file record is put together, or null
    std::uint64_t copy_begin = 0;  // the state element of copy[0]
};

struct Sums {
    Checksum state, copy;
};

// Updates elements [from, to) of the chunk (multiples of the format's granule from its start, or
// its end), fills
// their part of `copy` with zero bytes in the gaps, and returns the checksums of both if `sums`.
Sums update_range(const Record& record, const ChunkView& chunk, std::uint64_t from, std::uint64_t to,
                  bool sums);

}  // namespace tz
