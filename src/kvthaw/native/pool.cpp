#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvthaw {

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A sleeping thread takes tens of microseconds to wake, as long as a layer's search, and the next layer's follows soon: an idle
// worker first spins, then offers its core to others, and only then sleeps.
constexpr auto kSpin = std::chrono::microseconds(30), kYield = std::chrono::microseconds(2000);

// The lock is held for tens of nanoseconds, and every worker wants it when work comes: waiting in the kernel would take them longer
// than the work.
std::unique_lock<std::mutex> lock_soon(std::mutex& mutex) {
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    for (int spins = 0; !lock.owns_lock(); ++spins) {
        Pool::wait_briefly(spins);
        (void)lock.try_lock();
    }
    return lock;
}

}  // namespace

Pool& Pool::instance() {
    static std::mutex mutex;
    static Pool* pool = nullptr;  // never deleted: workers may outlive static destructors
    static pid_t owner = 0;
    std::lock_guard lock(mutex);
    if (pool == nullptr || owner != getpid()) {
        pool = new Pool;
        owner = getpid();
    }
    return *pool;
}

int Pool::cores() {
#if defined(__linux__)
    cpu_set_t allowed;  // a process that was given fewer cores than the machine has must not start more threads
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

void Pool::wait_briefly(int spins) { spins < 2000 ? pause_briefly() : (void)sched_yield(); }

void Pool::grow(int workers) {  // under the lock
    for (; workers_ < workers; ++workers_) std::thread(&Pool::serve, this).detach();
}

void Pool::run(size_t count, int threads, const std::function<void(size_t)>& work) {
    if (threads <= 0) threads = cores();
    const size_t helpers = std::min<size_t>(threads, count) - (count > 0);
    if (helpers == 0) {
        for (size_t i = 0; i < count; ++i) work(i);
        return;
    }
    auto job = std::make_shared<Job>();
    job->work = &work;
    job->count = count;
    job->seats = static_cast<int>(helpers);
    bool open;
    {
        const auto lock = lock_soon(mutex_);
        grow(threads - 1);
        for (; job->seats > 0 && !idle_.empty(); --job->seats) {
            Desk& desk = *idle_.back();
            idle_.pop_back();
            desk.job = job;
            desk.called.store(true, std::memory_order_release);
        }
        open = job->seats > 0;
        if (open) jobs_.push_back(job);
        for (int i = std::min(job->seats, sleeping_); i > 0; --i) wake_.notify_one();
    }
    drain(*job);
    if (open) {
        const auto lock = lock_soon(mutex_);
        const auto at = std::find(jobs_.begin(), jobs_.end(), job);
        if (at != jobs_.end()) jobs_.erase(at);
    }
    for (int spins = 0; job->done.load(std::memory_order_acquire) != count; ++spins) wait_briefly(spins);
    if (job->failed.load(std::memory_order_acquire)) std::rethrow_exception(job->error);
}

void Pool::drain(Job& job) {
    for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) {
        try {
            (*job.work)(i);
        } catch (...) {
            if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
        job.done.fetch_add(1, std::memory_order_acq_rel);
    }
}

std::shared_ptr<Pool::Job> Pool::join_one() {  // under the lock
    while (!jobs_.empty()) {
        std::shared_ptr<Job> job = jobs_.back();
        const bool left = job->next.load(std::memory_order_relaxed) < job->count;
        if (left) --job->seats;
        if (!left || job->seats == 0) jobs_.pop_back();
        if (left) return job;
    }
    return nullptr;
}

std::shared_ptr<Pool::Job> Pool::take() {
    using Clock = std::chrono::steady_clock;
    for (Desk desk;;) {
        auto lock = lock_soon(mutex_);
        if (auto job = join_one()) return job;
        idle_.push_back(&desk);
        lock.unlock();
        const auto start = Clock::now();
        for (auto idle = Clock::duration::zero(); idle < kYield; idle = Clock::now() - start) {
            if (desk.called.load(std::memory_order_acquire)) return std::move(desk.job);
            for (int i = 0; i < 16; ++i) pause_briefly();  // the core may have another thread that works
            if (idle >= kSpin) sched_yield();
        }
        lock = lock_soon(mutex_);
        if (desk.called.load(std::memory_order_acquire)) return std::move(desk.job);
        idle_.erase(std::find(idle_.begin(), idle_.end(), &desk));
        ++sleeping_;
        wake_.wait(lock, [&] { return !jobs_.empty(); });
        --sleeping_;
    }
}

void Pool::serve() {
    for (;;) drain(*take());
}

}  // namespace kvthaw
