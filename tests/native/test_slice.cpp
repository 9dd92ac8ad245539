// Threads' slices and names.
#include <pthread.h>
#include <sched.h>

#include <cstdio>
#include <string>
#include <thread>

#include "check.hpp"
#include "slice.hpp"

using namespace tz;

namespace {

template <class Work>
void elsewhere(Work work) {
    std::thread(work).join();
}

void names() {
    elsewhere([] {
        name_thread("tz-test");
        char name[16] = "";
        CHECK(pthread_getname_np(pthread_self(), name, sizeof name) == 0);
        CHECK(std::string(name) == "tz-test");
    });
}

// Twice the same answer: the kernel knows slices or it does not.
void slices() {
    elsewhere([] {
        const bool knows = set_slice(kBackgroundSlice / 10);
        CHECK(set_slice(kBackgroundSlice) == knows);
        CHECK(!set_slice(kBackgroundSlice * 1000) || !knows);  // longer than there is: the kernel's own bound
    });
}

// A thread that is not an ordinary one stays what it is.
void others() {
    elsewhere([] {
        sched_param none{};
        CHECK(sched_setscheduler(0, SCHED_BATCH, &none) == 0);
        CHECK(!set_slice(kBackgroundSlice));
        CHECK(sched_getscheduler(0) == SCHED_BATCH);
    });
}

}  // namespace

int main() {
    names();
    slices();
    others();
    std::printf("slice: ok\n");
}
