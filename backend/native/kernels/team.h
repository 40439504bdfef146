// Scratch memory, the thread team, and parallel_for.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include "operations.h"

// Not in an unnamed namespace: the files of a level share one team.
namespace warmpath {

struct Scratch {  // a buffer that grows to the largest size requested and is never shrunk
  void* data = nullptr;
  size_t size = 0;
  void* get(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, size);
      if (!data) abort();  // continuing would compute wrong results
    }
    return data;
  }
  ~Scratch() { free(data); }
};
inline thread_local Scratch thread_scratch;  // for work that a thread does alone
inline thread_local Scratch team_scratch;    // of the calling thread: shared by its team

// ---- threads --------------------------------------------------------------------------------------------------------
//
// One team for each level that is loaded. Each member owns a part of the work and takes it item by item; a member that
// is done continues with the parts of others (work stealing). If the system runs a helper late, because its core is
// shared, the helper finds the work done and delays no other thread, unlike at the barrier of an OpenMP team. If no
// helper is late, rows that one operation leaves in a core's cache are processed by the same core in the next
// operation.

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int current_core() {  // -1 if it is not known
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread off this core, to any other core that it may use. False if there is none. Its affinity is
// restored afterwards, so the scheduler remains free to place it.
inline bool move_off(int core) {
#if defined(__linux__)
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);
#endif
  return true;
}

class Team {
 public:
  // Calls work(context, i) for each i below count on at most num_threads threads. Each thread calls begin before its
  // work and end after it.
  void run(int64_t num_threads, int64_t count, void (*work)(void*, int64_t), void* context, void (*begin)(),
           void (*end)()) {
    std::unique_lock<std::mutex> use(in_use_, std::defer_lock);
    if (num_threads <= 1 || count <= 1 || !use.try_lock()) {  // nothing to share, or another caller uses the team
      for (int64_t i = 0; i < count; i++) work(context, i);
      return;
    }
    if (num_threads > num_parts_) {
      delete[] parts_;
      parts_ = new Part[num_threads];
      num_parts_ = num_threads;
    }
    while (num_helpers_ < num_threads - 1) std::thread(&Team::helper_loop, this, num_helpers_++).detach();
    work_ = work, context_ = context, begin_ = begin, end_ = end, num_wanted_ = num_threads - 1;
    core_.store(current_core(), std::memory_order_relaxed);
    for (int64_t i = 0; i < num_threads; i++) {
      parts_[i].next.store(count * i / num_threads, std::memory_order_relaxed);
      parts_[i].end = count * (i + 1) / num_threads;
    }
    epoch_.store(epoch_.load() + 1);  // odd: helpers may start
    if (num_sleeping_.load()) {
      sleep_mutex_.lock();  // waits for helpers that are between their last check and their sleep
      sleep_mutex_.unlock();
      wake_.notify_all();
    }
    run_tasks(0);
    epoch_.store(epoch_.load() + 1);  // even: no helper may start any more
    for (int spins = 0; num_active_.load(); spins++) spins < SPINS ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int SPINS = 4000;  // of an idle helper before it sleeps: about 100 microseconds

  struct alignas(64) Part {  // a member's part of the work: [next, end) is not taken yet
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void run_tasks(int64_t own) {
    for (int64_t n = 0, count = num_wanted_ + 1; n < count; n++) {
      Part& part = parts_[(own + n) % count];
      while (part.next.load(std::memory_order_relaxed) < part.end) {
        const int64_t i = part.next.fetch_add(1, std::memory_order_relaxed);
        if (i < part.end) work_(context_, i);
      }
    }
  }

  void helper_loop(int64_t index) {
    uint64_t done = 0;  // the epoch of the last work that this helper has joined or skipped
    int spins = 0;
    while (true) {
      uint64_t now = epoch_.load();
      for (; now == done || now % 2 == 0; now = epoch_.load()) {
        if (++spins < SPINS) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load() % 2 && epoch_.load() != done; });
        num_sleeping_.fetch_sub(1);
        spins = 0;
      }
      done = now;
      // Linux tends to run a woken thread on the waker's core, even if another core is idle. There, the helper would
      // only take turns with the caller, so it moves to another core. If that is busy, the work may be done before the
      // helper runs, which delays no other thread. If there is no other core, the caller does all the work.
      const int core = current_core();
      const bool is_on_callers_core = core >= 0 && core == core_.load(std::memory_order_relaxed);
      spins = is_on_callers_core && !move_off(core) ? SPINS : 0;
      if (spins) continue;
      num_active_.fetch_add(1);
      // Only if it is still the same work. From here on, the caller waits for this helper before it changes anything.
      if (epoch_.load() == now && index < num_wanted_) {
        begin_();
        run_tasks(index + 1);
        end_();
      }
      num_active_.fetch_sub(1);
    }
  }

  std::mutex in_use_, sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int64_t> num_active_{0}, num_sleeping_{0};
  std::atomic<int> core_{-1};  // that the caller runs on
  Part* parts_ = nullptr;      // one for the caller and one for each helper
  int64_t num_parts_ = 0, num_helpers_ = 0, num_wanted_ = 0;
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  void (*begin_)() = nullptr;
  void (*end_)() = nullptr;
};
inline Team& team() {
  static Team* const made = new Team;  // never deleted, because helpers wait in it until the process ends
  return *made;
}

struct CallSettings {  // of the operation that the calling thread runs
  int64_t num_threads = 1;
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};
inline thread_local CallSettings call_settings;

constexpr int64_t TASKS_PER_THREAD = 4;
constexpr int64_t MIN_SHARED_ITEMS = 1 << 14;  // numbers: with fewer, waking helpers costs more than it saves

// Calls f(i) for each i below count on the team. Consecutive items form tasks of at most `grain` items; grain 0: a few
// tasks per thread. Tasks are as even as possible, and the larger ones come first, so that none is left for the end.
template <class F>
void parallel_for(int64_t count, int64_t grain, F f) {
  const int64_t tasks = grain ? ceil_div(count, grain) : min_of(count, call_settings.num_threads * TASKS_PER_THREAD);
  struct Context {
    F& f;
    int64_t each, larger;
  } context{f, count / max_of(1, tasks), count % max_of(1, tasks)};
  const auto work = [](void* pointer, int64_t i) {
    const Context& c = *static_cast<Context*>(pointer);
    const int64_t from = i * c.each + min_of(i, c.larger), until = from + c.each + (i < c.larger);
    for (int64_t j = from; j < until; j++) c.f(j);
  };
  team().run(call_settings.num_threads, tasks, work, &context, call_settings.begin, call_settings.end);
}

}  // namespace warmpath
