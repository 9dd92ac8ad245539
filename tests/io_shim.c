// Preloaded over the C library: pread and pwrite that are short, interrupted, busy or failing, and an alarm that no
// Python sees. SHIM_LONGEST: bytes of a transfer at most. SHIM_HICCUPS: two calls of three do nothing (EINTR, EAGAIN).
// SHIM_FAIL: errno of every call beyond SHIM_OFFSET, once SHIM_ARMED has been called.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/types.h>

typedef ssize_t (*read_call)(int, void*, size_t, off_t);
typedef ssize_t (*write_call)(int, const void*, size_t, off_t);

static atomic_int calls, armed;
static atomic_long alarms;

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int trouble(size_t* n, off_t at) {
    if (!armed) return 0;
    const int call = calls++;
    if (at >= setting("SHIM_OFFSET", 0) && setting("SHIM_FAIL", 0)) {
        errno = (int)setting("SHIM_FAIL", 0);
        return 1;
    }
    if (setting("SHIM_HICCUPS", 0) && call % 3 != 2) {
        errno = call % 3 ? EAGAIN : EINTR;
        return 1;
    }
    const size_t longest = (size_t)setting("SHIM_LONGEST", 1L << 40);
    if (*n > longest) *n = longest;
    return 0;
}

ssize_t pread(int fd, void* p, size_t n, off_t at) {
    return trouble(&n, at) ? -1 : ((read_call)dlsym(RTLD_NEXT, "pread64"))(fd, p, n, at);
}
ssize_t pread64(int fd, void* p, size_t n, off_t at) { return pread(fd, p, n, at); }
ssize_t pwrite(int fd, const void* p, size_t n, off_t at) {
    return trouble(&n, at) ? -1 : ((write_call)dlsym(RTLD_NEXT, "pwrite64"))(fd, p, n, at);
}
ssize_t pwrite64(int fd, const void* p, size_t n, off_t at) { return pwrite(fd, p, n, at); }

void shim_arm(int on) { armed = on; }
int shim_calls(void) { return calls; }

static void count(int number) {
    (void)number;
    ++alarms;
}
// An alarm every `microseconds` (0: none), whose handler lets system calls be interrupted.
void shim_alarm(long microseconds) {
    struct sigaction action = {.sa_handler = count};
    sigaction(SIGALRM, &action, NULL);
    const struct itimerval every = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &every, NULL);
}
long shim_alarms(void) { return alarms; }
