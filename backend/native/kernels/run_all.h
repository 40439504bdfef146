// Runs operations one after the other at one level of instruction sets.

#pragma once

#include "operations.h"
#include "team.h"

namespace warmpath {

struct Level {  // begin, end: called on each thread around its work
  void (*run)(const Op&, void* shared);
  size_t (*shared_bytes)(const Op&);
  void (*begin)();
  void (*end)();
};

// The largest shared memory that any of the operations needs. Reads the lengths of sequences before the first one runs.
inline size_t most_shared_bytes(const Level& level, const Op* ops, int64_t count) {
  size_t bytes = 0;
  for (int64_t i = 0; i < count; i++) bytes = max_of(bytes, level.shared_bytes(ops[i]));
  return bytes;
}

inline void run_all(const Level& level, const Op* ops, int64_t count, void* shared) {
  call_settings = {1, level.begin, level.end};
  level.begin();
  for (int64_t i = 0; i < count; i++) {
    call_settings.num_threads = ops[i].num_threads;
    level.run(ops[i], shared);
  }
  level.end();
}

}  // namespace warmpath
