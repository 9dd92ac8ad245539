// The number of buffers in use finds its way on drives of many kinds, under noise, and stays where it is
// without work.
#include <algorithm>
#include <cmath>
#include <functional>

#include "appetite.hpp"
#include "check.hpp"

using namespace tz;
using Curve = std::function<double(std::size_t)>;  // buffers in use -> bytes per nanosecond

constexpr std::uint64_t kBytes = 7 << 20;

struct Drive {
    Curve rate;
    double noise;  // of a window's rate, one standard deviation
    std::mt19937 generator;
    std::int64_t now = 0;

    void serve(Appetite& appetite, int buffers) {
        std::normal_distribution<double> draw(0.0, noise);
        double mood = 1.0;
        for (int i = 0; i < buffers; ++i) {
            if (i % 24 == 0) mood = std::exp(draw(generator));
            now += static_cast<std::int64_t>(static_cast<double>(kBytes) / (rate(appetite.limit()) * mood));
            appetite.moved(kBytes, now);
        }
    }
};

// Where it is most of the time after a while.
static std::size_t settles(std::size_t most, const Curve& rate, double noise, unsigned seed) {
    Appetite appetite(most);
    Drive drive{rate, noise, std::mt19937(seed)};
    drive.serve(appetite, 100'000);
    std::vector<int> times(most + 1);
    for (int i = 0; i < 4'000; ++i) {
        drive.serve(appetite, 10);
        ++times[appetite.limit()];
    }
    return static_cast<std::size_t>(std::max_element(times.begin(), times.end()) - times.begin());
}

static void finds_the_best_number() {
    const Curve flat = [](std::size_t) { return 2.0; };
    const Curve deep = [](std::size_t n) {
        return 3.0 * static_cast<double>(n) / static_cast<double>(n + 8);
    };
    const Curve cached = [](std::size_t n) { return n < 6 ? 1.9 : 2.0 - 0.015 * static_cast<double>(n - 6); };
    const Curve knee = [](std::size_t n) { return std::min<double>(static_cast<double>(n), 12.0) / 6.0; };
    for (unsigned seed = 0; seed < 8; ++seed)
        for (const double noise : {0.0, 0.02}) {
            CHECK(settles(24, flat, noise, seed) == 4);
            CHECK(settles(24, deep, noise, seed) == 24);
            CHECK(settles(24, cached, noise, seed) == 6);
            CHECK(settles(24, knee, noise, seed) == 12);
            CHECK(settles(100, deep, noise, seed) >= 64);
        }
}

// What it settles at under noise is within a few per cent of the best.
static void noise_costs_little() {
    const Curve cached = [](std::size_t n) { return n < 6 ? 1.7 : 2.0 - 0.02 * static_cast<double>(n - 6); };
    for (unsigned seed = 0; seed < 20; ++seed)
        CHECK(cached(settles(24, cached, 0.1, seed)) >= 0.95 * cached(6));
}

static void never_more_than_there_are() {
    for (std::size_t most = 1; most <= 40; ++most) {
        Appetite appetite(most);
        Drive drive{[](std::size_t n) { return static_cast<double>(n); }, 0.3, std::mt19937(1)};
        for (int i = 0; i < 20'000; ++i) {
            drive.serve(appetite, 1);
            CHECK(appetite.limit() >= std::min<std::size_t>(most, 4) && appetite.limit() <= most);
        }
    }
}

static void time_without_work_does_not_count() {
    Appetite appetite(24);
    Drive drive{[](std::size_t n) { return n == 12 ? 2.0 : 0.5; }, 0.0, std::mt19937(1)};
    const std::size_t first = appetite.limit();
    for (int i = 0; i < 5'000; ++i) {
        drive.serve(appetite, 12);  // never a whole window
        appetite.starved();
        drive.now += 1'000'000'000;
        CHECK(appetite.limit() == first);
    }
    drive.serve(appetite, 20'000);
    CHECK(appetite.limit() == 12);
}

// A clock that stands still, or a drive that takes no time, is no reason to divide by zero.
static void a_clock_that_stands_still() {
    Appetite appetite(24);
    for (int i = 0; i < 10'000; ++i) appetite.moved(kBytes, 5);
    CHECK(appetite.limit() >= 4);
}

int main() {
    finds_the_best_number();
    noise_costs_little();
    never_more_than_there_are();
    time_without_work_does_not_count();
    a_clock_that_stands_still();
}
