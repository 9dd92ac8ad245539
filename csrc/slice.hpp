// What a thread is called, and how readily it leaves its core to others.
#pragma once

#include <chrono>

namespace tz {

// The slice of a thread that computes what is wanted in a while; an ordinary thread's is about 3 ms.
inline constexpr std::chrono::milliseconds kBackgroundSlice{100};

// Gives the calling thread slices of that length, 0.1 to 100 ms: where it runs, a thread of a shorter slice
// takes its core as soon as it wakes, and where it wakes, it takes nobody's core who has a shorter one. Its
// share of the time stays. False where the kernel does not know slices (before Linux 6.12) or the thread is
// not an ordinary one.
bool set_slice(std::chrono::nanoseconds slice) noexcept;

// The calling thread's name in top, gdb and perf: at most 15 characters.
void name_thread(const char* name) noexcept;

}  // namespace tz
