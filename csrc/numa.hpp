// Where a drive is: its NUMA node, and threads and memory put there. On one node, or without sysfs, all of it
// does nothing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace tz {

// The node of the block device that `device` is (a partition of), or -1. `sys`: where sysfs is mounted.
int drive_node(dev_t device, const std::string& sys = "/sys");

// The calling thread stays on the node's CPUs; -1, or a node that is not there: nothing happens.
void run_on_node(int node, const std::string& sys = "/sys");

// Pages of [data, data + n) that are touched from now on come from the node if it has room.
void prefer_node(void* data, std::size_t n, int node);

}  // namespace tz
