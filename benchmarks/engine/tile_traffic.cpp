// Counts the cache traffic of AMX products on a CPU without AMX: its instructions report their addresses to a model of
// an L1 and an L2 cache with LRU eviction. One thread. Packing is not counted.
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <unordered_map>
#include <utility>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace counting {

constexpr uint64_t LINE = 64;

class Cache {
 public:
  int64_t fills = 0, written_back = 0;
  uint64_t left = 0;  // the modified line that the last fill evicted; 0 if none
  explicit Cache(size_t bytes) : size_(bytes / LINE) {}
  bool touch(uint64_t line, bool changes) {  // returns whether the line was cached
    left = 0;
    const auto found = places_.find(line);
    if (found != places_.end()) {
      found->second->second |= changes;
      lines_.splice(lines_.begin(), lines_, found->second);
      return true;
    }
    fills++;
    if (lines_.size() == size_) {
      if (lines_.back().second) left = lines_.back().first, written_back++;
      places_.erase(lines_.back().first);
      lines_.pop_back();
    }
    lines_.emplace_front(line, changes);
    places_[line] = lines_.begin();
    return false;
  }

 private:
  typedef std::list<std::pair<uint64_t, bool>> Lines;
  size_t size_;
  Lines lines_;
  std::unordered_map<uint64_t, Lines::iterator> places_;
};

struct Caches {
  Cache half{24 << 10}, first{48 << 10}, second{2 << 20};  // half: of the L1 cache, as two hyperthreads share it
  int64_t products = 0, waited_for = 0, fetched = 0;
  void tile(const void* base, int64_t stride, bool changes) {
    for (int64_t i = 0; i < 16; i++) {
      const uint64_t line = reinterpret_cast<uint64_t>(static_cast<const char*>(base) + i * stride) / LINE;
      half.touch(line, changes);
      if (first.touch(line, changes)) continue;
      if (first.left) second.touch(first.left, true);
      waited_for += !second.touch(line, false);
    }
  }
  void fetch(const void* from) { fetched += !second.touch(reinterpret_cast<uint64_t>(from) / LINE, false); }
};
Caches* caches;

}  // namespace counting

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _mm_prefetch
#define _tile_loadconfig(config)
#define _tile_release()
#define _tile_zero(tile)
#define _tile_loadd(tile_, base, stride) counting::caches->tile(base, stride, false)
#define _tile_stored(tile_, base, stride) counting::caches->tile(base, stride, true)
#define _tile_dpbf16ps(sum, a, b) counting::caches->products++
#define _tile_dpbssd(sum, a, b) counting::caches->products++
#define _mm_prefetch(from, hint) counting::caches->fetch(from)

#include "../../backend/native/kernels/parts/amx_products.cpp"
#include "../../backend/native/kernels/run_all.h"

using namespace warmpath;

void count(int64_t rows, int64_t ins, int64_t outs, Format format) {
  const auto zeros = [](size_t bytes) { return std::memset(std::aligned_alloc(4096, bytes), 0, bytes); };
  Op op{LINEAR, 1, {}};
  op.linear = {zeros(rows * ins * 2),
               zeros(ins * outs * 2),
               zeros(outs * 4),
               nullptr,
               zeros(rows * outs * 2),
               rows,
               outs,
               ins,
               ins,
               BFLOAT16,
               format,
               1,
               NONE};
  const Level level = {[](const Op& op, void* shared) { parts::amx_products(op.linear, shared); },
                       [](const Op& op) { return amx::packed_bytes(op.linear); }, amx::begin, amx::end};
  counting::Caches own;
  counting::caches = &own;
  run_all(level, &op, 1, zeros((level.shared_bytes(op) / 4096 + 1) * 4096));
  const auto mib = [](int64_t lines) { return double(lines) * counting::LINE / (1 << 20); };
  const auto each = [&](int64_t lines) { return double(lines) * counting::LINE / double(own.products); };
  std::printf("%5ld %5ld %5ld  %-8s %7.0f %7.0f %11.1f %8.1f %8.1f\n", long(rows), long(ins), long(outs),
              format == INT8 ? "int8" : "bfloat16", each(own.half.fills), each(own.first.fills), mib(own.waited_for),
              mib(own.fetched), mib(own.second.written_back));
}

int main() {
  std::printf(" rows   ins  outs  weights   filled: bytes of a product, into    beyond 2 MiB, in MiB:\n");
  std::printf("                             24 KiB  48 KiB  waited for  fetched  written\n");
  for (int64_t rows : {16, 512, 1024})
    for (Format format : {PLAIN, INT8}) {
      count(rows, 768, 768, format);
      count(rows, 768, 3072, format);
      count(rows, 3072, 768, format);
      count(rows, 1024, 4096, format);
      count(rows, 4096, 1024, format);
    }
}
