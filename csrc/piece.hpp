// One piece of a request: at most a block, on one member, asked of the kernel as often as it takes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "error.hpp"
#include "member.hpp"

namespace tz {

enum class Op { read, write };

inline constexpr std::size_t kBounce = 256 << 10;  // bytes of a bounce block

struct Request;
class Lane;

struct Piece {
    Op op = Op::read;
    const Member* member = nullptr;
    Request* request = nullptr;
    Lane* lane = nullptr;
    std::uint64_t offset = 0;  // in the member's file
    char* data = nullptr;
    std::size_t size = 0;
    bool bounce =
        false;  // does not meet direct I/O's alignment: at most kBounce bytes, through a bounce block

    char* block = nullptr;                     // the bounce block, while there is one
    std::size_t done = 0;                      // bytes
    int stalls = 0;                            // tries without progress
    std::int64_t queued = 0, due = 0;          // steady nanoseconds; due: when a limit lets it go, or 0
    std::atomic<std::int64_t> since{kQueued};  // steady nanoseconds when the kernel first got it, or:
    static constexpr std::int64_t kQueued = 0, kEnded = -1;
    Piece* next = nullptr;  // in a lane's queue
};

// The system calls below the engine, replaceable so that tests can fail them.
struct SysCalls {
    ssize_t (*pread)(int, void*, std::size_t, off_t) = nullptr;
    ssize_t (*pwrite)(int, const void*, std::size_t, off_t) = nullptr;
    // What an io_uring completion is taken for (bytes or -errno), or kLost: it never arrives. Null: as it is.
    ssize_t (*completion)(Op, ssize_t) = nullptr;
    static constexpr ssize_t kLost = LONG_MIN;
    static SysCalls real();
};

struct ByteCounts {
    std::atomic<std::uint64_t> read{0}, written{0};  // really transferred, padding included
};

// What to ask of the kernel next.
struct Wish {
    char* data;
    std::size_t n;
    std::uint64_t offset;
};
Wish wish(const Piece& piece);

// To be called before the first wish: fills the bounce block of a write.
void prepare(Piece& piece);

enum class Next { finished, again, later };  // later: in a millisecond
struct Step {
    Next next;
    std::optional<IoError> error;
};
// Takes one result, bytes or -errno: short transfers go on, EINTR and EAGAIN are tried again, the rest fails.
Step advance(Piece& piece, ssize_t result, ByteCounts& counts);

// "read of 4096 bytes at offset 8192"
std::string describe(const Piece& piece);

}  // namespace tz
