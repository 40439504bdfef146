// Operations one after the other, at one level of instruction sets.

#pragma once

#include "operations.h"
#include "team.h"

namespace {

struct Level {
  const char* name;
  void (*run)(const Op&, void* shared);
  size_t (*shared_bytes)(const Op&);
  void (*begin)();
  void (*end)();
};

// Of the memory that they share. How long sequences are is read before the first operation.
inline size_t most_shared_bytes(const Level& level, const Op* ops, int64_t count) {
  size_t bytes = 0;
  for (int64_t i = 0; i < count; i++) bytes = most(bytes, level.shared_bytes(ops[i]));
  return bytes;
}

inline void run_all(const Level& level, const Op* ops, int64_t count, void* shared) {
  calling = {1, level.begin, level.end};
  level.begin();
  for (int64_t i = 0; i < count; i++) {
    calling.num_threads = ops[i].num_threads;
    level.run(ops[i], shared);
  }
  level.end();
}

}  // namespace
