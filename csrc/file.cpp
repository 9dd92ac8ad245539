#include "file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "align.hpp"
#include "error.hpp"
#include "slab.hpp"

namespace tz {

namespace {

int open_retry(const char* path, int flags, mode_t mode) {
    int fd;
    do {
        fd = ::open(path, flags, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

// Writes one aligned block and reads it back through O_DIRECT, on a nameless neighbour of `path`.
bool direct_works(const std::string& path) {
    const std::string probe = path + ".probe-" + std::to_string(getpid());
    const int fd = open_retry(probe.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    if (fd < 0) {
        if (errno == EINVAL)
            ::unlink(probe.c_str());  // some kernels create the name before refusing the flag
        return false;
    }
    ::unlink(probe.c_str());
    Slab block(2 * kPage);
    std::memset(block.data(), 0x5a, kPage);
    const bool ok = ::pwrite(fd, block.data(), kPage, 0) == static_cast<ssize_t>(kPage) &&
                    ::pread(fd, block.data() + kPage, kPage, 0) == static_cast<ssize_t>(kPage) &&
                    std::memcmp(block.data(), block.data() + kPage, kPage) == 0;
    ::close(fd);
    return ok;
}

}  // namespace

OpenFile::OpenFile(int fd_, std::string path_, std::size_t alignment_)
    : fd(fd_), path(std::move(path_)), alignment(alignment_) {
    struct stat st{};
    if (::fstat(fd, &st) == 0) {
        device = st.st_dev;
        inode = st.st_ino;
    }
}

OpenFile::~OpenFile() {
    ::close(fd);
}

File::File(const std::string& path, bool create, bool direct) : path_(path) {
    if (path.empty() || path.find('\0') != std::string::npos)
        throw std::invalid_argument("a file path must be neither empty nor hold a zero byte");
    const int flags = O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0);
    int fd = open_retry(path.c_str(), flags, 0644);
    if (fd < 0) {
        const int code = errno;
        throw IoFailure(code, "cannot open for reading and writing: " + errno_text(code), path);
    }
    struct stat st{};
    if (::fstat(fd, &st) != 0 || !(S_ISREG(st.st_mode) || S_ISBLK(st.st_mode))) {
        ::close(fd);
        throw IoFailure(EINVAL, "not a regular file", path);
    }
    if (direct && direct_works(path)) {
        const int again = open_retry(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT, 0);
        if (again >= 0) {
            ::close(fd);
            fd = again;
            alignment_ = kPage;
        }
    }
    open_ = std::make_shared<const OpenFile>(fd, path, alignment_);
}

bool File::closed() const {
    std::lock_guard lock(mutex_);
    return !open_;
}

std::shared_ptr<const OpenFile> File::open() const {
    std::lock_guard lock(mutex_);
    if (!open_) throw std::invalid_argument("the file " + path_ + " is closed");
    return open_;
}

std::uint64_t File::size() const {
    const auto file = open();
    struct stat st{};
    if (::fstat(file->fd, &st) != 0) {
        const int code = errno;
        throw IoFailure(code, "cannot read the size: " + errno_text(code), path_);
    }
    return static_cast<std::uint64_t>(st.st_size);
}

void File::preallocate(std::uint64_t nbytes) {
    if (nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
        throw std::invalid_argument("cannot preallocate " + std::to_string(nbytes) +
                                    " bytes: beyond the largest file");
    const auto file = open();
    const std::uint64_t before = size();
    if (nbytes == 0) return;
    int rc;
    do {
        rc = ::fallocate(file->fd, 0, 0, static_cast<off_t>(nbytes));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        if (nbytes <= before) return;
        do {
            rc = ::ftruncate(file->fd, static_cast<off_t>(nbytes));
        } while (rc != 0 && errno == EINTR);
    }
    if (rc != 0) {
        const int code = errno;
        // give back what a partial allocation took; the failure below is the one to report
        if (nbytes > before && ::ftruncate(file->fd, static_cast<off_t>(before)) != 0) errno = code;
        throw IoFailure(
            code, "cannot grow the file to " + std::to_string(nbytes) + " bytes: " + errno_text(code), path_);
    }
}

void File::sync() {
    const auto file = open();
    int rc;
    do {
        rc = ::fdatasync(file->fd);
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        const int code = errno;
        throw IoFailure(code, "cannot flush to the drive: " + errno_text(code), path_);
    }
}

void File::close() {
    std::shared_ptr<const OpenFile> last;
    std::lock_guard lock(mutex_);
    last.swap(open_);
}

}  // namespace tz
