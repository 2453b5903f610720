// What the stand-in tells g++'s sanitizers, whose library is loaded before Python (LD_PRELOAD).
// Thread: every stream is a fiber of its own, and only events, and the host, order what streams do.
// Address: device memory that is not allocated, or was given back, is poisoned, to the byte.
#include <stddef.h>
#include <string.h>

extern "C" {
#ifdef STANDIN_THREAD
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* where);
void __tsan_release(void* where);

enum { NO_SYNC = 1 };
static thread_local void* home;

void* standin_fiber() { return __tsan_create_fiber(0); }
void standin_enter(void* fiber) {
    home = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber, NO_SYNC);
}
void standin_leave() { __tsan_switch_to_fiber(home, NO_SYNC); }
// On a stream, or on the host if there is none.
void standin_acquire(void* fiber, void* where) {
    if (fiber) standin_enter(fiber);
    __tsan_acquire(where);
    if (fiber) standin_leave();
}
void standin_release(void* fiber, void* where) {
    if (fiber) standin_enter(fiber);
    __tsan_release(where);
    if (fiber) standin_leave();
}
void standin_copy(void* fiber, void* target, const void* source, size_t n_bytes) {
    standin_enter(fiber);
    memmove(target, source, n_bytes);
    standin_leave();
}
void standin_set(void* fiber, void* target, int value, size_t n_bytes) {
    standin_enter(fiber);
    memset(target, value, n_bytes);
    standin_leave();
}
#endif
#ifdef STANDIN_ADDRESS
void __asan_poison_memory_region(const volatile void* where, size_t n_bytes);
void __asan_unpoison_memory_region(const volatile void* where, size_t n_bytes);
void standin_poison(void* where, size_t n_bytes) { __asan_poison_memory_region(where, n_bytes); }
void standin_unpoison(void* where, size_t n_bytes) { __asan_unpoison_memory_region(where, n_bytes); }
#endif
}
