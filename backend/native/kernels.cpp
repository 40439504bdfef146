// The engine's arithmetic on a CPU: one file, with its parts in kernels/, behind the C interface at its end.
// backend/native/library.py compiles it on first use.
//
// The kernels are written once, over vectors of floats, and compiled for several levels of instruction sets:
// kernels/level.h is included once per level, each time with another width and other target attributes. Which level
// runs is an argument of `warmpath_run`. On ARM the base level is NEON. What only some CPUs can do stands apart: pairs
// of bfloat16 and fours of int8 with AVX-512 (kernels/level/panels_of_pairs.h), and the matrix tiles of AMX
// (kernels/amx.h).
//
// An operation shares its work out by `share`, which returns when all of it is done. Every element of a result is
// summed by one thread, in an order that depends on nothing outside its row: float32 results are bitwise independent of
// their neighbours, and all results of the number of threads.

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/operations.h"
#include "kernels/team.h"
#include "kernels/run_all.h"

#define LEVEL base
#define WIDTH 16
#include "kernels/level.h"
#undef LEVEL
#undef WIDTH

#if defined(__x86_64__)
#include "kernels/avx2.h"

#include "kernels/avx512.h"

#include "kernels/amx.h"
#endif

namespace {

void nothing() {}
const Level LEVELS[] = {
    {"base", base::run, base::shared_bytes, nothing, nothing},
#if defined(__x86_64__)
    {"avx2", avx2::run, avx2::shared_bytes, nothing, nothing},
    {"avx512", avx512::run, avx512::shared_bytes, nothing, nothing},
    {"amx", amx::run, amx::shared_bytes, amx::begin, amx::end},
#endif
};

#if defined(__x86_64__)
bool has_amx() {  // and may use it: Linux gives the tiles' state to whoever asks
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, products = (d >> 22 & 1) && (d >> 25 & 1);  // of bfloat16 and of int8
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return tiles && products && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

extern "C" {

// The highest level that this CPU has. Levels count from 0, in the order of their widths.
int64_t warmpath_best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni") ||
      !__builtin_cpu_supports("avx512bf16"))
    return 1;
  return has_amx() ? 3 : 2;
#else
  return 0;
#endif
}

const char* warmpath_level_name(int64_t level) {
  return level >= 0 && level < int64_t(sizeof LEVELS / sizeof LEVELS[0]) ? LEVELS[level].name : nullptr;
}

void warmpath_run(const Op* ops, int64_t count, int64_t level_index) {
  const Level& level = LEVELS[level_index];
  run_all(level, ops, count, team_scratch.get(most_shared_bytes(level, ops, count)));
}

}  // extern "C"
