// Anonymous memory on a 2 MiB boundary, backed by huge pages where the kernel has them.
#pragma once

#include <cstddef>

namespace tz {

class Slab {
  public:
    // Pages come from the NUMA node `node` while it has room (-1: wherever they are touched).
    // std::invalid_argument for 0 bytes, IoFailure(ENOMEM) when the kernel refuses.
    explicit Slab(std::size_t nbytes, int node = -1);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    char* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    // Bytes of this slab that lie in huge pages now (0 where /proc/self/smaps cannot tell).
    std::size_t huge_bytes() const;

  private:
    char* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t mapped_ = 0;
};

}  // namespace tz
