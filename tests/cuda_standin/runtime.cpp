// Runs the threads of kernels as fibers, so that warps can shuffle, and looks at every access: `standin_access` stops
// the kernel where a GPU would stop it (memory that no kernel can reach, an address that is not aligned), and where two
// threads get in each other's way, and notes how many bytes were touched.
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <map>

#include "shim.h"

Dim3 blockIdx, threadIdx, blockDim, gridDim;

enum { WARP = 32, STACK = 1 << 16, DEVICE = 1, PINNED = 2 };
enum { FINE = 0, ILLEGAL = 1, MISALIGNED = 2, RACE = 3 };
struct Range {
    uint64_t begin, end, kind;
};
struct Lane {
    ucontext_t context;
    bool waits, over;
    uint64_t given, taken;
    int step;
};
// In the order in which Python reads it.
struct Standin {
    uint64_t status, address, size, is_write;                           // of the access that stopped the kernel
    uint64_t read_device, written_device, read_pinned, written_pinned;  // bytes
    uint64_t n_accesses, looks_for_races;
};
static Standin standin;
static const Range* ranges;
static int n_ranges, last_range;
static Lane lanes[WARP];
static char (*stacks)[STACK];  // of the lanes; under the thread sanitizer every stream has its own
enum { STACKS = WARP * STACK };
static ucontext_t home;
static int lane;
static void (*the_kernel)();
struct Touch {
    int64_t writer, reader;
};
static std::map<uint64_t, Touch> touched;  // by address, within a launch

static void stop(int status, uint64_t address, uint64_t size, bool is_write) {
    standin.status = status, standin.address = address, standin.size = size, standin.is_write = is_write;
    lanes[lane].over = true;
    swapcontext(&lanes[lane].context, &home);  // never comes back
}

static void standin_access(void* where, uint64_t size, bool is_write) {
    const uint64_t at = (uint64_t)where;
    if (at - (uint64_t)stacks < STACKS || at - (uint64_t)&standin < sizeof standin) return;
    if (at - (uint64_t)&threadIdx < sizeof(Dim3) || at - (uint64_t)&blockIdx < sizeof(Dim3) ||
        at - (uint64_t)&blockDim < sizeof(Dim3) || at - (uint64_t)&gridDim < sizeof(Dim3))
        return;
    ++standin.n_accesses;
    if (at % (size > 16 ? 16 : size)) stop(MISALIGNED, at, size, is_write);
    const Range* found = 0;
    if (last_range < n_ranges && at >= ranges[last_range].begin && at + size <= ranges[last_range].end) {
        found = &ranges[last_range];
    } else {
        for (int k = 0; k < n_ranges; ++k) {
            if (at >= ranges[k].begin && at + size <= ranges[k].end) {
                found = &ranges[k], last_range = k;
                break;
            }
        }
    }
    if (!found) stop(ILLEGAL, at, size, is_write);
    if (found->kind == PINNED) (is_write ? standin.written_pinned : standin.read_pinned) += size;
    else (is_write ? standin.written_device : standin.read_device) += size;
    if (standin.looks_for_races) {
        const int64_t me = (int64_t)blockIdx.x * blockDim.x + threadIdx.x + 1;
        for (uint64_t k = 0; k < size; ++k) {
            Touch& touch = touched[at + k];
            if ((touch.writer && touch.writer != me) || (is_write && touch.reader && touch.reader != me))
                stop(RACE, at, size, is_write);
            (is_write ? touch.writer : touch.reader) = me;
        }
    }
}

void standin_vector(const void* where, uint64_t size, bool is_write) {
    const uint64_t at = (uint64_t)where;
    if (at - (uint64_t)stacks >= STACKS && at % size) stop(MISALIGNED, at, size, is_write);
}

#ifdef STANDIN_THREAD
extern "C" {
void __tsan_write8(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
}
#elif !defined STANDIN_ADDRESS
extern "C" {
#define STANDIN_SIZE(n)                                                     \
    void __tsan_read##n(void* p) { standin_access(p, n, false); }           \
    void __tsan_write##n(void* p) { standin_access(p, n, true); }           \
    void __tsan_unaligned_read##n(void* p) { standin_access(p, n, false); } \
    void __tsan_unaligned_write##n(void* p) { standin_access(p, n, true); }
STANDIN_SIZE(1)
STANDIN_SIZE(2)
STANDIN_SIZE(4)
STANDIN_SIZE(8)
STANDIN_SIZE(16)
// Whole records are copied member by member on a GPU; only words of CUDA's own are one access.
void __tsan_read_range(void* p, size_t n) {
    if (n == 16) standin_access(p, 16, false);
    else
        for (size_t k = 0; k < n; k += 4) standin_access((char*)p + k, 4, false);
}
void __tsan_write_range(void* p, size_t n) {
    if (n == 16) standin_access(p, 16, true);
    else
        for (size_t k = 0; k < n; k += 4) standin_access((char*)p + k, 4, true);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#else
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
#endif

unsigned long long atomicMax(unsigned long long* where, unsigned long long value) {
#ifdef STANDIN_THREAD
    __tsan_write8(where);
#endif
    const uint64_t races = standin.looks_for_races;
    standin.looks_for_races = 0;
    standin_access(where, 8, true);
    standin.looks_for_races = races;
    unsigned long long old = *where;
    if (value > old) *where = value;
    return old;
}

uint64_t standin_exchange(uint64_t value, int step) {
    lanes[lane].given = value, lanes[lane].step = step, lanes[lane].waits = true;
    swapcontext(&lanes[lane].context, &home);
    return lanes[lane].taken;
}

static void run_lane() {
    the_kernel();
    lanes[lane].over = true;
    swapcontext(&lanes[lane].context, &home);
}

// One warp of a block: its lanes run until they shuffle or end. A shuffle needs all of them.
static bool run_warp(unsigned int first) {
    for (int k = 0; k < WARP; ++k) {
        lanes[k].waits = lanes[k].over = false;
        getcontext(&lanes[k].context);
        lanes[k].context.uc_stack.ss_sp = stacks[k];
        lanes[k].context.uc_stack.ss_size = STACK;
        lanes[k].context.uc_link = &home;
        makecontext(&lanes[k].context, run_lane, 0);
    }
    for (;;) {
        int n_over = 0;
        for (lane = 0; lane < WARP; ++lane) {
            if (!lanes[lane].over) {
                threadIdx.x = first + lane;
                swapcontext(&home, &lanes[lane].context);
                if (standin.status) return false;
            }
            n_over += lanes[lane].over;
        }
        if (n_over == WARP) return true;
        if (n_over) {
            standin.status = RACE;  // a warp in which some lanes shuffle and others have left
            return false;
        }
        for (int k = 0; k < WARP; ++k) lanes[k].taken = lanes[k ^ lanes[k].step].given, lanes[k].waits = false;
    }
}

// Every kernel argument is an integer or an address, so it travels in a 64-bit slot of the calling convention, and slots
// beyond a kernel's own arguments are ignored (true of x86-64 System V and of AArch64).
typedef void (*Kernel)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t);
static Kernel kernel;
static const uint64_t* arguments;
static void call_kernel() {
    const uint64_t* a = arguments;
    kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}

static std::map<void*, void*> stacks_of;
static void use_stacks_of(void* fiber) {
    void*& memory = stacks_of[fiber];
    if (!memory) memory = malloc(STACKS);
    stacks = (char (*)[STACK])memory;
#ifdef STANDIN_ADDRESS
    __asan_unpoison_memory_region(stacks, STACKS);  // lanes that were stopped have left red zones there
#endif
}

// flush: subnormal floats count as zero, as after -ftz=true. fiber: of the stream, if the thread sanitizer listens.
extern "C" Standin* standin_launch(Kernel which, unsigned int grid, unsigned int block, const uint64_t* a,
                                   const Range* known, int n_known, int flush, int races, void* fiber) {
    use_stacks_of(fiber);
    memset(&standin, 0, sizeof standin);
    standin.looks_for_races = races;
    touched.clear();
    kernel = which, arguments = a, the_kernel = call_kernel;
    ranges = known, n_ranges = n_known, last_range = 0;
    gridDim.x = grid, blockDim.x = block;
#ifdef __x86_64__
    const unsigned int before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(flush ? before | 0x8040u : before & ~0x8040u);
#endif
#ifdef STANDIN_THREAD
    void* home_fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber, 1);
#endif
    bool fine = true;
    for (blockIdx.x = 0; fine && blockIdx.x < grid; ++blockIdx.x)
        for (unsigned int first = 0; fine && first < block; first += WARP) fine = run_warp(first);
#ifdef STANDIN_THREAD
    __tsan_switch_to_fiber(home_fiber, 1);
#endif
#ifdef __x86_64__
    __builtin_ia32_ldmxcsr(before);
#endif
    return &standin;
}
