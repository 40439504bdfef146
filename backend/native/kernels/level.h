// One level of instruction sets: the kernels over vectors of WIDTH bytes, in a namespace that is called LEVEL. Included
// by kernels.cpp once per level, so nothing here is guarded against being included again.

namespace {
namespace LEVEL {

#include "level/vectors.h"

#include "level/fours.h"

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
