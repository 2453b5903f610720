// PyTorch's CPU allocator, with a pool for large tensors in front of the one that was there: horovod_aps._torch, called
// through ctypes by horovod_aps/activations/memory.py. Built where torch is at hand; needs that very version of it.
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "aps_pool.h"

namespace {

enum : size_t { POOL_LEAST = 1 << 18 };  // bytes; what is smaller is left to malloc

aps::Pool* g_pool = nullptr;  // never freed: tensors may outlive everything
c10::Allocator* g_before = nullptr;
c10::DeleterFnPtr g_delete_before = nullptr;
std::atomic<int> g_is_on{0};
thread_local int t_side = aps::POOL_TENSORS;

void delete_any(void* p) {
    if (!g_pool->has(p)) return g_delete_before(p);
    c10::profiledCPUMemoryReporter().Delete(p);
    g_pool->release(p);
}

struct PoolAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        void* p = nullptr;
        if (n >= POOL_LEAST && g_is_on.load(std::memory_order_relaxed)) p = g_pool->take((int64_t)n, t_side);
        if (p) {
            c10::profiledCPUMemoryReporter().New(p, n);
        } else {
            p = g_before->allocate(n).release_context();
        }
        return {p, p, &delete_any, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &delete_any; }
    void copy_data(void* dest, const void* src, std::size_t count) const override {
        default_copy_data(dest, src, count);
    }
};

void before_fork() { g_pool->mutex().lock(); }
void after_fork() { g_pool->mutex().unlock(); }

}  // namespace

extern "C" {

const char* aps_torch_sources() { return APS_SOURCES; }
const char* aps_torch_version() { return APS_TORCH; }

// Put the pool in front of the allocator; 0 if that can't be. Call it once; it is off until aps_torch_use.
int aps_torch_install() {
    c10::Allocator* before = c10::GetCPUAllocator();
    if (!before || !before->raw_deleter()) return 0;
    aps::Pool* pool = new aps::Pool;
    if (!pool->open()) return 0;
    g_pool = pool;
    g_before = before;
    g_delete_before = before->raw_deleter();
    static PoolAllocator* const allocator = new PoolAllocator;  // never freed, like the pool
    c10::SetCPUAllocator(allocator);
    if (c10::GetCPUAllocator() != allocator) return 0;  // another one has a higher priority
    return !pthread_atfork(before_fork, after_fork, after_fork);
}
// Whether large tensors come from the pool from now on; those that did stay there.
void aps_torch_use(int is_on) { g_is_on.store(is_on, std::memory_order_relaxed); }
// Where the calling thread's next large tensors lie: 0, or 1 for what stays until backward.
void aps_torch_side(int side) { t_side = side ? aps::POOL_STREAMS : aps::POOL_TENSORS; }
void aps_torch_give_back() { g_pool->give_back(); }
// Bytes in use, and bytes that are free and still resident.
void aps_torch_count(int64_t* live, int64_t* idle) { g_pool->count(live, idle); }

}  // extern "C"
