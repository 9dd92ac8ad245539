// A few threads that wait for a function to share: the helpers of a pipeline's compute stage.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tz {

class Crew {
  public:
    explicit Crew(unsigned size);  // the caller counts: size - 1 threads are started
    ~Crew();

    unsigned size() const noexcept { return static_cast<unsigned>(threads_.size()) + 1; }
    // part(i) for every i in [0, size()), the caller doing 0; returns when all are done. `part` must not
    // throw.
    void run(const std::function<void(unsigned)>& part);
    void stop();  // ends the threads: the caller does what comes then alone; idempotent

  private:
    void help(unsigned index);

    std::mutex mutex_;
    std::condition_variable start_, end_;
    const std::function<void(unsigned)>* part_ = nullptr;
    std::size_t round_ = 0;
    unsigned busy_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace tz
