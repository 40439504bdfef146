// Vectors of floats: loading, storing, horizontal sums, and the elementary functions that models need.

constexpr int64_t LANES = WIDTH / 4;
typedef float vf __attribute__((vector_size(WIDTH)));
typedef int32_t vi __attribute__((vector_size(WIDTH)));
typedef uint32_t vu __attribute__((vector_size(WIDTH)));

template <class V>
inline V read(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
inline vf all(float value) { return value - vf{}; }

// Widens narrow integers. Compilers split the general form into single lanes, so x86 has its own.
#if WIDTH == 64
inline vu widened(const uint16_t* from) { return (vu)_mm512_cvtepu16_epi32(read<__m256i>(from)); }
inline vi widened(const int8_t* from) { return (vi)_mm512_cvtepi8_epi32(read<__m128i>(from)); }
inline vu widened(const uint8_t* from) { return (vu)_mm512_cvtepu8_epi32(read<__m128i>(from)); }
inline vf as_floats(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
#elif WIDTH == 32
inline vu widened(const uint16_t* from) { return (vu)_mm256_cvtepu16_epi32(read<__m128i>(from)); }
inline vi widened(const int8_t* from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline vu widened(const uint8_t* from) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline vf as_floats(vi v) { return (vf)_mm256_cvtepi32_ps((__m256i)v); }
inline vi whole(vf v) { return (vi)_mm256_cvttps_epi32((__m256)v); }
#else
typedef uint16_t vh __attribute__((vector_size(WIDTH / 2)));
typedef int8_t vb __attribute__((vector_size(WIDTH / 4)));
typedef uint8_t vub __attribute__((vector_size(WIDTH / 4)));
inline vu widened(const uint16_t* from) { return __builtin_convertvector(read<vh>(from), vu); }
inline vi widened(const int8_t* from) { return __builtin_convertvector(read<vb>(from), vi); }
inline vu widened(const uint8_t* from) { return __builtin_convertvector(read<vub>(from), vu); }
inline vf as_floats(vi v) { return __builtin_convertvector(v, vf); }
inline vi whole(vf v) { return __builtin_convertvector(v, vi); }
#endif

inline vf load(const float* from) { return read<vf>(from); }
inline vf load(const bf16* from) { return (vf)(widened(&from->bits) << 16); }
inline vf load(const int8_t* from) { return as_floats(widened(from)); }
inline vf load(const e4m3* from) {  // as the float with the same exponent bits, whose bias is 120 larger
  const vu bits = widened(&from->bits);
  return (vf)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
}
template <class T>
inline vf load(const T* from, int64_t left) {  // zeros after the end
  if (left >= LANES) return load(from);
  T some[LANES] = {};
  __builtin_memcpy(some, from, left * sizeof(T));
  return load(some);
}

// Makes the compiler reload what this pointer points to. Otherwise it keeps the values in registers, which are then
// missing for the sums.
template <class T>
inline void force_reload(const T*& pointer) {
  __asm__("" : "+r"(pointer));
}

// sum + x * y. Where all registers are in use, compilers may write the result to another register than that of the sum,
// and then lack one.
inline __attribute__((always_inline)) vf add_product(vf sum, vf x, vf y) {
#if WIDTH == 32
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
  return sum;
#else
  return sum + x * y;
#endif
}

// Calls f(0) to f(N - 1), each with a compile-time constant. With a loop, compilers keep arrays of sums in memory,
// because they split arrays into registers before they unroll loops.
template <class F, int... I>
inline __attribute__((always_inline)) void unroll_all(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
inline __attribute__((always_inline)) void unroll(F f) {
  unroll_all(f, std::make_integer_sequence<int, N>{});
}

// Used in place of an initialiser, which compilers translate to a slow memory fill.
template <int N>
inline __attribute__((always_inline)) void zero(vf (&v)[N]) {
  unroll<N>([&](auto i) __attribute__((always_inline)) { v[i] = vf{}; });
}
template <int N, int M>
inline __attribute__((always_inline)) void zero(vf (&v)[N][M]) {
  unroll<N>([&](auto i) __attribute__((always_inline)) { zero(v[i]); });
}
template <int N, int M, int L>
inline __attribute__((always_inline)) void zero(vf (&v)[N][M][L]) {
  unroll<N>([&](auto i) __attribute__((always_inline)) { zero(v[i]); });
}

inline vf max(vf a, vf b) {  // b if one of them is NaN
#if WIDTH == 64
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 32
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline vu rounded(vf v) {  // to bfloat16, in the high halves of the words
  const vu bits = (vu)(v != v ? all(__builtin_nanf("")) : v);
  return bits + 0x7fff + (bits >> 16 & 1);
}

inline void store(float* to, vf v) { __builtin_memcpy(to, &v, sizeof v); }
inline void store(bf16* to, vf v) {
#if WIDTH == 64
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
  const vu words = rounded(v) >> 16;
#if WIDTH == 32
  const __m128i half =
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)words), _mm256_extracti128_si256((__m256i)words, 1));
#else
  const vh half = __builtin_convertvector(words, vh);
#endif
#endif
  __builtin_memcpy(to, &half, sizeof half);
}
template <class T>
inline void store(T* to, vf v, int64_t left) {
  if (left >= LANES) return store(to, v);
  T some[LANES];
  store(some, v);
  __builtin_memcpy(to, some, left * sizeof(T));
}

// The odd ones of bfloat16 pairs as floats. With AVX2, the mask is read from memory: sums, inputs and numbers leave no
// register for it, and compilers would keep a sum in memory instead, of which each step would have to wait for the one
// before.
inline __attribute__((always_inline)) vf high_halves(vu both) {
#if WIDTH == 32
  alignas(WIDTH) static constexpr uint32_t MASK[LANES] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                          0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
  __asm__("vpand %1, %0, %0" : "+x"(both) : "m"(MASK));
  return (vf)both;
#else
  return (vf)(both & 0xffff0000u);
#endif
}

// Twice LANES numbers as two vectors, in the cheapest order. For bfloat16, of which a word has two, these are the even
// and the odd elements.
struct Pair {
  vf first, second;
};
constexpr int64_t PAIR = 2 * LANES;
inline Pair pair_of(const float* from) { return {load(from), load(from + LANES)}; }
inline Pair pair_of(const bf16* from) {
  const vu both = read<vu>(from);
  return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}
// One vector of a pair.
inline vf part_of_pair(const float* from, int part) { return load(from + part * LANES); }
inline vf part_of_pair(const bf16* from, int part) {
  const vu both = read<vu>(from);
  return part ? high_halves(both) : (vf)(both << 16);
}
template <class T>
inline Pair pair_of(const T* from, int64_t left) {  // zeros after the end
  if (left >= PAIR) return pair_of(from);
  T some[PAIR] = {};
  __builtin_memcpy(some, from, left * sizeof(T));
  return pair_of(some);
}
inline void store(float* to, Pair pair) { store(to, pair.first), store(to + LANES, pair.second); }
inline void store(bf16* to, Pair pair) {
  const vu both = rounded(pair.first) >> 16 | (rounded(pair.second) & 0xffff0000u);
  __builtin_memcpy(to, &both, sizeof both);
}
template <class T>
inline void store(T* to, Pair pair, int64_t left) {
  if (left >= PAIR) return store(to, pair);
  T some[PAIR];
  store(some, pair);
  __builtin_memcpy(to, some, left * sizeof(T));
}

#if WIDTH == 64
// The sums of the quarters of four vectors: a quarter of the result has one partial sum of each vector.
inline __m512 quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                       (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
}
inline __m128 over_quarters(__m512 v) {
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}
#endif

inline float sum(vf v) {
#if WIDTH == 64
  return _mm_cvtss_f32(over_quarters(quarters((__m512)v, (__m512)v, (__m512)v, (__m512)v)));
#elif WIDTH == 32
  const __m128 halves = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

inline float highest_of(vf v) {
#if WIDTH == 64
  return _mm512_reduce_max_ps((__m512)v);
#elif WIDTH == 32
  const __m128 halves = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pairs = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  const float first = v[0] > v[2] ? v[0] : v[2], second = v[1] > v[3] ? v[1] : v[3];
  return first > second ? first : second;
#endif
}

// The sums of N vectors, with the same additions as `sum`.
template <int N>
inline __attribute__((always_inline)) void sums_of(const vf (&v)[N], float* to) {
  constexpr int FOURS = WIDTH >= 32 ? N / 4 : 0;
#if WIDTH >= 32
  unroll<FOURS>([&](auto four) __attribute__((always_inline)) {
    constexpr int i = 4 * four;
#if WIDTH == 64
    _mm_storeu_ps(to + i, over_quarters(quarters((__m512)v[i], (__m512)v[i + 1], (__m512)v[i + 2], (__m512)v[i + 3])));
#else
    __m128 halves[4];
    unroll<4>([&](auto j) __attribute__((always_inline)) {
      halves[j] = _mm_add_ps(_mm256_castps256_ps128((__m256)v[i + j]), _mm256_extractf128_ps((__m256)v[i + j], 1));
    });
    const __m128 first = _mm_add_ps(_mm_movelh_ps(halves[0], halves[1]), _mm_movehl_ps(halves[1], halves[0]));
    const __m128 second = _mm_add_ps(_mm_movelh_ps(halves[2], halves[3]), _mm_movehl_ps(halves[3], halves[2]));
    _mm_storeu_ps(to + i, _mm_add_ps(_mm_shuffle_ps(first, second, 0x88), _mm_shuffle_ps(first, second, 0xdd)));
#endif
  });
#endif
  unroll<N - 4 * FOURS>([&](auto i) __attribute__((always_inline)) { to[4 * FOURS + i] = sum(v[4 * FOURS + i]); });
}

// The polynomial of Cephes, with a relative error below 2e-7. It underflows to zero and saturates instead of
// overflowing.
inline vf exp(vf x) {
#if WIDTH == 64
  x = max(x, all(-110.0f));
  const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 8);
#else
  const vi vanishes = x < all(-87.0f);
  x = vanishes ? vf{} : (x > all(88.0f) ? all(88.0f) : x);
  const vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
#endif
  const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if WIDTH == 64
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return vanishes ? vf{} : p * (vf)((whole(n) + 127) << 23);
#endif
}
// 2^x for x up to 126, without instructions that scale by powers of two, which take two cycles. The relative error is
// below 1e-7 for T = float, and below 3e-6 for bfloat16, which rounds to 4e-3. Exactly 1 for 0, and exactly 0 for -inf.
template <class T>
inline vf exp2(vf x) {
  x = max(all(-127.0f), x);                                                             // keeps NaN
  const vf shifted = x + (12582912.0f + 127), r = x - (shifted - (12582912.0f + 127));  // r: minus the nearest integer
  vf p;
  if constexpr (std::is_same<T, float>::value) {
    p = all(1.3264727e-3f);
    p = p * r + 9.6715127e-3f;
    p = p * r + 5.5507337e-2f;
    p = p * r + 2.4022242e-1f;
    p = p * r + 6.9314698e-1f;
  } else {
    p = all(9.5828531e-3f);
    p = p * r + 5.5906425e-2f;
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312419e-1f;
  }
  p = p * r + 1.0f;
  return p * (vf)((vi)shifted << 23);  // the integer plus 127 is in the lowest bits; the factor of -127 is 0
}
inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }
inline vf capped(vf x, float cap) { return tanh(x / cap) * cap; }
inline vf silu(vf x) { return x / (exp(-x) + 1.0f); }
inline vf gelu(vf x) { return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
inline vf swiglu_oai(vf gate, vf up) {  // comparisons keep NaN
  gate = gate > 7 ? all(7) : gate;
  up = up > 7 ? all(7) : up < -7 ? all(-7) : up;
  return (up + 1.0f) * (gate / (exp(gate * -1.702f) + 1.0f));
}
inline vf gated(int64_t activation, vf gate, vf up) {
  return activation == SILU ? silu(gate) * up : activation == GELU ? gelu(gate) * up : swiglu_oai(gate, up);
}
