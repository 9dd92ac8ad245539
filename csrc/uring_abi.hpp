// The kernel's io_uring interface, as much as is used here (include/uapi/linux/io_uring.h, stable
// since 5.11). Spelled out so that the build needs no kernel headers of any age.
#pragma once

#include <cstdint>

namespace tz::uring {

inline constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // system calls, the same on every machine

inline constexpr std::uint32_t kSetupCqSize = 1u << 3, kSetupCoopTaskrun = 1u << 8,
                               kSetupSingleIssuer = 1u << 12, kSetupDeferTaskrun = 1u << 13;
inline constexpr std::uint32_t kFeatSingleMmap = 1u << 0, kFeatNoDrop = 1u << 1, kFeatExtArg = 1u << 8;
inline constexpr std::uint32_t kEnterGetEvents = 1u << 0, kEnterExtArg = 1u << 3;
inline constexpr std::uint64_t kOffRings = 0, kOffSqes = 0x10000000;
inline constexpr unsigned kRegisterFiles = 2, kRegisterFilesUpdate = 6, kRegisterBuffers2 = 15,
                          kRegisterBuffersUpdate = 16;
inline constexpr std::uint32_t kSparse = 1u << 0;
inline constexpr std::uint8_t kOpReadFixed = 4, kOpWriteFixed = 5, kOpRead = 22, kOpWrite = 23;
inline constexpr std::uint8_t kFixedFile = 1u << 0;

struct Sqe {
    std::uint8_t opcode;
    std::uint8_t flags;
    std::uint16_t ioprio;
    std::int32_t fd;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t length;
    std::uint32_t rw_flags;
    std::uint64_t user_data;
    std::uint16_t buffer_index;
    std::uint16_t personality;
    std::int32_t splice_fd;
    std::uint64_t padding[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved1;
    std::uint64_t user_address;
};
struct CqOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved1;
    std::uint64_t user_address;
};
struct Params {
    std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Timespec {
    std::int64_t seconds, nanoseconds;
};
struct EnterArg {
    std::uint64_t sigmask;
    std::uint32_t sigmask_size, padding;
    std::uint64_t timespec;
};
struct FilesUpdate {
    std::uint32_t offset, reserved;
    std::uint64_t fds;
};
struct ResourceRegister {
    std::uint32_t count, flags;
    std::uint64_t reserved, data, tags;
};
struct ResourceUpdate {
    std::uint32_t offset, reserved;
    std::uint64_t data, tags;
    std::uint32_t count, reserved2;
};

}  // namespace tz::uring
