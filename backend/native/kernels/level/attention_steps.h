// How attention with dot products reads and multiplies queries, keys and values: T is the dtype of the queries, C the
// format of the cache.

// One step of a score's dot product: SIZE numbers, in parts that are multiplied one after the other. A part is a vector
// of floats, or of bfloat16 pairs if the CPU sums those.
struct ScorePairs {
  static constexpr int64_t SIZE = PAIR, PARTS_OF_STEP = 2;
  typedef vf V;
  typedef float Stored;  // how queries are stored, in the order of parts
  static V of_query(const Stored* query, int part) { return load(query + part * LANES); }
  static vf add(vf sum, V query, V key) { return add_product(sum, query, key); }
};
template <class T, class C>
struct ScoreStep : ScorePairs {
  static void keep(const T* query, Stored* to, int64_t left) { store(to, pair_of(query, left)); }
  static V of_key(const T* key, int part) { return part_of_pair(key, part); }
};
// For bytes, the two vectors of a pair are consecutive elements.
template <class X>
inline Pair in_turn(const X* from, int64_t left) {
  return {load(from, left), left > LANES ? load(from + LANES, left - LANES) : vf{}};
}
template <class T, class C>
struct ScaledScoreStep : ScorePairs {
  static void keep(const T* query, Stored* to, int64_t left) { store(to, in_turn(query, left)); }
  static V of_key(const C* key, int part) { return load(key + part * LANES); }
};
template <class T>
struct ScoreStep<T, int8_t> : ScaledScoreStep<T, int8_t> {};
template <class T>
struct ScoreStep<T, e4m3> : ScaledScoreStep<T, e4m3> {};
#if WIDTH == 64
template <>
struct ScoreStep<bf16, bf16> : Step<bf16> {
  static constexpr int64_t PARTS_OF_STEP = 1;
  static void keep(const bf16* query, Stored* to, int64_t left) { _mm512_storeu_si512(to, of_x(query, left)); }
  static V of_query(const Stored* query, int) { return of_x(query, SIZE); }
  static V of_key(const bf16* key, int) { return of_x(key, SIZE); }
};
#endif

// One step of the weighted sum: the values of one position, or of two if the CPU sums bfloat16 pairs. A pair of vectors
// has PAIR dimensions.
struct WeighPairs {
  static constexpr int64_t POSITIONS = 1;
  typedef float Weight;
  typedef vf Weights;  // of these positions, in all lanes
  static Weights of_weights(const float* weight) { return all(*weight); }
};
template <class T, class C>
struct WeighStep : WeighPairs {
  static vf of_values(const T* value, int part, int64_t left) {
    if (left >= PAIR) return part_of_pair(value, part);
    const Pair both = pair_of(value, left);
    return part ? both.second : both.first;
  }
  static void finish(T* out, Pair sum, float factor, int64_t left) {
    store(out, Pair{sum.first * factor, sum.second * factor}, left);
  }
};
template <class T, class C>
struct ScaledWeighStep : WeighPairs {
  static vf of_values(const C* value, int part, int64_t left) {
    if (left >= PAIR) return load(value + part * LANES);
    const Pair both = in_turn(value, left);
    return part ? both.second : both.first;
  }
  static void finish(T* out, Pair sum, float factor, int64_t left) {
    store(out, sum.first * factor, left);
    if (left > LANES) store(out + LANES, sum.second * factor, left - LANES);
  }
};
template <class T>
struct WeighStep<T, int8_t> : ScaledWeighStep<T, int8_t> {};
template <class T>
struct WeighStep<T, e4m3> : ScaledWeighStep<T, e4m3> {};
#if WIDTH == 64
template <>
struct WeighStep<bf16, bf16> {
  static constexpr int64_t POSITIONS = 2;
  typedef bf16 Weight;
  // Interleaves two positions: of every eight dimensions, the first four in one vector and the others in the second.
  // stride: to the second position; 0 if there is none.
  static Pair of_values(const bf16* value, int64_t stride, int64_t left) {
    const __m512i one = Step<bf16>::of_x(value, left),
                  other = stride ? Step<bf16>::of_x(value + stride, left) : __m512i{};
    return {(vf)_mm512_unpacklo_epi16(one, other), (vf)_mm512_unpackhi_epi16(one, other)};
  }
  typedef __m512i Weights;
  static Weights of_weights(const bf16* weights) { return word_of(weights); }
  static Pair add(Pair sum, Pair values, Weights weights) {
    return {add_pairs(sum.first, (__m512i)values.first, weights),
            add_pairs(sum.second, (__m512i)values.second, weights)};
  }
  static void finish(bf16* out, Pair sum, float factor, int64_t left) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 first = (__m512)(sum.first * factor), second = (__m512)(sum.second * factor);
    const __m512bh all =
        _mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(first, high, second), _mm512_permutex2var_ps(first, low, second));
    _mm512_mask_storeu_epi16(out, left >= PAIR ? ~0u : (1u << left) - 1, (__m512i)all);
  }
};
#endif
