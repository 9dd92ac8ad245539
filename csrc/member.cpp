#include "member.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <limits>

#include "align.hpp"
#include "error.hpp"
#include "slab.hpp"

namespace tz {

namespace {

std::atomic<std::uint64_t> next_id{1};

template <class Call>
auto retry(Call call) {
    decltype(call()) result;
    do {
        result = call();
    } while (result < 0 && errno == EINTR);
    return result;
}

int open_retry(const std::string& path, int flags, mode_t mode) {
    return retry([&] { return ::open(path.c_str(), flags, mode); });
}

// Whether O_DIRECT brings the first block of `path` itself.
bool direct_reads(const std::string& path) {
    const int fd = open_retry(path, O_RDWR | O_CLOEXEC | O_DIRECT, 0);
    if (fd < 0) return false;
    Slab block(kPage);
    const bool ok = retry([&] { return ::pread(fd, block.data(), kPage, 0); }) > 0;
    ::close(fd);
    return ok;
}

// Whether one aligned block that is written through `fd` (O_DIRECT) comes back through it.
bool block_returns(int fd) {
    Slab block(2 * kPage);
    std::memset(block.data(), 0x5a, kPage);
    const ssize_t put = retry([&] { return ::pwrite(fd, block.data(), kPage, 0); });
    if (put < 0 && (errno == ENOSPC || errno == EDQUOT)) return true;  // otherwise it would have been taken
    return put == static_cast<ssize_t>(kPage) &&
           retry([&] { return ::pread(fd, block.data() + kPage, kPage, 0); }) == put &&
           std::memcmp(block.data(), block.data() + kPage, kPage) == 0;
}

// The same on the file itself, which is empty and stays so.
bool direct_works_on_empty(const std::string& path) {
    const int fd = open_retry(path, O_RDWR | O_CLOEXEC | O_DIRECT, 0);
    if (fd < 0) return false;
    const bool ok = block_returns(fd);
    const bool empty = retry([&] { return ::ftruncate(fd, 0); }) == 0;
    ::close(fd);
    return ok && empty;
}

// A descriptor, with O_DIRECT, of a new file in `folder` that has a name of its own for a moment; -1 with
// errno.
int open_named_for_a_moment(const std::string& folder) {
    const std::string place = folder + ".tierzero-probe-" + std::to_string(getpid());
    std::string probe;
    int fd;
    do {  // other threads try here too, and one that was killed may have left its name
        probe = place + "-" + std::to_string(next_id++);
        fd = open_retry(probe, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    } while (fd < 0 && errno == EEXIST);
    const int code = errno;
    // some kernels create the name before refusing the flag
    if (fd >= 0 || code == EINVAL) ::unlink(probe.c_str());
    errno = code;
    return fd;
}

// The same without any name, where the file system has such files: nothing stays behind however the process
// ends.
int open_nameless(const std::string& folder) {
    constexpr int flags = O_RDWR | O_CLOEXEC | O_TMPFILE;
    const int fd = open_retry(folder, flags | O_DIRECT, 0600);
    if (fd >= 0) return fd;
    if (errno == EINVAL) {  // of which of both flags?
        const int plain = open_retry(folder, flags, 0600);
        if (plain >= 0) {
            ::close(plain);
            errno = EINVAL;
            return -1;
        }
    }
    const bool refused = errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL;
    return refused ? open_named_for_a_moment(folder) : -1;
}

// The same on a neighbour of `path`. IoFailure where that cannot be tried for want of descriptors.
bool direct_works(const std::string& path) {
    const auto slash = path.find_last_of('/');
    const int fd = open_nameless(slash == std::string::npos ? "./" : path.substr(0, slash + 1));
    if (fd < 0) {
        const int code = errno;
        if (code == EMFILE || code == ENFILE)
            throw IoFailure(code, "cannot try direct I/O: " + errno_text(code), path);
        return (code == EACCES || code == EPERM) && direct_reads(path);  // the directory is another's
    }
    const bool ok = block_returns(fd);
    ::close(fd);
    return ok;
}

// Some file systems undo an allocation that a signal interrupts: under a fast timer it would start over for
// ever.
class SignalsWait {
  public:
    SignalsWait() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before_);
    }
    ~SignalsWait() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsWait(const SignalsWait&) = delete;
    SignalsWait& operator=(const SignalsWait&) = delete;

  private:
    sigset_t before_;
};

off_t checked_offset(std::uint64_t nbytes, const char* what) {
    if (nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
        throw std::invalid_argument("cannot " + std::string(what) + " " + std::to_string(nbytes) +
                                    " bytes: beyond the largest file");
    return static_cast<off_t>(nbytes);
}

}  // namespace

Member::Member(std::string path, bool create, bool direct) : path_(std::move(path)), id_(next_id++) {
    if (path_.empty() || path_.find('\0') != std::string::npos)
        throw std::invalid_argument("a file path must be neither empty nor hold a zero byte");
    fd_ = open_retry(path_, O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
    if (fd_ < 0) fail(errno, "cannot open for reading and writing");
    try {
        identify(direct);
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

void Member::identify(bool direct) {
    struct stat st{};
    if (::fstat(fd_, &st) != 0 || !(S_ISREG(st.st_mode) || S_ISBLK(st.st_mode)))
        throw IoFailure(EINVAL, "not a regular file", path_);
    const auto works = S_ISBLK(st.st_mode) ? direct_reads : st.st_size ? direct_works : direct_works_on_empty;
    if (direct && works(path_)) {
        const int again = open_retry(path_, O_RDWR | O_CLOEXEC | O_DIRECT, 0);
        if (again < 0) fail(errno, "cannot open for direct I/O");
        ::close(fd_);
        fd_ = again;
        direct_ = true;
    }
    device_ = S_ISBLK(st.st_mode) ? st.st_rdev : st.st_dev;
    inode_ = st.st_ino;
}

Member::~Member() {
    ::close(fd_);
    for (const auto& note : notes_) try {
            note();
        } catch (const std::bad_alloc&) {
            continue;  // whoever keeps the file registered lets go of it at its own end
        }
}

void Member::fail(int code, const std::string& what) const {
    throw IoFailure(code, what + ": " + errno_text(code), path_);
}

std::uint64_t Member::size() const {
    const off_t end = ::lseek(fd_, 0, SEEK_END);  // of a block device, too
    if (end < 0) fail(errno, "cannot read the size");
    return static_cast<std::uint64_t>(end);
}

void Member::preallocate(std::uint64_t nbytes) const {
    const off_t target = checked_offset(nbytes, "preallocate");
    const std::uint64_t before = size();
    if (nbytes == 0) return;
    const SignalsWait quiet;
    int rc = retry([&] { return ::fallocate(fd_, 0, 0, target); });
    if (rc != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        if (nbytes <= before) return;
        rc = retry([&] { return ::ftruncate(fd_, target); });
    }
    if (rc == 0) return;
    const int code = errno;
    // give back what a partial allocation took; the failure above is the one to report
    if (nbytes > before && ::ftruncate(fd_, static_cast<off_t>(before)) != 0) errno = code;
    fail(code, "cannot grow the file to " + std::to_string(nbytes) + " bytes");
}

void Member::truncate(std::uint64_t nbytes) const {
    const off_t target = checked_offset(nbytes, "truncate to");
    if (retry([&] { return ::ftruncate(fd_, target); }) != 0)
        fail(errno, "cannot cut the file to " + std::to_string(nbytes) + " bytes");
}

void Member::sync() const {
    if (retry([&] { return ::fdatasync(fd_); }) != 0) fail(errno, "cannot flush to the drive");
}

void Member::at_close(std::function<void()> note) const {
    std::lock_guard lock(mutex_);
    notes_.push_back(std::move(note));
}

}  // namespace tz
