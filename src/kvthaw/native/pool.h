// Threads that stay. Every parallel loop of the extension runs on the one pool of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kvthaw {

class Pool {
public:
    // The pool of this process, made on first use (and again after a fork, which leaves the threads behind).
    static Pool& instance();

    // work(i) for every i in [0, count), on at most `threads` threads with the caller's among them; 0: one for each core. Any
    // thread may call it at any time; calls do not wait for each other. The first exception is thrown on, after all is done.
    void run(size_t count, int threads, const std::function<void(size_t)>& work);

    // One of many looks for what another thread is about to do; spins: how many there were.
    static void wait_briefly(int spins);

    static int cores();

private:
    struct Job {
        const std::function<void(size_t)>* work;
        size_t count;
        std::atomic<size_t> next{0}, done{0};
        int seats;  // threads that may still join; guarded by the pool's mutex
        std::atomic<bool> failed{false};
        std::exception_ptr error;
    };

    // Of an idle worker, which looks here alone: were all to look in one place, they would take turns at it before each could begin.
    struct alignas(64) Desk {
        std::shared_ptr<Job> job;
        std::atomic<bool> called{false};  // the job is there
    };

    void grow(int workers);
    void serve();
    std::shared_ptr<Job> take();
    std::shared_ptr<Job> join_one();
    static void drain(Job& job);

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::shared_ptr<Job>> jobs_;  // with free seats, the newest last: short work overtakes long
    std::vector<Desk*> idle_;                 // of workers that are awake, the latest last
    int sleeping_ = 0, workers_ = 0;
};

}  // namespace kvthaw
