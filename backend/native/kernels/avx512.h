// The level of AVX-512 with dot products of bfloat16 pairs (BF16) and int8 quadruples (VNNI).

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#endif

#define LEVEL avx512
#define WIDTH 64
#include "level.h"
#undef LEVEL
#undef WIDTH

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
