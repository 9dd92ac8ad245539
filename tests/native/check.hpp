// The whole test framework: a check that says where it failed and ends the program with 1.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

// Runs `body`, which must throw an Exception; returns it.
template <class Exception, class Body>
Exception must_throw(Body&& body) {
    try {
        body();
    } catch (const Exception& e) {
        return e;
    }
    std::fprintf(stderr, "nothing was thrown\n");
    std::exit(1);
}

// A directory of this process, removed with everything in it.
class TempDir {
  public:
    TempDir() {
        const char* base = std::getenv("TMPDIR");
        path_ = std::string(base ? base : "/tmp") + "/tierzero-native-XXXXXX";
        if (!mkdtemp(path_.data())) std::exit(2);
    }
    ~TempDir() {
        for (const auto& name : names_) ::unlink(name.c_str());
        ::rmdir(path_.c_str());
    }
    std::string file(const std::string& name) {
        names_.push_back(path_ + "/" + name);
        return names_.back();
    }

  private:
    std::string path_;
    std::vector<std::string> names_;
};

inline std::vector<float> normal(std::size_t n, unsigned seed, float scale = 1.0f) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> draw(0.0f, scale);
    std::vector<float> out(n);
    for (float& x : out) x = draw(generator);
    return out;
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
