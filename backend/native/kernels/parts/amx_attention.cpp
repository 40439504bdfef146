#if defined(__AMX_TILE__)
#include "../amx.h"
#include "../parts.h"

void parts::amx_attention(const Attend& a, int64_t seq, void* shared) {
  amx::attend_sequence(a, seq, static_cast<uint16_t*>(shared));
}
#endif
