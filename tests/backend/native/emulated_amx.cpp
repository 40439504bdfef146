// The AMX level only, with emulated tiles. backend/native/library.py can load this instead of the kernels.
#include "emulated_tiles.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../../backend/native/kernels/operations.h"
#include "../../../backend/native/kernels/team.h"
#include "../../../backend/native/kernels/run_all.h"

#include "../../../backend/native/kernels/avx512.h"

#include "../../../backend/native/kernels/amx.h"

#include "tile_products.cpp"

// Operations share as much memory as they request. Before the first one, all of it is filled with NaN, and nothing may be
// written after its end.
namespace {
const Level AMX = {"amx", amx::run, amx::shared_bytes, amx::begin, amx::end};
constexpr size_t BEHIND_BYTES = 1 << 14;
thread_local Scratch guarded;
}  // namespace

extern "C" {
const char* complaint() { return emulated::complaint.exchange(nullptr); }
int64_t warmpath_best_level() { return 0; }
const char* warmpath_level_name(int64_t) { return AMX.name; }
void warmpath_run(const Op* ops, int64_t count, int64_t) {
  const size_t bytes = most_shared_bytes(AMX, ops, count);
  uint8_t* const shared = static_cast<uint8_t*>(guarded.get(bytes + BEHIND_BYTES));
  std::memset(shared, 0xff, bytes + BEHIND_BYTES);
  run_all(AMX, ops, count, shared);
  for (size_t i = bytes; i < bytes + BEHIND_BYTES; i++)
    emulated::expect(shared[i] == 0xff, "an operation writes nothing after the memory that it has requested");
}
}
