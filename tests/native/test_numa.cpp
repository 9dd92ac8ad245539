// Where a drive is, from a made-up sysfs; and that putting things there never fails on a machine with one
// node.
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>

#include "check.hpp"
#include "numa.hpp"
#include "slab.hpp"

using namespace tz;

static void put(const std::string& path, const std::string& text) {
    for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1))
        mkdir(path.substr(0, at).c_str(), 0755);
    std::ofstream(path) << text;
}

int main() {
    TempDir dir;
    const std::string sys = dir.file("sys");
    CHECK(drive_node(makedev(259, 0), sys) == -1);
    put(sys + "/dev/block/259:0/device/numa_node", "1\n");
    CHECK(drive_node(makedev(259, 0), sys) == 1);
    put(sys + "/dev/block/259:1/device/device/numa_node", "0\n");
    CHECK(drive_node(makedev(259, 1), sys) == 0);
    put(sys + "/dev/block/8:16/device/numa_node", "-1\n");
    CHECK(drive_node(makedev(8, 16), sys) == -1);
    // a partition lies in its disk's folder
    put(sys + "/disks/nvme0n1/device/numa_node", "3\n");
    put(sys + "/disks/nvme0n1/nvme0n1p1/partition", "1\n");
    CHECK(symlink((sys + "/disks/nvme0n1/nvme0n1p1").c_str(), (sys + "/dev/block/259:2").c_str()) == 0);
    CHECK(drive_node(makedev(259, 2), sys) == 3);

    put(sys + "/devices/system/node/node0/cpulist", "0-1023\n");
    put(sys + "/devices/system/node/node1/cpulist", "garbage\n");
    for (const int node : {-1, 0, 1, 7}) run_on_node(node, sys);
    for (const int node : {-1, 0, 63, 64, 1000}) {
        Slab slab(1 << 20, node);
        std::memset(slab.data(), 1, slab.size());
    }
    std::printf("numa: ok\n");
}
