// The lanes of an engine: one per drive, made when a file there is first used.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine.hpp"
#include "lane.hpp"

namespace tz {

class Lanes {
  public:
    Lanes(const EngineOptions& options, Sink& sink);

    Lane& of(const Member& member);  // IoFailure when its thread cannot be made
    bool fix(const char* data, std::size_t n);
    void unfix(const char* data);
    // As Lane::stop, for each; false: all of them must be kept for ever.
    bool stop(std::chrono::nanoseconds patience);
    std::vector<DriveInfo> describe() const;
    Counters counters() const;  // bytes only
    bool wants_ring() const noexcept { return ring_; }
    const std::string& reason() const noexcept { return reason_; }

  private:
    struct Entry {
        dev_t device;
        bool direct;
        std::shared_ptr<Lane> lane;
        std::shared_ptr<Pacer> pacer;
        std::string reason;
    };
    struct Buffer {  // registered
        const char* data;
        std::size_t size;
    };
    Entry make(const Member& member);
    std::shared_ptr<Pacer> pacer_of(dev_t device) const;
    void forget(const char* data);  // the mutex is held

    const EngineOptions options_;
    Sink& sink_;
    bool ring_ = false;
    std::string reason_;
    mutable std::mutex mutex_;
    std::vector<Entry> entries_;
    std::vector<Buffer> buffers_;
};

}  // namespace tz
