// AMX: matrix products in tiles of 16 x 16 sums, each over 32 products.
//
// A packed weight is the right operand; see amx/packed_products.h. An unpacked weight is the left operand, so that its
// tiles are read directly from the weight; the rows of x are the right operand then and are packed once per product, 16
// rows as [K / 2][16] pairs. Attention is arranged in the same way: scores^T = K q^T reads the keys directly from their
// blocks and puts sixteen queries side by side into a vector, so that the maxima and sums of a softmax need no
// operations across lanes. Values are the left operand of the second product, so they are packed transposed, once per
// sequence.

#pragma once

#include "level.h"

namespace {
namespace amx {

#include "amx/tiles.h"

#include "amx/products.h"

#include "amx/packed_products.h"

#include "amx/attention.h"

}  // namespace amx
}  // namespace
