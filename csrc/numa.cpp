#include "numa.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace tz {

namespace {

int read_node(const std::string& path) {
    std::ifstream file(path);
    int node = -1;
    return file >> node ? node : -1;
}

}  // namespace

int drive_node(dev_t device, const std::string& sys) {
    const std::string at =
        sys + "/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
    // the drive itself, the disk a partition is part of, and the controller above (NVMe keeps it there)
    for (const char* place : {"/device/numa_node", "/device/device/numa_node", "/../device/numa_node",
                              "/../device/device/numa_node"})
        if (const int node = read_node(at + place); node >= 0) return node;
    return -1;
}

void run_on_node(int node, const std::string& sys) {
    if (node < 0) return;
    std::ifstream file(sys + "/devices/system/node/node" + std::to_string(node) + "/cpulist");
    cpu_set_t allowed, wanted;
    CPU_ZERO(&wanted);
    if (!file || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (std::string range; std::getline(file, range, ',');) {
        int first = 0, last = 0;
        char dash = 0;
        std::istringstream text(range);
        if (!(text >> first)) continue;
        if (!(text >> dash >> last) || dash != '-') last = first;
        for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu)
            if (cpu >= 0 && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
    }
    if (CPU_COUNT(&wanted) > 0) sched_setaffinity(0, sizeof wanted, &wanted);
}

void prefer_node(void* data, std::size_t n, int node) {
    constexpr int kPreferred = 1;  // MPOL_PREFERRED, without libnuma's header
    if (node < 0 || node >= 64) return;
    const unsigned long mask = 1ul << node;
    syscall(SYS_mbind, data, n, kPreferred, &mask, 65ul, 0u);
}

}  // namespace tz
