#include "../level.h"
#include "../parts.h"

void parts::packed_products(const Linear& a, void* shared) {
  LEVEL::with_weight_type<bf16>(a.format, [&](auto w) { LEVEL::linear_packed<decltype(w)>(a, shared); });
}
