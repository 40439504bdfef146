// Runs one operation at this level: which part computes it, and how much shared memory it needs.

#pragma once

#include "level.h"
#include "parts.h"
#if defined(__AMX_TILE__)
#include "amx.h"
#endif

namespace {
namespace LEVEL {

inline size_t shared_bytes(const Op& op) {
  if (op.code == LINEAR && is_block_type(op.linear.format))
    return with_block_type(op.linear.format, [&](auto w) { return input_bytes<decltype(w)>(op.linear); });
  if (op.code == LINEAR && op.linear.is_packed) {
    return with_weight_type<bf16>(op.linear.format, [&](auto w) { return input_bytes<decltype(w)>(op.linear); });
  }
  if (op.code == ATTEND) {
    const size_t rows = RowTasks(op.attend, fits_tiles, op.num_threads).bytes();
    for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
      if (fits_tiles(op.attend, seq)) return max_of(rows, heads_together(op.attend) * packed_head_bytes(op.attend));
    return rows;
  }
  if (op.code == EXPERTS) return experts_bytes(op.experts, shared_bytes);
  return 0;
}

inline void run(const Op& op, void* shared) {
  switch (op.code) {
    case LINEAR:
      if (is_block_type(op.linear.format)) return parts::block_products(op.linear, shared);
      return op.linear.is_packed ? parts::packed_products(op.linear, shared) : parts::products(op);
    case PACK_BLOCKS: return parts::blocks(op);
    case EMBED: return is_block_type(op.embed.format) ? parts::blocks(op) : parts::elementwise(op);
    case EXPAND:
    case TO_INT4: return parts::products(op);
    case ATTEND:
      for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
        if (fits_tiles(op.attend, seq)) parts::prompt_attention(op.attend, seq, shared);
      return parts::attention(op.attend, fits_tiles, shared);
    case EXPERTS: return parts::experts(op.experts, shared, run);
    case ARGMAX:
    case DRAW:
    case PENALISE:
    case ADD_BIAS:
    case FORBID:
    case ROUTE:
    case LOGPROBS:
    case LOGITS: return parts::sampling(op);
    default: return parts::elementwise(op);
  }
}

}  // namespace LEVEL
#if defined(__AMX_TILE__)
namespace amx {

inline size_t shared_bytes(const Op& op) {
  if (op.code == LINEAR && is_block_type(op.linear.format)) return avx512::shared_bytes(op);
  if (op.code == LINEAR && op.linear.is_packed) return packed_bytes(op.linear);
  if (op.code == LINEAR && fits_tiles(op.linear))
    return ceil_div(op.linear.rows, TILE) * TILE * (op.linear.ins * 2 + sizeof(float));
  if (op.code == ATTEND) {
    const Attend& a = op.attend;
    if (a.kv_format != UNQUANTISED) return avx512::shared_bytes(op);
    const size_t rows = avx512::RowTasks(a, fits_tiles, op.num_threads).bytes();
    for (int64_t seq = 0; seq < a.num_seqs; seq++)
      if (fits_tiles(a, seq))
        return max_of(rows, a.num_kv_heads * a.head_dim * (longest_sequence(a) + 2 * DEPTH) * sizeof(bf16));
    return rows;
  }
  if (op.code == EXPERTS) return avx512::experts_bytes(op.experts, shared_bytes);
  return 0;
}

inline void run(const Op& op, void* shared) {
  if (op.code == LINEAR && fits_tiles(op.linear)) return parts::amx_products(op.linear, shared);
  if (op.code == EMBED && !is_block_type(op.embed.format)) return embed(op.embed);
  if (op.code == EXPERTS) return parts::experts(op.experts, shared, run);
  if (op.code != ATTEND || op.attend.kv_format != UNQUANTISED) return avx512::run(op, shared);
  for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
    if (fits_tiles(op.attend, seq)) parts::amx_attention(op.attend, seq, shared);
  parts::attention(op.attend, fits_tiles, shared);
}

}  // namespace amx
#endif
}  // namespace
