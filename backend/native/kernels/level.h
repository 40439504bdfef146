// One level of instruction sets: the kernels over vectors of WIDTH bytes, in a namespace named LEVEL. kernels.cpp
// includes this file once per level, so neither it nor its parts have include guards.

namespace {
namespace LEVEL {

#include "level/vectors.h"

#include "level/four_bits.h"

#include "level/to_int4.h"

#include "level/products.h"

#include "level/packed_products.h"

#include "level/cache_rows.h"

#include "level/elementwise.h"

#include "level/experts.h"

#include "level/logits.h"

#include "level/filters.h"

#include "level/tokens.h"

#include "level/logprobs.h"

#include "level/attention.h"

#include "level/prompt_attention.h"

#include "level/run.h"

}  // namespace LEVEL
}  // namespace
