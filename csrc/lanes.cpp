#include "lanes.hpp"

#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "numa.hpp"
#include "pool_lane.hpp"
#include "uring_lane.hpp"

namespace tz {

Lanes::Lanes(const EngineOptions& options, Sink& sink) : options_(options), sink_(sink) {
    if (options.kind == EngineKind::pool) return;
    reason_ = probe_uring();
    ring_ = reason_.empty();
    if (options.kind == EngineKind::uring && !ring_)
        throw IoFailure(ENOSYS,
                        "io_uring cannot be used here (" + reason_ + "): use the pool, or kind=\"auto\"", "");
}

Lane& Lanes::of(const Member& member) {
    std::lock_guard lock(mutex_);
    for (const auto& entry : entries_)
        if (entry.device == member.device() && entry.direct == member.direct()) return *entry.lane;
    try {
        entries_.push_back(make(member));
    } catch (const std::system_error& error) {
        throw IoFailure(error.code().value(),
                        "cannot start an I/O thread: " + errno_text(error.code().value()), member.path());
    }
    for (const auto& buffer : buffers_) entries_.back().lane->fix(buffer.data, buffer.size);
    return *entries_.back().lane;
}

std::shared_ptr<Pacer> Lanes::pacer_of(dev_t device) const {
    if (options_.limit == 0) return nullptr;
    for (const auto& entry : entries_)
        if (entry.device == device) return entry.pacer;
    return std::make_shared<Pacer>(options_.limit);
}

Lanes::Entry Lanes::make(const Member& member) {
    LaneOptions options;
    options.block = options_.block;
    options.depth = options_.depth;
    options.threads = options_.threads ? options_.threads : std::min(options_.depth, 16u);
    options.calls = options_.calls;
    options.node = drive_node(member.device());
    options.pacer = pacer_of(member.device());
    Entry entry{member.device(), member.direct(), nullptr, options.pacer, {}};
    // A buffered transfer is a copy, which one thread would do one after the other.
    if (ring_ && member.direct()) {
        entry.lane = UringLane::make(options, sink_, entry.reason);
        if (!entry.lane && options_.kind == EngineKind::uring)
            throw IoFailure(EIO, "io_uring cannot be used for this drive (" + entry.reason + ")",
                            member.path());
    } else if (options_.kind != EngineKind::pool) {
        entry.reason = ring_ ? "the file system refuses direct I/O" : reason_;
    }
    if (!entry.lane) entry.lane = PoolLane::make(options, sink_);
    return entry;
}

bool Lanes::fix(const char* data, std::size_t n) {
    if (n == 0) return false;
    std::lock_guard lock(mutex_);
    forget(data);
    buffers_.push_back({data, n});
    bool all = true;
    for (const auto& entry : entries_) all = entry.lane->fix(data, n) && all;
    return all;
}

void Lanes::unfix(const char* data) {
    std::lock_guard lock(mutex_);
    forget(data);
}

void Lanes::forget(const char* data) {
    if (std::erase_if(buffers_, [data](const Buffer& buffer) { return buffer.data == data; }) == 0) return;
    for (const auto& entry : entries_) entry.lane->unfix(data);
}

bool Lanes::stop(std::chrono::nanoseconds patience) {
    std::lock_guard lock(mutex_);
    bool all = true;
    for (const auto& entry : entries_) all = entry.lane->stop(patience) && all;
    return all;
}

std::vector<DriveInfo> Lanes::describe() const {
    std::lock_guard lock(mutex_);
    std::vector<DriveInfo> out;
    for (const auto& entry : entries_) {
        DriveInfo info;
        info.device = std::to_string(major(entry.device)) + ":" + std::to_string(minor(entry.device));
        info.engine = entry.lane->name();
        info.reason = entry.reason;
        info.direct = entry.direct;
        info.node = entry.lane->node();
        info.bytes_read = entry.lane->counts().read.load();
        info.bytes_written = entry.lane->counts().written.load();
        if (const auto* ring = dynamic_cast<const UringLane*>(entry.lane.get())) {
            info.fixed_files = ring->fixed_files();
            info.fixed_buffers = ring->fixed_buffers();
            info.flags = ring->flags();
        }
        out.push_back(std::move(info));
    }
    return out;
}

Counters Lanes::counters() const {
    std::lock_guard lock(mutex_);
    Counters sum;
    for (const auto& entry : entries_) {
        sum.bytes_read += entry.lane->counts().read.load();
        sum.bytes_written += entry.lane->counts().written.load();
    }
    return sum;
}

}  // namespace tz
