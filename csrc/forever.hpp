// What the kernel may still write into after its owner is gone is never freed.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace tz {

inline void keep_for_ever(std::shared_ptr<void> what) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::shared_ptr<void>>;  // not destroyed at exit either
    std::lock_guard lock(mutex);
    kept.push_back(std::move(what));
}

}  // namespace tz
