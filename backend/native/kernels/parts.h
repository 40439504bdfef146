// The parts of a level. Each is one file of parts/, so that the parts of a level are compiled in parallel; run.h calls
// them. shared: memory of as many bytes as `shared_bytes` returns for the operation.

#pragma once

#include "operations.h"

namespace warmpath::parts {

void products(const Op& op);  // by weights that are not packed: LINEAR, EXPAND; and TO_INT4
void packed_products(const Linear& a, void* shared);
void block_products(const Linear& a, void* shared);  // by weights of block types
void blocks(const Op& op);                           // PACK_BLOCKS; EMBED from block types
void elementwise(const Op& op);
void sampling(const Op& op);
void attention(const Attend& a, bool (*skips)(const Attend&, int64_t), void* shared);
void prompt_attention(const Attend& a, int64_t seq, void* shared);
void experts(const Experts& a, void* shared, void (*run)(const Op&, void*));

// At the level of AMX only.
void amx_products(const Linear& a, void* shared);
void amx_attention(const Attend& a, int64_t seq, void* shared);

}  // namespace warmpath::parts
