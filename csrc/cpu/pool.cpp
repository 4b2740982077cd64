// The threads of kPool: started when first needed, woken per job, never stopped.
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace fastaccum::cpu {
namespace {

int threads_of_this_process() {
  if (const char* text = std::getenv("FASTACCUM_THREADS")) {
    char* end = nullptr;
    const long wanted = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && wanted >= 1 && wanted <= 1024) return static_cast<int>(wanted);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  const unsigned guess = std::thread::hardware_concurrency();
  return guess == 0 ? 1 : static_cast<int>(guess);
}

class Pool {
 public:
  // Never destroyed: its threads may still sleep in it when the process ends.
  static std::atomic<Pool*>& instance() {
    static std::atomic<Pool*> pool{new Pool};
    // After a fork only the calling thread lives on, and locks may be held by those that do not.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { instance().store(new Pool); });
    static_cast<void>(registered);
    return pool;
  }

  void run(std::int64_t count, void (*body)(std::int64_t, std::int64_t, void*), void* context) {
    if (count < 1) return;
    const std::lock_guard<std::mutex> one_job(jobs_);
    const int helpers = start(count < pool_threads() ? static_cast<int>(count) - 1 : pool_threads() - 1);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      context_ = context;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = helpers;
      running_ = helpers;
      ++job_;
    }
    if (helpers > 0) wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  // Returns how many helpers there are, at most `wanted`: a system that gives no more threads makes the
  // job slower, not wrong.
  int start(int wanted) {
    while (started_ < wanted) {
      try {
        std::thread(&Pool::help, this, started_).detach();
      } catch (const std::system_error&) {
        break;
      }
      ++started_;
    }
    return started_ < wanted ? started_ : wanted;
  }

  void work() {
    for (;;) {
      const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      body_(i, i + 1, context_);
    }
  }

  void help(int number) {
    std::int64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ != seen && number < wanted_; });
      seen = job_;
      lock.unlock();
      work();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex jobs_, mutex_;
  std::condition_variable wake_, done_;
  int started_ = 0;
  // of the current job
  void (*body_)(std::int64_t, std::int64_t, void*) = nullptr;
  void* context_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  int wanted_ = 0;   // helpers that take part
  int running_ = 0;  // of which so many have not finished
  std::int64_t job_ = 0;
};

}  // namespace

int pool_threads() {
  static const int threads = threads_of_this_process();
  return threads;
}

const ParallelFor kPool{[](std::int64_t count, void (*body)(std::int64_t, std::int64_t, void*),
                           void* context) { Pool::instance().load()->run(count, body, context); }};

}  // namespace fastaccum::cpu
