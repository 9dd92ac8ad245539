// A file of one or several members, each on a drive of its own, striped.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "member.hpp"
#include "stripe.hpp"

namespace tz {

// The open descriptors. Requests in flight share them, so closing a File never pulls them from under them.
struct OpenFile {
    std::vector<std::unique_ptr<const Member>> members;
    StripeMap map;
    std::size_t alignment = 1;  // 4096 if any member does direct I/O

    const std::string& path() const { return members.front()->path(); }
    bool same_file(const OpenFile& other) const;  // whether any member is the same
};

class File {
  public:
    // Opens every path for reading and writing; `weights` and `stripe` as in StripeMap (no weights: all 1).
    // IoFailure names the path and what failed; std::invalid_argument for paths or weights that do not fit.
    File(std::vector<std::string> paths, bool create, bool direct, std::vector<unsigned> weights = {},
         std::uint64_t stripe = 0);
    File(const std::string& path, bool create, bool direct)
        : File(std::vector<std::string>{path}, create, direct) {}

    const std::string& path() const noexcept { return paths_.front(); }
    const std::vector<std::string>& paths() const noexcept { return paths_; }
    const std::vector<bool>& directs() const noexcept { return directs_; }
    bool direct() const noexcept;  // all members
    std::size_t alignment() const noexcept { return alignment_; }
    bool closed() const;
    std::uint64_t size() const;  // logical bytes that all members hold
    // Grows every member, never shrinks; IoFailure(ENOSPC, ...) names the member and leaves all sizes as they
    // were.
    void preallocate(std::uint64_t nbytes);
    void truncate(std::uint64_t nbytes);  // cuts or extends (sparsely) every member to `nbytes` logical bytes
    void sync();                          // fdatasync of every member
    void close();  // idempotent; requests in flight finish first on their own reference
    std::shared_ptr<const OpenFile> open() const;  // std::invalid_argument when closed

  private:
    const std::vector<std::string> paths_;
    std::vector<bool> directs_;
    std::size_t alignment_ = 1;
    mutable std::mutex mutex_;
    std::shared_ptr<const OpenFile> open_;
};

}  // namespace tz
