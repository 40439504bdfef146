#include "../level.h"
#include "../parts.h"

void parts::attention(const Attend& a, bool (*skips)(const Attend&, int64_t)) { LEVEL::attend(a, skips); }
