// AMX: products in tiles of 16 x 16 sums over 32 products each.
//
// A weight that was packed when it was loaded is the right operand; see packed_products.h. One that was not is the left
// operand, so that its tiles are read where they lie; the few rows of x are the right one then, packed once per
// product: 16 rows of x as [K / 2][16] pairs. Attention is arranged alike: scores^T = K q^T reads the keys in their
// blocks, and leaves sixteen queries side by side in a vector, so that maxima and sums of a softmax take no step across
// lanes. Values are packed once per sequence, transposed, since they are the left operand then.

namespace {
namespace amx {

#include "amx/tiles.h"

#include "amx/products.h"

#include "amx/packed_products.h"

#include "amx/attention.h"

#include "amx/run.h"

}  // namespace amx
}  // namespace
