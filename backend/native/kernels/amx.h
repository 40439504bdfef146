// AMX: products in tiles of 16 x 16 sums over 32 products each.
//
// A weight that was packed when it was loaded is the right operand; see packed_products.h. One that was not is the left
// operand, so that its tiles are read where they lie; the few rows of x are the right one then, packed once per
// product: 16 rows of x as [K / 2][16] pairs. Attention is arranged alike: scores^T = K q^T reads the keys in their
// blocks, and leaves sixteen queries side by side in a vector, so that maxima and sums of a softmax take no step across
// lanes. Values are packed once per sequence, transposed, since they are the left operand then.

#if defined(__clang__)
#pragma clang attribute push(                                                                                     \
    __attribute__((                                                                                               \
        target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8")
#endif

namespace {
namespace amx {

#include "amx/tiles.h"

#include "amx/products.h"

#include "amx/packed_products.h"

#include "amx/attention.h"

#include "amx/run.h"

}  // namespace amx
}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
