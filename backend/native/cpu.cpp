// Which levels of instruction sets this CPU supports. Compiled on its own, before a level is chosen.

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

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

// The highest level that this CPU supports, as an index of LEVELS in compiler.py.
extern "C" __attribute__((visibility("default"))) int64_t warmpath_best_level() {
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
