// One file on one drive: the open descriptor, whether it does direct I/O, and who must hear of its end.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tz {

class Member {
  public:
    // Opens for reading and writing, with O_DIRECT if asked for and really working. IoFailure names the path.
    Member(std::string path, bool create, bool direct);
    ~Member();
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    bool direct() const noexcept { return direct_; }
    int fd() const noexcept { return fd_; }
    const std::string& path() const noexcept { return path_; }
    std::uint64_t id() const noexcept { return id_; }  // never used again in this process
    dev_t device() const noexcept { return device_; }
    bool same_file(const Member& other) const { return device_ == other.device_ && inode_ == other.inode_; }

    std::uint64_t size() const;  // bytes
    // Grows, never shrinks. IoFailure(ENOSPC, ...) leaves the size as it was.
    void preallocate(std::uint64_t nbytes) const;
    void truncate(std::uint64_t nbytes) const;
    void sync() const;  // fdatasync

    // Has `note` called when the descriptor is closed.
    void at_close(std::function<void()> note) const;

  private:
    void identify(bool direct);  // what it is, and how it is to be used
    [[noreturn]] void fail(int code, const std::string& what) const;

    const std::string path_;
    const std::uint64_t id_;
    int fd_ = -1;
    bool direct_ = false;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    mutable std::mutex mutex_;
    mutable std::vector<std::function<void()>> notes_;
};

}  // namespace tz
