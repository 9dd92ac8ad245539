#include "transfer.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "align.hpp"
#include "error.hpp"

namespace tz {

namespace {

constexpr int kRetries = 2000;  // x 1 ms without any progress before a transfer is given up

std::string range(const char* what, std::uint64_t offset, std::size_t n) {
    return std::string(what) + " of " + std::to_string(n) + " bytes at offset " + std::to_string(offset);
}

[[noreturn]] void fail(const char* what, int code, const OpenFile& file, std::uint64_t offset,
                       std::size_t n) {
    throw IoFailure(code, range(what, offset, n) + " failed: " + errno_text(code), file.path);
}

[[noreturn]] void fail_at_end(const OpenFile& file, std::uint64_t offset, std::size_t n, std::uint64_t end) {
    throw IoFailure(EIO, range("read", offset, n) + ": the file ends at " + std::to_string(end), file.path);
}

// Whether errno asks for another try; counts and paces the ones that made no progress.
bool try_again(int code, int& stalls) {
    if (code == EINTR) return true;
    if (code != EAGAIN || ++stalls > kRetries) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
}

std::uint64_t file_size(const OpenFile& file) {
    struct stat st{};
    return ::fstat(file.fd, &st) == 0 ? static_cast<std::uint64_t>(st.st_size) : UINT64_MAX;
}

}  // namespace

SysCalls SysCalls::real() {
    return {.pread = ::pread, .pwrite = ::pwrite};
}

char* Mover::bounce() {
    if (!bounce_) bounce_ = std::make_unique<Slab>(block_);
    return bounce_->data();
}

void Mover::move(Op op, const OpenFile& file, std::uint64_t offset, char* data, std::size_t n) {
    if (op == Op::read)
        read(file, offset, data, n);
    else
        write(file, offset, data, n);
}

void Mover::read(const OpenFile& file, std::uint64_t offset, char* data, std::size_t n) {
    const std::size_t unit = file.alignment;
    const std::size_t whole = is_aligned(data, unit) ? round_down(n, unit) : 0;
    if (whole) read_whole(file, offset, data, whole, whole);
    if (const std::size_t rest = n - whole) {
        read_whole(file, offset + whole, bounce(), round_up(rest, unit), rest);
        std::memcpy(data + whole, bounce(), rest);
    }
}

void Mover::write(const OpenFile& file, std::uint64_t offset, const char* data, std::size_t n) {
    const std::size_t unit = file.alignment;
    const std::size_t whole = is_aligned(data, unit) ? round_down(n, unit) : 0;
    if (whole) write_whole(file, offset, data, whole);
    if (const std::size_t rest = n - whole) {
        const std::size_t padded = round_up(rest, unit);
        std::memcpy(bounce(), data + whole, rest);
        std::memset(bounce() + rest, 0, padded - rest);
        write_whole(file, offset + whole, bounce(), padded);
    }
}

void Mover::read_whole(const OpenFile& file, std::uint64_t offset, char* into, std::size_t ask,
                       std::size_t need) {
    int stalls = 0;
    for (std::size_t done = 0; done < need;) {
        const ssize_t r = calls_.pread(file.fd, into + done, ask - done, static_cast<off_t>(offset + done));
        if (r < 0) {
            const int code = errno;
            if (try_again(code, stalls)) continue;
            fail("read", code, file, offset, need);
        }
        const auto got = static_cast<std::size_t>(r);
        bytes_read_.fetch_add(got, std::memory_order_relaxed);
        if (done + got >= need) return;
        if (got == 0) fail_at_end(file, offset, need, offset + done);
        // A direct transfer goes on from an aligned place only; a ragged one is usually the end of the file.
        const std::size_t step = round_down(got, file.alignment);
        if (step != got && offset + done + got >= file_size(file))
            fail_at_end(file, offset, need, offset + done + got);
        if (step == 0 && !try_again(EAGAIN, stalls)) fail("read", EIO, file, offset, need);
        done += step;
    }
}

void Mover::write_whole(const OpenFile& file, std::uint64_t offset, const char* from, std::size_t n) {
    int stalls = 0;
    for (std::size_t done = 0; done < n;) {
        const ssize_t r = calls_.pwrite(file.fd, from + done, n - done, static_cast<off_t>(offset + done));
        if (r < 0) {
            const int code = errno;
            if (try_again(code, stalls)) continue;
            fail("write", code, file, offset, n);
        }
        const auto put = static_cast<std::size_t>(r);
        bytes_written_.fetch_add(put, std::memory_order_relaxed);
        const std::size_t step = done + put == n ? put : round_down(put, file.alignment);
        if (step == 0 && !try_again(EAGAIN, stalls)) fail("write", EIO, file, offset, n);
        done += step;
    }
}

}  // namespace tz
