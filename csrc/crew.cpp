#include "crew.hpp"

#include "slice.hpp"

namespace tz {

Crew::Crew(unsigned size) {
    try {
        for (unsigned i = 1; i < size; ++i) threads_.emplace_back([this, i] { help(i); });
    } catch (...) {
        stop();
        throw;
    }
}

Crew::~Crew() {
    stop();
}

void Crew::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void Crew::run(const std::function<void(unsigned)>& part) {
    if (threads_.empty()) return part(0);
    {
        std::lock_guard lock(mutex_);
        part_ = &part;
        busy_ = static_cast<unsigned>(threads_.size());
        ++round_;
    }
    start_.notify_all();
    part(0);
    std::unique_lock lock(mutex_);
    end_.wait(lock, [this] { return busy_ == 0; });
}

void Crew::help(unsigned index) {
    name_thread("tz-adam");
    set_slice(kBackgroundSlice);
    std::size_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        start_.wait(lock, [&] { return stop_ || round_ != seen; });
        if (round_ == seen) return;
        seen = round_;
        const auto* part = part_;
        lock.unlock();
        (*part)(index);
        lock.lock();
        if (--busy_ == 0) end_.notify_one();
    }
}

}  // namespace tz
