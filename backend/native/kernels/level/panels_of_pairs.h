// Panels of packed weights for AVX-512's dot products of bfloat16 pairs and int8 quadruples.
//
// A word has as many inputs of one output as are summed by one instruction, and is adjacent to those of the other
// outputs of its half of the panel: bfloat16 [K / 2][2][LANES][2], int8 [K / 4][2][LANES][4], int4 as in
// panels_of_floats.h.
//
// For int8 and int4 weights, inputs are quantised to 16-bit integers relative to the row's largest value, as a high and
// a low byte that are multiplied separately. So no precision of bfloat16 is lost, and no weight has to be converted.
// The instruction takes unsigned weights, so these are 128, 12 or 8 too large, and the sums too large by that times the
// sum of the inputs, which is computed beforehand.

#if WIDTH == 64

inline __m512i word_of(const void* from) {  // one word in all lanes
  return _mm512_set1_epi32(read<int32_t>(from));
}

inline __attribute__((always_inline)) vf add_pairs(vf sum, __m512i w, __m512i x) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
}

// Adds products with a word that is broadcast to all lanes. The instructions can broadcast it from memory, which takes
// no register. Compilers would use a separate load, which is better if several products share the word.
inline __attribute__((always_inline)) vf add_pairs(vf sum, __m512i w, const bf16* x) {
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const bf16(*)[2]>(x)));
  return sum;
}
inline __attribute__((always_inline)) __m512i add_fours(__m512i sum, __m512i w, const int8_t* x) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int8_t (*)[4]>(x)));
  return sum;
}

// How rows of x are stored for weights of type W, and how much of both is processed at once; see panels_of_floats.h.
template <class W>
struct InputLayout;
template <>
struct InputLayout<bf16> {
  typedef bf16 T;
  static constexpr int64_t MOST_ROWS = 8;
  static constexpr int64_t STRAIGHT_ROWS = 8;
  static constexpr int64_t NEAR_STEPS = 256;
  static constexpr int64_t UNIT = GROUP;
  static int64_t stride(int64_t ins) { return whole_lines(ins * sizeof(T)) / sizeof(T); }
  // Unless the rows compete for the same sets of a cache.
  static bool is_usable_in_place(int64_t stride) { return stride * int64_t(sizeof(T)) % 1024 != 0; }
  static void keep(const bf16* from, int64_t ins, bf16* to) { __builtin_memcpy(to, from, ins * sizeof(bf16)); }
  static const bf16* at(const bf16* row, int64_t k) { return row + k; }
  static float factor(const bf16*, int64_t) { return 1; }
};

// The largest magnitude of a row; NaN if the row has any, because the bits of NaN are the largest integers.
inline float largest_of(const bf16* x, int64_t ins) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < ins; k += LANES) {
    const __m512i bits = (__m512i)load(x + k, ins - k);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  return read<float>(&bits);
}

// Rows as 16-bit integers: for every N inputs a record of N high bytes, N low bytes and the excess of their products;
// after all records, the row's scale.
template <int64_t N, int64_t EXCESS>
struct Halves {
  typedef int8_t T;
  static constexpr int64_t MOST_ROWS = 6;
  static constexpr int64_t STRAIGHT_ROWS = 0;
  static constexpr int64_t NEAR_STEPS = 512;
  static constexpr int64_t UNIT = N;
  static constexpr int64_t RECORD = 2 * N + 4;
  static constexpr float MOST = 127 * 256.0f;  // the largest integer whose high byte is an int8
  static int64_t stride(int64_t ins) { return whole_lines(ceil_div(ins, N) * RECORD + sizeof(float)); }
  static bool is_usable_in_place(int64_t) { return false; }
  static const int8_t* at(const int8_t* row, int64_t k) { return row + k / N * RECORD; }
  static float factor(const int8_t* row, int64_t ins) { return read<float>(at(row, ceil_div(ins, N) * N)); }
  static void keep(const bf16* from, int64_t ins, int8_t* to) {
    const float top = largest_of(from, ins), factor = top > 0 ? MOST / top : 0, inverse = top / MOST;
    for (int64_t k = 0; k < ins; k += N, to += RECORD) {
      __m512i total = _mm512_setzero_si512();
      for (int64_t i = 0; i < N; i += LANES) {
        const vf value = k + i < ins ? load(from + k + i, ins - k - i) : vf{};
        const __m512i number = _mm512_cvtps_epi32((__m512)(value * factor));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i*)(to + N + i), _mm512_cvtepi32_epi8(number));  // the remainder is the low byte
        total = _mm512_add_epi32(total, number);
      }
      const int32_t excess = _mm512_reduce_add_epi32(total) * EXCESS;
      __builtin_memcpy(to + 2 * N, &excess, sizeof excess);
    }
    __builtin_memcpy(to, &inverse, sizeof inverse);
  }
  // Combines the sums of both halves and subtracts the excess.
  static vf whole(const int8_t* record, __m512i high, __m512i low) {
    const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    return (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(both, word_of(record + 2 * N)));
  }
};
template <>
struct InputLayout<int8_t> : Halves<512, 128> {};  // so many inputs, because the sums are int32
template <>
struct InputLayout<int4x32> : Halves<GROUP, TOO_LARGE_BY<int4x32>> {};
template <>
struct InputLayout<mxfp4x32> : Halves<GROUP, TOO_LARGE_BY<mxfp4x32>> {};

template <class W>
struct Panel {  // bfloat16 and int8
  const char* from;
  Panel() = default;
  explicit Panel(const void* w, int64_t k = 0) : from(static_cast<const char*>(w) + bytes(k)) {}
  static int64_t bytes(int64_t steps) { return steps * PANEL * sizeof(W); }
  __m512i at(int64_t k, int64_t half) const { return read<__m512i>(from + bytes(k) + half * 64); }
};
struct GroupedPanel {
  static constexpr int64_t GROUP_BYTES = 9 * 64;
  const char* from;
  GroupedPanel() = default;
  explicit GroupedPanel(const void* w, int64_t k = 0) : from(static_cast<const char*>(w) + bytes(k)) {}
  static int64_t bytes(int64_t steps) { return steps / GROUP * GROUP_BYTES; }
};
template <>
struct Panel<int4x32> : GroupedPanel {
  using GroupedPanel::GroupedPanel;
};
template <>
struct Panel<mxfp4x32> : GroupedPanel {
  using GroupedPanel::GroupedPanel;
};

// Multiplies R rows of x, `stride` apart, by P panels and adds the products to sums.
template <int R, int P>
inline __attribute__((always_inline)) void multiply(const bf16* x, int64_t stride, const Panel<bf16> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m512i w[2 * P];
    unroll<2 * P>([&](auto i) __attribute__((always_inline)) { w[i] = panels[i / 2].at(k, i % 2); });
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const __m512i word = word_of(x + r * stride + k);
      unroll<2 * P>([&](auto i) __attribute__((always_inline)) {
        sums[r][i / 2][i % 2] = add_pairs(sums[r][i / 2][i % 2], w[i], word);
      });
    });
  };
  int64_t k = 0;
  for (; k + STRIDE_STEPS <= steps; k += STRIDE_STEPS) {
    for (int64_t i = 0; i < prefetch.lines; i++, prefetch.from += 64) __builtin_prefetch(prefetch.from, 0, 2);
    for (int64_t i = 0; i < STRIDE_STEPS; i += 2) step(k + i);
  }
  for (; k < steps; k += 2) step(k);
}

// Two integer sums for each float sum: of products with the high bytes and with the low ones.
template <int R, int P>
struct Sums {
  __m512i high[R][P][2], low[R][P][2];
  inline __attribute__((always_inline)) Sums() {
    unroll<R * P * 2>([&](auto i) __attribute__((always_inline)) {
      high[i / 2 / P][i / 2 % P][i % 2] = low[i / 2 / P][i / 2 % P][i % 2] = _mm512_setzero_si512();
    });
  }
  // Adds four inputs by one half of a panel. at: the inputs' high bytes; the low ones are n bytes after them.
  template <int p, int half>
  inline __attribute__((always_inline)) void add(__m512i w, const int8_t* at, int64_t stride, int64_t n) {
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      high[r][p][half] = add_fours(high[r][p][half], w, at + r * stride);
      low[r][p][half] = add_fours(low[r][p][half], w, at + r * stride + n);
    });
  }
};

template <int R, int P>
inline __attribute__((always_inline)) void multiply(const int8_t* x, int64_t stride, const Panel<int8_t> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  typedef InputLayout<int8_t> Rows;
  const __m512i sign = _mm512_set1_epi8(-128);
  for (int64_t from = 0; from < steps; from += Rows::UNIT, x += Rows::RECORD) {
    const int64_t until = min_of(Rows::UNIT, steps - from);
    Sums<R, P> own;
    const auto step = [&](int64_t k) __attribute__((always_inline)) {
      unroll<2 * P>([&](auto i) __attribute__((always_inline)) {
        const __m512i w = _mm512_xor_si512(panels[i / 2].at(from + k, i % 2), sign);
        own.template add<i / 2, i % 2>(w, x + k, stride, Rows::UNIT);
      });
    };
    int64_t k = 0;
    for (; k + STRIDE_STEPS <= until; k += STRIDE_STEPS) {
      for (int64_t i = 0; i < prefetch.lines; i++, prefetch.from += 64) __builtin_prefetch(prefetch.from, 0, 2);
      for (int64_t i = 0; i < STRIDE_STEPS; i += 4) step(k + i);
    }
    for (; k < until; k += 4) step(k);
    unroll<R * P * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / 2 / P, p = i / 2 % P, half = i % 2;
      sums[r][p][half] += Rows::whole(x + r * stride, own.high[r][p][half], own.low[r][p][half]);
    });
  }
}

// The same for grouped weights.
template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply_groups(const int8_t* x, int64_t stride, const Panel<W> (&panels)[P],
                                                           int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  typedef InputLayout<W> Rows;
  const W* const tag = nullptr;
  const __m512i four_bits = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < steps / GROUP; g++, x += Rows::RECORD) {
    for (int64_t i = 0; i < prefetch.lines * GROUP / STRIDE_STEPS; i++, prefetch.from += 64)
      __builtin_prefetch(prefetch.from, 0, 2);
    Sums<R, P> own;
    for (int64_t j = 0; j < 8; j++)
      unroll<P>([&](auto p) __attribute__((always_inline)) {
        const __m512i words = read<__m512i>(panels[p].from + g * GroupedPanel::GROUP_BYTES + j * 64);
        own.template add<p, 0>(unsigned_of(tag, _mm512_and_si512(words, four_bits)), x + 4 * j, stride, GROUP);
        own.template add<p, 1>(unsigned_of(tag, _mm512_and_si512(_mm512_srli_epi32(words, 4), four_bits)), x + 4 * j,
                               stride, GROUP);
      });
    unroll<P>([&](auto p) __attribute__((always_inline)) {
      const vu scales = read<vu>(panels[p].from + g * GroupedPanel::GROUP_BYTES + 8 * 64);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const int8_t* const record = x + r * stride;
        sums[r][p][0] += Rows::whole(record, own.high[r][p][0], own.low[r][p][0]) * (vf)(scales << 16);
        sums[r][p][1] += Rows::whole(record, own.high[r][p][1], own.low[r][p][1]) * (vf)(scales & 0xffff0000u);
      });
    });
  }
}

template <int R, int P>
inline __attribute__((always_inline)) void multiply(const int8_t* x, int64_t stride, const Panel<int4x32> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  multiply_groups(x, stride, panels, steps, prefetch, sums);
}
template <int R, int P>
inline __attribute__((always_inline)) void multiply(const int8_t* x, int64_t stride, const Panel<mxfp4x32> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  multiply_groups(x, stride, panels, steps, prefetch, sums);
}

#endif
