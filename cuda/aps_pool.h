// Memory for large tensors that is used again, page by page, without going through malloc; used by aps_torch.cpp.
//
// Compressing activations frees a tensor soon after it was made, and the next one is of much the same size. malloc's
// holes do not fit it again (glibc 2.36, aligned blocks), and pages that go back to the system are dear to get again
// (2.3 us for 4 kB on a virtual machine, four times the copying of them). So free pages stay as long as the pool as a
// whole takes no more than what was in use at once, plus a little.
#ifndef APS_POOL_H
#define APS_POOL_H

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <map>
#include <mutex>

namespace aps {

enum : int64_t { POOL_GRAIN = 1 << 14 };  // bytes; addresses are multiples
enum : int64_t { POOL_SLACK = 1 << 10 };  // grains, 16 MB: may stay beyond what was in use at once
enum : int64_t { POOL_STEP = 1 << 8 };    // grains, 4 MB: the least that goes back at a time
enum {
    POOL_TENSORS,
    POOL_STREAMS,
    POOL_N_SIDES
};  // what goes soon, and what stays until backward: apart from each other

// One range of addresses: first fit from its start.
class Arena {
public:
    bool reserve(int64_t bytes) {
        const int64_t n = bytes / POOL_GRAIN;
        memory_ = (uint8_t*)map(n * POOL_GRAIN);
        length_ = (uint32_t*)map(n * (int64_t)sizeof(uint32_t));
        is_dirty_ = (uint8_t*)map(n);
        if (!memory_ || !length_ || !is_dirty_) return false;
        n_ = n;
        free_[0] = n;
        return true;
    }
    bool has(const void* p) const { return p >= memory_ && p < memory_ + n_ * POOL_GRAIN; }

    // n grains, of which *n_dirty were resident before; nullptr if there is no such hole.
    void* take(int64_t n, int64_t* n_dirty) {
        for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
            const int64_t first = hole->first, size = hole->second;
            if (size < n) continue;
            free_.erase(hole);
            if (size > n) free_[first + n] = size - n;
            length_[first] = (uint32_t)n;
            *n_dirty = 0;
            for (int64_t i = first; i < first + n; ++i) {
                *n_dirty += is_dirty_[i];
                is_dirty_[i] = 0;
            }
            return memory_ + first * POOL_GRAIN;
        }
        return nullptr;
    }
    // Returns how many grains came free; all of them count as resident.
    int64_t release(void* p) {
        int64_t first = ((uint8_t*)p - memory_) / POOL_GRAIN, n = length_[first];
        const int64_t released = n;
        for (int64_t i = first; i < first + n; ++i) is_dirty_[i] = 1;
        if (first + n > top_) top_ = first + n;
        auto next = free_.lower_bound(first);
        if (next != free_.end() && next->first == first + n) {
            n += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == first) {
                before->second += n;
                return released;
            }
        }
        free_.emplace_hint(next, first, n);
        return released;
    }
    // Give free grains back to the system, the highest first, until `wanted` of them went; returns how many did.
    int64_t give_back(int64_t wanted) {
        int64_t given = 0;
        for (auto hole = free_.rbegin(); hole != free_.rend() && given < wanted; ++hole) {
            const int64_t first = hole->first, end = first + hole->second < top_ ? first + hole->second : top_;
            for (int64_t i = end; i > first && given < wanted;) {
                if (!is_dirty_[i - 1]) {
                    --i;
                    continue;
                }
                const int64_t last = i;
                for (; i > first && is_dirty_[i - 1] && given < wanted; --i, ++given) is_dirty_[i - 1] = 0;
                madvise(memory_ + i * POOL_GRAIN, (size_t)((last - i) * POOL_GRAIN), MADV_DONTNEED);
            }
        }
        return given;
    }

private:
    static void* map(int64_t bytes) {
        void* p =
            mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return p == MAP_FAILED ? nullptr : p;
    }
    uint8_t* memory_ = nullptr;
    uint32_t* length_ = nullptr;   // of the block that begins at a grain
    uint8_t* is_dirty_ = nullptr;  // grains that are free and resident
    int64_t n_ = 0, top_ = 0;      // no grain from top_ on is dirty
    std::map<int64_t, int64_t> free_;
};

class Pool {
public:
    // Reserve addresses, as many as the machine has memory, for either side; false if the system refuses.
    bool open() {
        const int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
        for (Arena& side : sides_) {
            if (!side.reserve(bytes)) return false;
        }
        return true;
    }
    bool has(const void* p) const { return sides_[0].has(p) || sides_[1].has(p); }
    void* take(int64_t bytes, int side) {
        const int64_t n = (bytes + POOL_GRAIN - 1) / POOL_GRAIN;
        std::lock_guard<std::mutex> guard(mutex_);
        int64_t n_dirty;
        void* p = sides_[side].take(n, &n_dirty);
        if (!p) return nullptr;
        n_live_ += n;
        n_dirty_ -= n_dirty;
        if (n_live_ > most_) most_ = n_live_;
        limit(side);
        return p;
    }
    void release(void* p) {
        std::lock_guard<std::mutex> guard(mutex_);
        const int side = sides_[0].has(p) ? 0 : 1;
        const int64_t n = sides_[side].release(p);
        n_live_ -= n;
        n_dirty_ += n;
        limit(side);
    }
    // Nothing that is free stays resident, and the most that was in use at once is counted anew.
    void give_back() {
        std::lock_guard<std::mutex> guard(mutex_);
        for (Arena& side : sides_) n_dirty_ -= side.give_back(n_dirty_);
        most_ = n_live_;
    }
    void count(int64_t* live, int64_t* idle) {
        std::lock_guard<std::mutex> guard(mutex_);
        *live = n_live_ * POOL_GRAIN;
        *idle = n_dirty_ * POOL_GRAIN;
    }
    std::mutex& mutex() { return mutex_; }

private:
    // Keep the pool's pages within the most that was in use at once. The other side's go first: in forward streams
    // grow and tensors are small in the end, in backward it is the other way round.
    void limit(int side) {
        int64_t wanted = n_live_ + n_dirty_ - (most_ + POOL_SLACK);
        if (wanted <= 0) return;
        wanted = wanted < POOL_STEP ? (int64_t)POOL_STEP : wanted;
        for (int k = 1; k <= POOL_N_SIDES && wanted > 0; ++k) {
            const int64_t given = sides_[(side + k) % POOL_N_SIDES].give_back(wanted);
            n_dirty_ -= given;
            wanted -= given;
        }
    }
    Arena sides_[POOL_N_SIDES];
    std::mutex mutex_;
    int64_t n_live_ = 0, n_dirty_ = 0, most_ = 0;  // in grains
};

}  // namespace aps

#endif
