#include "../level.h"
#include "../parts.h"

void parts::experts(const Experts& a, void* shared, void (*run)(const Op&, void*)) { LEVEL::experts(a, shared, run); }
