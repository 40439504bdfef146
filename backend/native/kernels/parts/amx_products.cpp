#if defined(__AMX_TILE__)
#include "../amx.h"
#include "../parts.h"

void parts::amx_products(const Linear& a, void* shared) {
  if (a.is_packed) return amx::linear_packed(a, shared);
  avx512::with_weight_type<bf16>(a.format,
                                 [&](auto w) { amx::linear<decltype(w)>(a, static_cast<uint32_t*>(shared)); });
}
#endif
