#include "slice.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tz {

namespace {

// struct sched_attr of linux/sched/types.h, its first version
struct Attributes {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime, deadline, period;
};

constexpr std::uint32_t kOrdinary = 0;  // SCHED_OTHER

bool get(Attributes& attributes) noexcept {
    return syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0u) == 0 &&
           attributes.policy == kOrdinary;
}

}  // namespace

void name_thread(const char* name) noexcept {
    pthread_setname_np(pthread_self(), name);
}

// For an ordinary thread the runtime of sched_setattr is the slice that it asks EEVDF for, sched(7). One
// whose slice is over runs on until the scheduler's tick or a thread that wakes with an earlier deadline;
// PREEMPT_SHORT lets the latter in even before.
bool set_slice(std::chrono::nanoseconds slice) noexcept {
    Attributes attributes{}, now{};
    if (!get(attributes)) return false;
    attributes.size = sizeof attributes;
    attributes.runtime = static_cast<std::uint64_t>(slice.count());
    return syscall(SYS_sched_setattr, 0, &attributes, 0u) == 0 && get(now) &&
           now.runtime == attributes.runtime;
}

}  // namespace tz
