#include "file.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>

#include "align.hpp"
#include "error.hpp"

namespace tz {

bool OpenFile::same_file(const OpenFile& other) const {
    for (const auto& a : members)
        for (const auto& b : other.members)
            if (a->same_file(*b)) return true;
    return false;
}

File::File(std::vector<std::string> paths, bool create, bool direct, std::vector<unsigned> weights,
           std::uint64_t stripe)
    : paths_(std::move(paths)) {
    if (paths_.empty()) throw std::invalid_argument("a file needs at least one path");
    if (weights.empty()) weights.assign(paths_.size(), 1);
    if (weights.size() != paths_.size())
        throw std::invalid_argument(
            "a striped file needs one weight per path: " + std::to_string(paths_.size()) + " paths, " +
            std::to_string(weights.size()) + " weights");
    auto file = std::make_shared<OpenFile>();
    file->map = StripeMap(std::move(weights), stripe);
    for (const auto& path : paths_) {
        auto member = std::make_unique<const Member>(path, create, direct);
        for (const auto& other : file->members)
            if (member->same_file(*other))
                throw std::invalid_argument(
                    "two members of a striped file are the same file: " + other->path() + " and " + path);
        if (member->direct()) file->alignment = kPage;
        directs_.push_back(member->direct());
        file->members.push_back(std::move(member));
    }
    alignment_ = file->alignment;
    open_ = std::move(file);
}

bool File::direct() const noexcept {
    return std::find(directs_.begin(), directs_.end(), false) == directs_.end();
}

bool File::closed() const {
    std::lock_guard lock(mutex_);
    return !open_;
}

std::shared_ptr<const OpenFile> File::open() const {
    std::lock_guard lock(mutex_);
    if (!open_) throw std::invalid_argument("the file " + path() + " is closed");
    return open_;
}

std::uint64_t File::size() const {
    const auto file = open();
    std::uint64_t nbytes = UINT64_MAX;
    for (std::size_t i = 0; i < file->members.size(); ++i)
        nbytes = std::min(nbytes, file->map.first_missing(i, file->members[i]->size()));
    return nbytes;
}

void File::preallocate(std::uint64_t nbytes) {
    if (nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
        throw std::invalid_argument("cannot preallocate " + std::to_string(nbytes) +
                                    " bytes: beyond the largest file");
    const auto file = open();
    std::vector<std::uint64_t> before;
    for (std::size_t i = 0; i < file->members.size(); ++i) {
        before.push_back(file->members[i]->size());
        try {
            file->members[i]->preallocate(file->map.member_bytes(i, nbytes));
        } catch (...) {
            for (std::size_t j = 0; j < i; ++j)
                if (file->members[j]->size() > before[j]) file->members[j]->truncate(before[j]);
            throw;
        }
    }
}

void File::truncate(std::uint64_t nbytes) {
    const auto file = open();
    for (std::size_t i = 0; i < file->members.size(); ++i)
        file->members[i]->truncate(file->map.member_bytes(i, nbytes));
}

void File::sync() {
    const auto file = open();
    for (const auto& member : file->members) member->sync();
}

void File::close() {
    std::shared_ptr<const OpenFile> last;
    std::lock_guard lock(mutex_);
    last.swap(open_);
}

}  // namespace tz
