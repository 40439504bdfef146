#include "../level.h"
#include "../parts.h"

void parts::prompt_attention(const Attend& a, int64_t seq, void* shared) { LEVEL::attend_tiles(a, seq, shared); }
