#include "../level.h"
#include "../parts.h"

void parts::block_products(const Linear& a, void* shared) {
  LEVEL::with_block_type(a.format, [&](auto w) { LEVEL::linear_packed<decltype(w)>(a, shared); });
}

void parts::blocks(const Op& op) {
  using namespace LEVEL;
  if (op.code == PACK_BLOCKS)
    return with_block_type(op.pack_blocks.format, [&](auto w) { pack_blocks<decltype(w)>(op.pack_blocks); });
  with_block_type(op.embed.format, [&](auto w) { embed_blocks<decltype(w)>(op.embed); });
}
