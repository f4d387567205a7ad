/* Preloaded into a process under test (shim.py): its wall clock may be moved, and its connections led through proxies.
 *
 * CHAOS_CLOCK names a file of one int64, nanoseconds that are added to the wall clock; it is mapped, so the clock jumps
 * while the process runs. Monotonic clocks are left alone. CHAOS_LINKS is "port:proxy,port:proxy ...": connections to
 * these ports of the loopback go to the proxies' ports.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none = 0;
static const volatile int64_t *shift_ns = &none;
static uint16_t through[65536];
static int (*next_connect)(int, const struct sockaddr *, socklen_t);

/* The vDSO's, by way of libc; asked for once, because dlsym may be slow. */
static int (*next_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    next_connect = dlsym(RTLD_NEXT, "connect");
    next_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *file = getenv("CHAOS_CLOCK");
    int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *there = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
        if (there != MAP_FAILED) shift_ns = there;
        close(fd);
    }
    const char *links = getenv("CHAOS_LINKS");
    while (links && *links) {
        char *end;
        unsigned long port = strtoul(links, &end, 10);
        if (*end != ':') break;
        unsigned long proxy = strtoul(end + 1, &end, 10);
        if (port < 65536 && proxy < 65536) through[port] = (uint16_t)proxy;
        links = *end == ',' ? end + 1 : end;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = next_gettime ? next_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    int64_t by = *shift_ns;
    if (!failed && by && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + by;
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &at)) return -1;
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}

int connect(int fd, const struct sockaddr *to, socklen_t size) {
    struct sockaddr_storage other;
    if (size <= sizeof other && (to->sa_family == AF_INET || to->sa_family == AF_INET6)) {
        memcpy(&other, to, size);
        /* The port is at the same place in both families. */
        struct sockaddr_in *in = (struct sockaddr_in *)&other;
        uint16_t proxy = through[ntohs(in->sin_port)];
        if (proxy) {
            in->sin_port = htons(proxy);
            return next_connect(fd, (struct sockaddr *)&other, size);
        }
    }
    return next_connect(fd, to, size);
}
