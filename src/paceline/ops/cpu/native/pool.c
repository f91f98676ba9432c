/* A pool of threads in which nobody waits for a thread that has nothing to do.
 *
 * Why not OpenMP: its regions end when every thread of the team has arrived. On a machine that others
 * use too, a team member that is not scheduled right now stops the whole step, some hundred times a
 * step. Here the caller takes chunks like everybody else and waits only for chunks in progress. It
 * also leaves one OpenMP runtime in the process (the one of the tensor library), and none is needed
 * to build this.
 *
 * A job is announced by one 64-bit ticket: generation in the upper half, next chunk in the lower. A
 * chunk is claimed by compare-and-swap on the ticket, so that a thread which is late by a whole job
 * can't claim anything: the generation has changed. While a job is being written the ticket's lower
 * half is CLOSED, above any count.
 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define MOST 256
#define CLOSED 0xffffffffu
#define SPIN_NS 200000 /* how long a thread without work keeps looking before it sleeps */
#define YIELD_NS 20000 /* how long the caller spins for a chunk in progress before it yields */

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t alarm_clock = PTHREAD_COND_INITIALIZER;
static int started;

static _Atomic uint64_t ticket = CLOSED;
static _Atomic int64_t total, done;
static _Atomic(Work) work_now;
static _Atomic(void *) job_now;
static atomic_int allowed; /* helpers with a lower number may take part */
static atomic_int asleep;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int open_for(int number) {
    uint64_t t = atomic_load(&ticket);
    return number < atomic_load(&allowed) && (int64_t)(t & CLOSED) < atomic_load(&total);
}

/* Claim and run chunks until there is none left. */
static void take(int number) {
    for (;;) {
        uint64_t t = atomic_load(&ticket);
        Work work = atomic_load(&work_now);
        void *job = atomic_load(&job_now);
        int64_t chunk = (int64_t)(t & CLOSED);
        if (number >= atomic_load(&allowed) || chunk >= atomic_load(&total)) return;
        if (!atomic_compare_exchange_weak(&ticket, &t, t + 1)) continue;
        work(job, chunk);
        atomic_fetch_add(&done, 1);
    }
}

static void *helper(void *argument) {
    const int number = (int)(intptr_t)argument;
    for (;;) {
        int64_t until = now_ns() + SPIN_NS;
        for (int i = 1; !open_for(number); i++) {
            relax();
            if (i % 64 == 0 && now_ns() > until) {
                pthread_mutex_lock(&bed);
                atomic_fetch_add(&asleep, 1);
                while (!open_for(number)) pthread_cond_wait(&alarm_clock, &bed);
                atomic_fetch_sub(&asleep, 1);
                pthread_mutex_unlock(&bed);
                break;
            }
        }
        take(number);
    }
    return NULL;
}

/* A forked child has none of the threads, and locks in an unknown state. */
static void forget(void) {
    pthread_mutex_init(&in_use, NULL);
    pthread_mutex_init(&bed, NULL);
    pthread_cond_init(&alarm_clock, NULL);
    started = 0;
    atomic_store(&asleep, 0);
    atomic_store(&ticket, CLOSED);
}

static void start(int helpers) {
    static int registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget) == 0;
    sigset_t all, before; /* signals are the interpreter's: helpers take none */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < helpers) {
        pthread_t thread;
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attr, helper, (void *)(intptr_t)started);
        pthread_attr_destroy(&attr);
        if (failed) break; /* fewer threads, same result */
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pool_run(Work work, void *job, int64_t chunks, int threads) {
    int helpers = (threads < MOST ? threads : MOST) - 1;
    if (chunks - 1 < helpers) helpers = (int)(chunks - 1);
    if (helpers <= 0 || pthread_mutex_trylock(&in_use) != 0) {
        for (int64_t i = 0; i < chunks; i++) work(job, i);
        return;
    }
    if (started < helpers) start(helpers);
    uint64_t generation = (atomic_load(&ticket) >> 32) + 1;
    atomic_store(&ticket, (generation << 32) | CLOSED);
    atomic_store(&work_now, work);
    atomic_store(&job_now, job);
    atomic_store(&total, chunks);
    atomic_store(&allowed, helpers);
    atomic_store(&done, 0);
    atomic_store(&ticket, (generation + 1) << 32);
    if (atomic_load(&asleep) > 0) {
        pthread_mutex_lock(&bed);
        pthread_cond_broadcast(&alarm_clock);
        pthread_mutex_unlock(&bed);
    }
    take(-1);
    int64_t until = 0;
    for (int i = 1; atomic_load(&done) < chunks; i++) {
        relax();
        if (i % 64) continue;
        int64_t t = now_ns();
        if (!until) until = t + YIELD_NS;
        if (t > until) sched_yield();
    }
    pthread_mutex_unlock(&in_use);
}

typedef struct {
    _Atomic int64_t next;
    int64_t end;
    char apart[48]; /* a cache line each */
} Range;

typedef struct {
    Walk walk;
    void *job;
    Range *ranges;
    int64_t count, step;
} Ranges;

static void walk_ranges(void *ranges, int64_t own) {
    const Ranges *r = ranges;
    for (int64_t i = 0; i < r->count; i++) {
        Range *range = r->ranges + (own + i) % r->count;
        for (;;) {
            const int64_t first = atomic_fetch_add(&range->next, r->step);
            if (first >= range->end) break;
            const int64_t last = first + r->step;
            r->walk(r->job, first, last < range->end ? last : range->end);
        }
    }
}

void pool_walk(Walk walk, void *job, int64_t blocks, int64_t step, int threads) {
    const int64_t steps = (blocks + step - 1) / step;
    int64_t count = threads < MOST ? threads : MOST;
    if (count > steps) count = steps;
    if (count <= 1) {
        for (int64_t first = 0; first < blocks; first += step)
            walk(job, first, first + step < blocks ? first + step : blocks);
        return;
    }
    Range ranges[MOST];
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = steps * i / count * step, end = steps * (i + 1) / count * step;
        atomic_init(&ranges[i].next, first);
        ranges[i].end = end < blocks ? end : blocks;
    }
    Ranges all = {walk, job, ranges, count, step};
    pool_run(walk_ranges, &all, count, (int)count);
}
