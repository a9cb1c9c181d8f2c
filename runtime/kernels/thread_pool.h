// A pool of threads that share the chunks of one job after another.
//
// Which thread computes which chunk is not fixed, what a chunk computes is; so results do not depend on the number of
// threads as long as a job's chunks do not. Waiting threads spin briefly, because the next job of a token usually comes
// within microseconds, and then sleep, because whoever spins for long takes a core from somebody who could work.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pi {

class ThreadPool {
  public:
    explicit ThreadPool(int threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    }

    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_.store(true, std::memory_order_release);
            jobs_.fetch_add(1, std::memory_order_seq_cst);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }

    // Calls body(chunk) for every chunk in 0..chunks-1, lowest first, on the pool's threads and this one; returns when all are done.
    // One caller at a time.
    template <typename Body>
    void run(int64_t chunks, const Body& body) {
        if (workers_.empty() || chunks <= 1) {
            for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
            return;
        }
        call_ = [](const void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); };
        context_ = &body;
        chunks_ = chunks;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t job = jobs_.load(std::memory_order_relaxed) + 1;
        tickets_.store(job << 32 | uint64_t(chunks), std::memory_order_release);
        jobs_.store(job, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        take_chunks();
        await([&] { return done_.load(std::memory_order_acquire) == chunks; });
    }

  private:
    static constexpr int SPINS = 2000;  // tens of microseconds

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    template <typename Condition>
    static void await(const Condition& condition) {
        for (int spin = 0; !condition(); ++spin) {
            if (spin < SPINS)
                pause();
            else
                std::this_thread::yield();
        }
    }

    // A ticket is the job's number and how many of its chunks nobody has taken. Whoever takes one by compare and exchange
    // knows that the job is still running, since that chunk is missing, and so that call_, context_ and chunks_ are this job's; a
    // thread that comes late finds no chunk left or those of the next job, and never a mixture.
    void take_chunks() {
        uint64_t ticket = tickets_.load(std::memory_order_acquire);
        while (uint32_t(ticket)) {
            if (!tickets_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            call_(context_, chunks_ - int64_t(uint32_t(ticket)));
            done_.fetch_add(1, std::memory_order_release);
            ticket = tickets_.load(std::memory_order_acquire);
        }
    }

    void work() {
        uint64_t seen = 0;
        while (!stop_.load(std::memory_order_acquire)) {
            for (int spin = 0; spin < SPINS && jobs_.load(std::memory_order_acquire) == seen; ++spin) pause();
            if (jobs_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return jobs_.load(std::memory_order_seq_cst) != seen; });
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = jobs_.load(std::memory_order_acquire);
            take_chunks();
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> jobs_{0}, tickets_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<int64_t> done_{0};
    std::atomic<bool> stop_{false};
    void (*call_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    int64_t chunks_ = 0;
};

}  // namespace pi
