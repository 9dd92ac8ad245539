#include "piece.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "align.hpp"

namespace tz {

namespace {

constexpr int kRetries = 2000;  // x 1 ms without any progress before a piece is given up

std::size_t unit(const Piece& piece) {
    return piece.member->direct() ? kPage : 1;
}

// Bytes to ask for in all: a bounced piece takes whole units.
std::size_t whole(const Piece& piece) {
    return piece.bounce ? round_up(piece.size, unit(piece)) : piece.size;
}

Step failed(const Piece& piece, int code, const std::string& why) {
    return {Next::finished, IoError{code, describe(piece) + why, piece.member->path()}};
}

Step failed(const Piece& piece, int code) {
    return failed(piece, code, " failed: " + errno_text(code));
}

Step ended_at(const Piece& piece, std::uint64_t end) {
    return failed(piece, EIO, ": the file ends at " + std::to_string(end));
}

Step finished(Piece& piece) {
    if (piece.bounce && piece.op == Op::read) std::memcpy(piece.data, piece.block, piece.size);
    return {Next::finished, std::nullopt};
}

std::uint64_t file_size(const Member& member) {
    try {
        return member.size();
    } catch (const IoFailure&) {
        return UINT64_MAX;
    }
}

Step no_progress(Piece& piece, int code) {
    if (++piece.stalls > kRetries) return failed(piece, code);
    return {Next::later, std::nullopt};
}

Step advance_read(Piece& piece, std::size_t got) {
    const std::size_t had = piece.done;
    if (had + got >= piece.size) return finished(piece);
    const std::uint64_t end = piece.offset + had + got;
    if (got == 0) return ended_at(piece, end);
    // A direct transfer goes on from an aligned place only; a ragged one is usually the end of the file.
    const std::size_t step = round_down(got, unit(piece));
    if (step != got && end >= file_size(*piece.member)) return ended_at(piece, end);
    piece.done += step;
    return step ? Step{Next::again, std::nullopt} : no_progress(piece, EIO);
}

Step advance_write(Piece& piece, std::size_t put) {
    if (piece.done + put >= whole(piece)) return finished(piece);
    const std::size_t step = round_down(put, unit(piece));
    piece.done += step;
    return step ? Step{Next::again, std::nullopt} : no_progress(piece, EIO);
}

}  // namespace

SysCalls SysCalls::real() {
    return {.pread = ::pread, .pwrite = ::pwrite};
}

std::string describe(const Piece& piece) {
    return std::string(piece.op == Op::read ? "read" : "write") + " of " + std::to_string(piece.size) +
           " bytes at offset " + std::to_string(piece.offset);
}

Wish wish(const Piece& piece) {
    return {(piece.bounce ? piece.block : piece.data) + piece.done, whole(piece) - piece.done,
            piece.offset + piece.done};
}

void prepare(Piece& piece) {
    if (!piece.bounce || piece.op == Op::read) return;
    std::memcpy(piece.block, piece.data, piece.size);
    std::memset(piece.block + piece.size, 0, whole(piece) - piece.size);
}

Step advance(Piece& piece, ssize_t result, ByteCounts& counts) {
    if (result < 0) {
        const int code = static_cast<int>(-result);
        if (code == EINTR) return {Next::again, std::nullopt};
        return code == EAGAIN ? no_progress(piece, code) : failed(piece, code);
    }
    const auto n = static_cast<std::size_t>(result);
    (piece.op == Op::read ? counts.read : counts.written).fetch_add(n, std::memory_order_relaxed);
    return piece.op == Op::read ? advance_read(piece, n) : advance_write(piece, n);
}

}  // namespace tz
