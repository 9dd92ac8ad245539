// A file opened for direct I/O where the file system really does it, else buffered.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace tz {

// The open descriptor. Requests in flight share it, so closing a File never pulls it from under them.
struct OpenFile {
    OpenFile(int fd_, std::string path_, std::size_t alignment_);
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    bool same_file(const OpenFile& other) const { return device == other.device && inode == other.inode; }

    const int fd;
    const std::string path;
    const std::size_t alignment;  // 4096 when direct, else 1
    dev_t device = 0;
    ino_t inode = 0;
};

class File {
  public:
    // Opens for reading and writing. IoFailure names the path and what failed.
    File(const std::string& path, bool create, bool direct);

    const std::string& path() const noexcept { return path_; }
    bool direct() const noexcept { return alignment_ > 1; }
    std::size_t alignment() const noexcept { return alignment_; }
    bool closed() const;
    std::uint64_t size() const;  // bytes
    void preallocate(
        std::uint64_t nbytes);  // grows, never shrinks; IoFailure(ENOSPC, ...) leaves the size as it was
    void sync();                // fdatasync
    void close();               // idempotent; requests in flight finish first on their own reference
    std::shared_ptr<const OpenFile> open() const;  // std::invalid_argument when closed

  private:
    std::string path_;
    std::size_t alignment_ = 1;
    mutable std::mutex mutex_;
    std::shared_ptr<const OpenFile> open_;
};

}  // namespace tz
