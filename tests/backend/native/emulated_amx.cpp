// The AMX level with emulated tiles, compiled with the parts of backend/native/kernels/parts. Every file is compiled with
// `-include emulated_tiles.h`. backend/native/library.py can load this instead of the kernels.
#include "../../../backend/native/kernels/run.h"
#include "../../../backend/native/kernels/run_all.h"

#include "tile_products.cpp"

// Operations share as much memory as they request. Before the first one, all of it is filled with NaN, and nothing may be
// written after its end.
namespace {
const Level AMX = {amx::run, amx::shared_bytes, amx::begin, amx::end};
constexpr size_t BEHIND_BYTES = 1 << 14;
thread_local Scratch guarded;
}  // namespace

extern "C" {
const char* complaint() { return emulated::complaint.exchange(nullptr); }
void warmpath_run(const Op* ops, int64_t count) {
  const size_t bytes = most_shared_bytes(AMX, ops, count);
  uint8_t* const shared = static_cast<uint8_t*>(guarded.get(bytes + BEHIND_BYTES));
  std::memset(shared, 0xff, bytes + BEHIND_BYTES);
  run_all(AMX, ops, count, shared);
  for (size_t i = bytes; i < bytes + BEHIND_BYTES; i++)
    emulated::expect(shared[i] == 0xff, "an operation writes nothing after the memory that it has requested");
}
}
