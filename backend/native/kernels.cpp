// The CPU's kernels: one translation unit with its parts in kernels/, and the C interface at the end of this file.
// backend/native/library.py compiles it on first use.
//
// The kernels are written once, over vectors of floats, and compiled for several levels of instruction sets:
// kernels/level.h is included once per level, each time with another vector width and other target attributes.
// `warmpath_run` gets the level as an argument. On ARM, the base level is NEON. Code for instructions that only some
// CPUs have is separate: dot products of bfloat16 pairs and int8 quadruples with AVX-512
// (kernels/level/panels_of_pairs.h), and the matrix tiles of AMX (kernels/amx.h).
//
// An operation distributes its work with `parallel_for` (kernels/team.h), which returns when all of it is done. Every
// element of a result is summed by one thread, in an order that depends on its row only. So float32 results do not
// depend on the other rows of the batch, and no result depends on the number of threads, bit for bit.

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

void no_op() {}
const Level LEVELS[] = {
    {"base", base::run, base::shared_bytes, no_op, no_op},
#if defined(__x86_64__)
    {"avx2", avx2::run, avx2::shared_bytes, no_op, no_op},
    {"avx512", avx512::run, avx512::shared_bytes, no_op, no_op},
    {"amx", amx::run, amx::shared_bytes, amx::begin, amx::end},
#endif
};

#if defined(__x86_64__)
// Whether the CPU has AMX and this process may use it: Linux requires that a process asks for the tiles' state.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, products = (d >> 22 & 1) && (d >> 25 & 1);  // products of bfloat16 and of int8
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

// The highest level that this CPU supports. Levels are numbered from 0 in ascending order.
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
