// The CPU's kernels at one level of instruction sets: the C interface. backend/native/compiler.py compiles this file
// and those of kernels/parts/ in parallel, and links them to one library per level.
//
// The kernels are written once, over vectors of floats. A level is another vector width (WIDTH) and other instructions
// that the compiler may use. On ARM, the base level is NEON. Code for instructions that only some CPUs have is
// separate: dot products of bfloat16 pairs and int8 quadruples with AVX-512 (kernels/level/panels_of_pairs.h), and the
// matrix tiles of AMX (kernels/amx.h).
//
// An operation distributes its work with `parallel_for` (kernels/team.h), which returns when all of it is done. Every
// element of a result is summed by one thread, in an order that depends on its row only. So float32 results do not
// depend on the other rows of the batch, and no result depends on the number of threads, bit for bit.

#include "kernels/run.h"
#include "kernels/run_all.h"

namespace {

#if defined(__AMX_TILE__)
const Level THIS_LEVEL = {amx::run, amx::shared_bytes, amx::begin, amx::end};
#else
void no_op() {}
const Level THIS_LEVEL = {LEVEL::run, LEVEL::shared_bytes, no_op, no_op};
#endif

}  // namespace

extern "C" __attribute__((visibility("default"))) void warmpath_run(const Op* ops, int64_t count) {
  run_all(THIS_LEVEL, ops, count, team_scratch.get(most_shared_bytes(THIS_LEVEL, ops, count)));
}
