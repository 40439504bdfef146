// The level of AVX2 with fused multiply-add.

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define LEVEL avx2
#define WIDTH 32
#include "level.h"
#undef LEVEL
#undef WIDTH

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
