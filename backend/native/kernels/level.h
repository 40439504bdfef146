// One level of instruction sets: the kernels over vectors of WIDTH bytes, in a namespace named LEVEL. The compiler's
// command line defines both, and permits the level's instructions (backend/native/compiler.py). Its parts have no
// include guards, because they stand in the namespace.

#pragma once

#if !defined(LEVEL)
#define LEVEL base
#define WIDTH 16
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "operations.h"
#include "team.h"

namespace {
namespace LEVEL {

#include "level/vectors.h"

#include "level/four_bits.h"

#include "level/weight_types.h"

#include "level/to_int4.h"

#include "level/products.h"

#include "level/packed_products.h"

#include "level/blocks.h"

#include "level/block_products.h"

#include "level/cache_rows.h"

#include "level/elementwise.h"

#include "level/experts.h"

#include "level/logits.h"

#include "level/weights.h"

#include "level/selection.h"

#include "level/filters.h"

#include "level/tokens.h"

#include "level/logprobs.h"

#include "level/softmax.h"

#include "level/attention_steps.h"

#include "level/attention.h"

#include "level/attention_tasks.h"

#include "level/prompt_attention.h"

}  // namespace LEVEL
}  // namespace
