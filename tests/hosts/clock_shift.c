/* Preloaded into every program of a test host: shifts its wall clock by the seconds in /srv/clock-shift, read at each
   look, so that a clock can be stepped while programs run. Monotonic and boot time stay as they are. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift_s(void) {
    char text[32];
    int saved = errno, file = open("/srv/clock-shift", O_RDONLY | O_CLOEXEC);
    long seconds = 0;
    if (file >= 0) {
        ssize_t size = read(file, text, sizeof text - 1);
        close(file);
        if (size > 0) {
            text[size] = 0;
            seconds = atol(text);
        }
    }
    errno = saved;
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = syscall(SYS_gettimeofday, now, zone);
    if (result == 0) now->tv_sec += shift_s();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
