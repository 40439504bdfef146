// Products with unpacked weights, in the layout of the checkpoint.

// One row of a weight. `floats` reads LANES weights; `pairs` reads 32 as bfloat16, if the CPU has products of pairs.
template <class W>
struct Row {
  const W* from;
  Row() = default;
  template <class A>
  Row(const A& a, int64_t n) : from(static_cast<const W*>(a.w) + n * a.ins) {}
  vf floats(int64_t k, int64_t left) const { return load(from + k, left); }
#if WIDTH == 64
  __m512i pairs(int64_t k, int64_t left) const {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + k + 16, max_of(left - 16, 0)),
                                        (__m512)load(from + k, left));
  }
#endif
};

#if WIDTH == 64
template <>
inline __m512i Row<bf16>::pairs(int64_t k, int64_t left) const {
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, from + k);
}
#endif

template <class W>
struct GroupedRow {
  const W* groups;
  const bf16* scales;
  GroupedRow() = default;
  template <class A>
  GroupedRow(const A& a, int64_t n)
      : groups(static_cast<const W*>(a.w) + n * (a.ins / GROUP)),
        scales(static_cast<const bf16*>(a.scales) + n * (a.ins / GROUP)) {}
  vf floats(int64_t k, int64_t) const {
    const int64_t group = k / GROUP, at = k % GROUP;
    const vu bytes = widened(groups[group].bytes + at % 16);
    return numbers_of(groups, at < 16 ? bytes & 15 : bytes >> 4) * to_float(scales[group]);
  }
#if WIDTH == 64
  __m512i pairs(int64_t k, int64_t) const {  // with a table of the 16 values that weights of this group can have
    const __m256i values = (__m256i)_mm512_cvtneps_pbh((__m512)(every_number(groups) * to_float(scales[k / GROUP])));
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)groups[k / GROUP].bytes));
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15)), high = _mm256_srli_epi16(bytes, 4);
    return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1),
                                    _mm512_castsi256_si512(values));
  }
#endif
};
template <>
struct Row<int4x32> : GroupedRow<int4x32> {
  using GroupedRow::GroupedRow;
};
template <>
struct Row<mxfp4x32> : GroupedRow<mxfp4x32> {
  using GroupedRow::GroupedRow;
};

// One step of a dot product: LANES products, or 32 of bfloat16 if the CPU sums pairs.
template <class X>
struct Step {
  static constexpr int64_t SIZE = LANES;
  typedef vf V;
  typedef float Stored;  // how x is stored if it is read many times
  static V of_x(const X* x, int64_t left) { return load(x, left); }
  static V of_kept(const float* x, int64_t) { return load(x); }
  template <class R>
  static V of_w(const R& row, int64_t k, int64_t left) {
    return row.floats(k, left);
  }
  static vf add(vf sum, V x, V w) { return sum + x * w; }
};
#if WIDTH == 64
template <>
struct Step<bf16> {
  static constexpr int64_t SIZE = 32;
  typedef __m512i V;
  typedef bf16 Stored;
  static V of_kept(const bf16* x, int64_t left) { return of_x(x, left); }
  static V of_x(const bf16* x, int64_t left) {
    return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, x);
  }
  template <class R>
  static V of_w(const R& row, int64_t k, int64_t left) {
    return row.pairs(k, left);
  }
  static vf add(vf sum, V x, V w) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w); }
};
#endif

// R rows of x from t on, by C rows of the weight from n on.
template <class X, class W, int R, int C>
inline void product(const Linear& a, int64_t t, int64_t n) {
  vf sums[R][C];
  zero(sums);
  const X* x[R];
  Row<W> w[C];
  for (int r = 0; r < R; r++) x[r] = static_cast<const X*>(a.x) + (t + r) * a.x_stride;
  for (int c = 0; c < C; c++) w[c] = Row<W>(a, n + c);
  const auto step = [&](int64_t k, int64_t left) __attribute__((always_inline)) {
    typename Step<X>::V xs[R];
    for (int r = 0; r < R; r++) xs[r] = Step<X>::of_x(x[r] + k, left);
    for (int c = 0; c < C; c++) {
      const auto ws = Step<X>::of_w(w[c], k, left);
      for (int r = 0; r < R; r++) sums[r][c] = Step<X>::add(sums[r][c], xs[r], ws);
    }
  };
  const int64_t whole = a.ins / Step<X>::SIZE * Step<X>::SIZE;
  for (int64_t k = 0; k < whole; k += Step<X>::SIZE) step(k, Step<X>::SIZE);
  if (whole < a.ins) step(whole, a.ins - whole);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float y = sum(sums[r][c]);
      if (a.format == INT8) y *= static_cast<const float*>(a.scales)[n + c];
      if constexpr (sizeof(X) == 4) {
        if (a.bias) y += static_cast<const float*>(a.bias)[n + c];
        static_cast<float*>(a.out)[(t + r) * a.outs + n + c] = y;
      } else {
        if (a.bias) y += to_float(static_cast<const bf16*>(a.bias)[n + c]);
        static_cast<bf16*>(a.out)[(t + r) * a.outs + n + c].bits = to_bf16(y);
      }
    }
}

template <class X, class W, int R>
inline void rows_of_x(const Linear& a, int64_t t, int64_t n, int64_t end) {
  constexpr int C = R == 1 ? 8 : WIDTH == 64 ? 4 : 2;  // limited by the registers for sums
  for (; n + C <= end; n += C) product<X, W, R, C>(a, t, n);
  for (; n < end; n++) product<X, W, R, 1>(a, t, n);
}

template <class X, class W>
void linear_columns(const Linear& a, int64_t begin, int64_t end) {
  constexpr int64_t CHUNK = 32;  // columns per task: their weights stay in the cache for all rows of x
  parallel_for(ceil_div(end - begin, CHUNK), 1, [&](int64_t i) {
    const int64_t n = begin + i * CHUNK, until = min_of(n + CHUNK, end);
    int64_t t = 0;
    for (; t + 4 <= a.rows; t += 4) rows_of_x<X, W, 4>(a, t, n, until);
    if (t + 2 <= a.rows) rows_of_x<X, W, 2>(a, t, n, until), t += 2;
    if (t < a.rows) rows_of_x<X, W, 1>(a, t, n, until);
  });
}

template <class X, class W>
void expand(const Expand& a) {
  parallel_for(a.outs, 0, [&](int64_t n) {
    const Row<W> row(a, n);
    const float scale = a.format == INT8 ? static_cast<const float*>(a.scales)[n] : 1.0f;
    X* out = static_cast<X*>(a.out) + n * a.ins;
    for (int64_t k = 0; k < a.ins; k += LANES) store(out + k, row.floats(k, a.ins - k) * scale, a.ins - k);
  });
}
