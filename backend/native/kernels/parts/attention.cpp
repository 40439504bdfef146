#include "../level.h"
#include "../parts.h"

void parts::attention(const Attend& a, bool (*skips)(const Attend&, int64_t), void* shared) {
  LEVEL::attend(a, skips, static_cast<float*>(shared));
}
