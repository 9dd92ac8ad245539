// One blocking transfer, whole: short transfers are continued, unaligned ends go through a bounce block.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "file.hpp"
#include "slab.hpp"

namespace tz {

// The two system calls, replaceable so that tests can fail them.
struct SysCalls {
    ssize_t (*pread)(int, void*, std::size_t, off_t) = nullptr;
    ssize_t (*pwrite)(int, const void*, std::size_t, off_t) = nullptr;
    static SysCalls real();
};

enum class Op { read, write };

// Moves pieces of at most `block` bytes. One per I/O thread: it owns the bounce block.
class Mover {
  public:
    Mover(const SysCalls& calls, std::size_t block, std::atomic<std::uint64_t>& bytes_read,
          std::atomic<std::uint64_t>& bytes_written)
        : calls_(calls), block_(block), bytes_read_(bytes_read), bytes_written_(bytes_written) {}

    // Moves n <= block bytes at `offset` (a multiple of the file's alignment). IoFailure on any error or end
    // of file.
    void move(Op op, const OpenFile& file, std::uint64_t offset, char* data, std::size_t n);

  private:
    void read(const OpenFile& file, std::uint64_t offset, char* data, std::size_t n);
    void write(const OpenFile& file, std::uint64_t offset, const char* data, std::size_t n);
    void read_whole(const OpenFile& file, std::uint64_t offset, char* into, std::size_t ask,
                    std::size_t need);
    void write_whole(const OpenFile& file, std::uint64_t offset, const char* from, std::size_t n);
    char* bounce();

    const SysCalls calls_;
    const std::size_t block_;
    std::atomic<std::uint64_t>& bytes_read_;
    std::atomic<std::uint64_t>& bytes_written_;
    std::unique_ptr<Slab> bounce_;
};

}  // namespace tz
