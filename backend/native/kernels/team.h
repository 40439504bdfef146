// Memory and threads.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "operations.h"

namespace {

struct Scratch {  // memory of one thread: it grows to what was asked for, and stays
  void* data = nullptr;
  size_t size = 0;
  void* get(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, size);
      if (!data) abort();  // rather than go on with wrong numbers
    }
    return data;
  }
  ~Scratch() { free(data); }
};
thread_local Scratch own_scratch;   // for what a thread does alone
thread_local Scratch team_scratch;  // of the thread that calls: what its team shares

// ---- threads --------------------------------------------------------------------------------------------------------
//
// One team for the process. Each member has a part of the work, which it takes piece by piece; who has done his own
// goes on with the others'. So a helper that the system runs late, since its core is shared with others, finds the work
// done and keeps nobody waiting, as it would at the barrier of an OpenMP team; and as long as nobody is late, rows that
// one operation leaves in a core's cache are that core's in the next one, too.

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int own_core() {  // -1 where it cannot be told
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// From this core to whichever other one the thread may use; false if there is none. The system goes on to place it as
// it likes.
inline bool leave(int core) {
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
  // Calls work(context, i) for each i below count, on at most num_threads threads, between begin and end on each.
  void run(int64_t num_threads, int64_t count, void (*work)(void*, int64_t), void* context, void (*begin)(),
           void (*end)()) {
    std::unique_lock<std::mutex> turn(turns_, std::defer_lock);
    if (num_threads <= 1 || count <= 1 || !turn.try_lock()) {  // another caller has the helpers
      for (int64_t i = 0; i < count; i++) work(context, i);
      return;
    }
    if (num_threads > num_parts_) {
      delete[] parts_;
      parts_ = new Part[num_threads];
      num_parts_ = num_threads;
    }
    while (num_helpers_ < num_threads - 1) std::thread(&Team::help, this, num_helpers_++).detach();
    work_ = work, context_ = context, begin_ = begin, end_ = end, wanted_ = num_threads - 1;
    core_.store(own_core(), std::memory_order_relaxed);
    for (int64_t i = 0; i < num_threads; i++) {
      parts_[i].next.store(count * i / num_threads, std::memory_order_relaxed);
      parts_[i].end = count * (i + 1) / num_threads;
    }
    open_.store(open_.load() + 1);  // odd: there is work
    if (sleepers_.load()) {
      sleep_.lock();  // nobody is between its last look and its sleep
      sleep_.unlock();
      wake_.notify_all();
    }
    take(0);
    open_.store(open_.load() + 1);  // even: there is none, and nobody may begin
    for (int spins = 0; inside_.load(); spins++) spins < SPINS ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int SPINS = 4000;  // of a helper without work, before it sleeps: some 100 microseconds

  struct alignas(64) Part {  // of the work: [next, end) is still to be taken
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void take(int64_t own) {
    for (int64_t n = 0, count = wanted_ + 1; n < count; n++) {
      Part& part = parts_[(own + n) % count];
      while (part.next.load(std::memory_order_relaxed) < part.end) {
        const int64_t i = part.next.fetch_add(1, std::memory_order_relaxed);
        if (i < part.end) work_(context_, i);
      }
    }
  }

  void help(int64_t index) {
    uint64_t done = 0;  // the last work that this helper has taken part in, or let go by
    int spins = 0;
    while (true) {
      uint64_t now = open_.load();
      for (; now == done || now % 2 == 0; now = open_.load()) {
        if (++spins < SPINS) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return open_.load() % 2 && open_.load() != done; });
        sleepers_.fetch_sub(1);
        spins = 0;
      }
      done = now;
      // The system likes to run whom it wakes where the waker is, even beside an idle core: there, the two would only
      // take turns. If the other core is busy, then the work may well be done before the helper's turn, and nobody
      // waits. Where there is no other, the caller does it all.
      const int core = own_core();
      const bool is_there = core >= 0 && core == core_.load(std::memory_order_relaxed);
      spins = is_there && !leave(core) ? SPINS : 0;
      if (spins) continue;
      inside_.fetch_add(1);
      // Only while it is still the same work: from here on, nobody changes it until this helper has left.
      if (open_.load() == now && index < wanted_) {
        begin_();
        take(index + 1);
        end_();
      }
      inside_.fetch_sub(1);
    }
  }

  std::mutex turns_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> open_{0};
  std::atomic<int64_t> inside_{0}, sleepers_{0};
  std::atomic<int> core_{-1};  // the caller's
  Part* parts_ = nullptr;      // of the caller, and of each helper
  int64_t num_parts_ = 0, num_helpers_ = 0, wanted_ = 0;
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  void (*begin_)() = nullptr;
  void (*end_)() = nullptr;
};
Team& team() {
  static Team* const made = new Team;  // never deleted: helpers sleep in it until the process ends
  return *made;
}

struct Calling {  // how the caller of `warmpath_run` wants its work to be done
  int64_t num_threads = 1;
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};
thread_local Calling calling;

constexpr int64_t SHARES_PER_THREAD = 4;
constexpr int64_t FEW = 1 << 14;  // numbers to pass over, below which waking the others costs more than they take over

// f(i) for each i below count, neighbours together, in shares of at most `grain` of them; grain 0: in as many shares as
// are worth their waking. Shares are as even as can be, and the larger ones begin, so that nobody ends with one.
template <class F>
void share(int64_t count, int64_t grain, F f) {
  const int64_t shares = grain ? ceil_div(count, grain) : least(count, calling.num_threads * SHARES_PER_THREAD);
  struct Context {
    F& f;
    int64_t each, larger;
  } context{f, count / most(1, shares), count % most(1, shares)};
  const auto work = [](void* pointer, int64_t i) {
    const Context& c = *static_cast<Context*>(pointer);
    const int64_t from = i * c.each + least(i, c.larger), until = from + c.each + (i < c.larger);
    for (int64_t j = from; j < until; j++) c.f(j);
  };
  team().run(calling.num_threads, shares, work, &context, calling.begin, calling.end);
}

}  // namespace
