// Rows of the KV cache, one for each token and head: numbers in the model's dtype, or bytes followed by their scale.

template <class C>
constexpr bool IS_SCALED = sizeof(C) == 1;

template <class C>
inline int64_t row_size(int64_t dim) {  // in elements
  return IS_SCALED<C> ? dim + SCALE_BYTES : dim;
}
template <class C>
inline float scale_of(const C* row, int64_t dim) {
  return read<float>(row + dim);
}

template <class C>
struct Byte;
template <>
struct Byte<int8_t> {
  static constexpr float LIMIT = 127;
  static int8_t nearest(float value) { return int8_t(value + 12582912.0f - 12582912.0f); }
};
template <>
struct Byte<e4m3> {
  static constexpr float LIMIT = 448;
  static e4m3 nearest(float value) {
    const uint32_t bits = read<uint32_t>(&value), size = bits & 0x7fffffff;
    uint32_t code;
    if (size < 0x3c800000) {  // subnormal in e4m3 (below 2^-6): spaced like floats from 2^14 on
      const float sum = read<float>(&size) + 16384.0f;
      code = read<uint32_t>(&sum) - 0x46800000;
    } else {
      code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    }
    return {uint8_t((bits >> 24 & 0x80) | (code < 0x7e ? code : 0x7e))};
  }
};

// Quantises one row. If it has a NaN, its scale is NaN.
template <class T, class C>
inline void quantise_row(const T* x, int64_t dim, C* row) {
  constexpr float SMALLEST = 1e-30f;  // scale of a row of zeros, which stays zeros
  vf highest = {};
  vi wrong = {};
  for (int64_t k = 0; k < dim; k += LANES) {
    const vf v = load(x + k, dim - k);
    wrong |= v != v;
    highest = max(v < 0 ? -v : v, highest);
  }
  float top = 0;
  for (int64_t i = 0; i < LANES; i++) {
    if (wrong[i]) top = __builtin_nanf("");
    top = highest[i] > top ? highest[i] : top;
  }
  const float scale = top / Byte<C>::LIMIT < SMALLEST ? SMALLEST : top / Byte<C>::LIMIT;
  for (int64_t k = 0; k < dim; k += LANES) {
    float some[LANES];
    store(some, load(x + k, dim - k) / scale);
    for (int64_t i = 0; i < min_of(LANES, dim - k); i++) row[k + i] = Byte<C>::nearest(some[i]);
  }
  __builtin_memcpy(row + dim, &scale, sizeof scale);
}

// Converts one row to bfloat16.
template <class C>
inline void dequantise_row(const C* row, int64_t dim, bf16* to) {
  const float scale = scale_of(row, dim);
  for (int64_t k = 0; k < dim; k += LANES) store(to + k, load(row + k, dim - k) * scale, dim - k);
}
