// The sampling filters top-k, top-p and min-p. Tokens are ranked by their weights, exp((x - top) / temperature) in
// float32: at most 1, and 1 for the most likely. Each filter keeps a prefix of the tokens in falling order, so all
// filters together keep the shortest prefix, and it is enough to know the least weight in it. Equal weights are kept or
// dropped together.

constexpr int64_t CHUNK_SIZE =
    256;  // numbers of a row that are summarised (sum, maximum) before single ones are searched

inline float highest_of(const float* x, int64_t size) {
  vf highest = all(-__builtin_inff());
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) highest = max(load(x + i), highest);
  float top = -__builtin_inff();
  for (int64_t lane = 0; lane < LANES; lane++) top = highest[lane] > top ? highest[lane] : top;
  for (; i < size; i++) top = x[i] > top ? x[i] : top;
  return top;
}

constexpr int64_t EIGHTHS = 8;
inline void highest_of_eighths(const float* chunk, float* to) {  // one of eight is every eighth number
  float highest[EIGHTHS] = {};
  for (int64_t i = 0; i < CHUNK_SIZE; i += EIGHTHS)
    for (int64_t j = 0; j < EIGHTHS; j++) highest[j] = chunk[i + j] > highest[j] ? chunk[i + j] : highest[j];
  __builtin_memcpy(to, highest, sizeof highest);
}

struct EightSums {  // eight of them, so that they are added in the same order at every level
  double partial[8] = {};
  double total() const {
    return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
           ((partial[4] + partial[5]) + (partial[6] + partial[7]));
  }
};
inline double sum_of(const float* chunk) {
  EightSums sums;
  for (int64_t i = 0; i < CHUNK_SIZE; i += 8)
    for (int64_t j = 0; j < 8; j++) sums.partial[j] += chunk[i + j];
  return sums.total();
}
inline double sum_above(const float* x, int64_t size, float least) {  // of the numbers above `least`
  EightSums sums;
  int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (int64_t j = 0; j < 8; j++) sums.partial[j] += x[i + j] > least ? x[i + j] : 0;
  for (; i < size; i++) sums.partial[0] += x[i] > least ? x[i] : 0;
  return sums.total();
}

#if WIDTH == 32 && defined(__AVX2__)
struct Places {  // [mask]: the lanes whose bits are set, first
  uint8_t lanes[256][8];
  constexpr Places() : lanes() {
    for (int mask = 0; mask < 256; mask++)
      for (int lane = 0, next = 0; lane < 8; lane++)
        if (mask >> lane & 1) lanes[mask][next++] = lane;
  }
};
constexpr Places PLACES;
#endif

// Copies the numbers from `low` to `high`, both included, and returns how many there are. `to` may be `x`, and has room
// for `size` numbers. A multiple of LANES is copied without a branch, since the processor could not predict it.
inline int64_t copy_range(const float* x, int64_t size, float low, float high, float* to) {
  int64_t count = 0, i = 0;
#if WIDTH == 64 && defined(__AVX512F__)
  for (; i + LANES <= size; i += LANES) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 mask = _mm512_cmp_ps_mask(v, _mm512_set1_ps(low), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask(v, _mm512_set1_ps(high), _CMP_LE_OQ);
    _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(mask, v));
    count += __builtin_popcount(mask);
  }
#elif WIDTH == 32 && defined(__AVX2__)
  for (; i + LANES <= size; i += LANES) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m256 is_in_range = _mm256_and_ps(_mm256_cmp_ps(v, _mm256_set1_ps(low), _CMP_GE_OQ),
                                             _mm256_cmp_ps(v, _mm256_set1_ps(high), _CMP_LE_OQ));
    const int mask = _mm256_movemask_ps(is_in_range);
    const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(PLACES.lanes[mask]));
    _mm256_storeu_ps(to + count, _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(lanes)));
    count += __builtin_popcount(mask);
  }
#endif
  for (; i < size; i++) {
    const float v = x[i];
    to[count] = v;
    count += (v >= low) & (v <= high);
  }
  return count;
}

struct Weights {  // of a row, in chunks of CHUNK_SIZE
  int64_t chunks;
  float* each;     // 0 for NaN, and after the end of the row
  float* highest;  // [chunks]
  double* sums;    // [chunks]
  double total;
  float *some, *few;  // two buffers of the same size
};

// has_filters: whether `highest` is needed.
inline Weights weigh(const float* x, int64_t size, float top, float temperature, bool has_filters) {
  const int64_t chunks = ceil_div(size, CHUNK_SIZE), count = chunks * CHUNK_SIZE;
  float* each =
      static_cast<float*>(thread_scratch.get(count * 3 * sizeof(float) + chunks * (sizeof(double) + sizeof(float))));
  double* sums = reinterpret_cast<double*>(each + 3 * count);
  Weights w = {chunks, each, reinterpret_cast<float*>(sums + chunks), sums, 0, each + count, each + 2 * count};
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const int64_t begin = chunk * CHUNK_SIZE, end = min_of(begin + CHUNK_SIZE, size);
    for (int64_t i = begin; i < end; i += LANES) {
      const vf weight = exp((load(x + i, size - i) - top) / temperature);
      store(each + i, weight > 0 ? weight : vf{});
    }
    for (int64_t i = end; i < begin + CHUNK_SIZE; i++) each[i] = 0;
    if (has_filters) w.highest[chunk] = highest_of(each + begin, CHUNK_SIZE);
    w.total += sums[chunk] = sum_of(each + begin);
  }
  return w;
}

struct End {          // the end of a prefix
  float weight = 0;   // the least weight in it
  int64_t above = 0;  // how many weights are larger
  double mass = 0;    // and their sum
};

inline bool are_equal(const float* weights, int64_t count) {
  int64_t i = 0;
  while (i < count && weights[i] == weights[0]) i++;
  return i == count;
}

// Finds where a prefix of the weights in falling order ends. The prefix has the largest weight, and each further one as
// long as is_kept(number of larger weights, their sum) holds. A radix selection instead of sorting: the bits of
// non-negative floats have the same order as the floats. Weights are counted and summed by the highest digit of their
// bits, then those in the digit where the prefix ends by the next digit; after the last digit, all that are left are
// equal. `end`: what is known to be larger than these weights, and in the prefix.
template <class IsKept>
End end_of_prefix(const float* weights, int64_t count, float* few, IsKept is_kept, End end = {}) {
  constexpr int DIGIT = 10;  // bits: three digits hold 1.0f and all below it
  struct Bin {
    int64_t count;
    double mass;
  } bins[1 << DIGIT];
  if (are_equal(weights, count)) {  // each would wait for the one before it, whose bin is the same
    end.weight = weights[0];
    return end;
  }
  const auto float_of = [](uint32_t bits) {
    float weight;
    __builtin_memcpy(&weight, &bits, 4);
    return weight;
  };
  uint32_t prefix = 0;
  for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
    const auto digit = [shift](float weight) {
      uint32_t bits;
      __builtin_memcpy(&bits, &weight, 4);
      return bits >> shift & ((1 << DIGIT) - 1);
    };
    __builtin_memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < count; i++) {
      Bin& bin = bins[digit(weights[i])];
      bin.count++, bin.mass += weights[i];
    }
    uint32_t last = (1 << DIGIT) - 1;
    while (!bins[last].count) last--;
    for (uint32_t next = last; next-- > 0;) {
      if (!bins[next].count) continue;
      const int64_t above = end.above + bins[last].count;
      const double mass = end.mass + bins[last].mass;
      if (!is_kept(above, mass)) break;
      last = next, end.above = above, end.mass = mass;
    }
    prefix |= last << shift;
    count = copy_range(weights, count, float_of(prefix), float_of(prefix | ((1u << shift) - 1)), few);
    weights = few;
  }
  end.weight = weights[0];
  return end;
}

// The least weight of the shortest prefix whose sum is at least `wanted`. `total`: the sum of all weights. `bound`: the
// result is not below it.
//
// Counting takes longest for many weights that are about equal, as those of a model that is not sure: each waits for
// the one before it, which has changed the same bin. So a sample tells a range in which the prefix ends nearly
// certainly. Larger weights are only summed, and smaller ones are not looked at. If the prefix ends elsewhere, all are
// counted.
inline float end_of_mass(const float* weights, int64_t count, float* few, double total, double wanted, float bound) {
  constexpr int64_t SAMPLE = 4096, MANY = 4 * SAMPLE;
  constexpr double DEVIATIONS = 3, MAX_ERROR = 0.1;
  const auto is_kept = [wanted](int64_t, double mass) { return mass < wanted; };
  if (count >= MANY && !are_equal(weights, count)) {
    double mass = 0, squares = 0;
    for (int64_t i = 0; i < SAMPLE; i++) {
      const double weight = few[i] = weights[count * i / SAMPLE];
      mass += weight, squares += weight * weight;
    }
    const double share = wanted / total;
    const double error = DEVIATIONS * __builtin_sqrt(share * (1 - share) * squares) / mass;  // of the sample's shares
    if (error < MAX_ERROR) {
      const auto end_of_share = [&](double part) {
        return end_of_prefix(few, SAMPLE, few + SAMPLE, [=](int64_t, double sum) { return sum < part * mass; }).weight;
      };
      const float high = end_of_share(share - error), low = share + error < 1 ? end_of_share(share + error) : bound;
      End above;
      above.mass = sum_above(weights, count, high);
      const int64_t left = copy_range(weights, count, low, high, few);
      if (above.mass < wanted && above.mass + sum_above(few, left, -1) >= wanted)
        return end_of_prefix(few, left, few, is_kept, above).weight;
    }
  }
  count = copy_range(weights, count, bound, __builtin_inff(), few);
  return end_of_prefix(few, count, few, is_kept).weight;
}

// The weight of the last token that all filters keep. `top_p` refers to the sum of what the other filters keep; of
// equal weights at the end of top-k, that sum includes only as many as top-k says.
inline float least_kept(const Draw& a, int64_t t, const Weights& w) {
  const int64_t top_k = a.top_k[t];
  const float top_p = a.top_p[t], min_p = a.min_p[t];
  const bool has_top_k = top_k < a.size, has_min_p = min_p > 0, has_top_p = top_p < 1;
  const auto is_of_top_k = [top_k](int64_t above, double) { return above < top_k; };

  // A lower bound, so that weights that are certainly dropped need not be counted. With top-k: at least k chunks (or
  // eighths of chunks) have a weight of at least the bound. With top-p alone: all weights below the bound sum to less
  // than half of what top-p drops, whatever the rounding.
  float bound = min_p;
  if (has_top_k && top_k <= w.chunks) {
    const float highest = end_of_prefix(w.highest, w.chunks, w.few, is_of_top_k).weight;
    bound = highest > bound ? highest : bound;
  } else if (has_top_k && top_k <= w.chunks * EIGHTHS) {
    for (int64_t chunk = 0; chunk < w.chunks; chunk++)
      highest_of_eighths(w.each + chunk * CHUNK_SIZE, w.some + chunk * EIGHTHS);
    const float highest = end_of_prefix(w.some, w.chunks * EIGHTHS, w.few, is_of_top_k).weight;
    bound = highest > bound ? highest : bound;
  } else if (!has_top_k && !has_min_p) {
    bound = (1 - double(top_p)) * w.total / (2 * a.size);
  }
  if (!has_top_k && !has_top_p) return bound;
  int64_t in_use = 0;
  for (int64_t chunk = 0; chunk < w.chunks; chunk++) in_use += w.highest[chunk] >= bound;
  if (!has_top_k && !has_min_p && 2 * in_use > w.chunks)  // smaller weights do no harm
    return end_of_mass(w.each, a.size, w.few, w.total, top_p * w.total, bound);
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < w.chunks; chunk++) {
    if (w.highest[chunk] < bound) continue;
    count += copy_range(w.each + chunk * CHUNK_SIZE, CHUNK_SIZE, bound, __builtin_inff(), w.some + count);
  }

  float threshold = bound;
  double left = w.total;  // the sum of what the other filters keep, which top-p refers to
  if (has_top_k && top_k < count) {
    const End end = end_of_prefix(w.some, count, w.few, is_of_top_k);
    threshold = end.weight;
    left = end.mass + double(top_k - end.above) * end.weight;
  } else if (has_top_k || has_min_p) {
    left = sum_above(w.some, count, -1);
  }
  if (!has_top_p) return threshold;
  return end_of_mass(w.some, count, w.few, left, top_p * left, threshold);
}

inline bool is_filtered(const Draw& a, int64_t t) {
  return a.top_k && (a.top_k[t] < a.size || a.top_p[t] < 1 || a.min_p[t] > 0);
}

// Sets the weights of dropped tokens to zero.
inline void filter(const Draw& a, int64_t t, Weights& w) {
  const float threshold = least_kept(a, t, w);
  w.total = 0;
  for (int64_t chunk = 0; chunk < w.chunks; chunk++) {
    w.sums[chunk] = 0;
    if (w.highest[chunk] < threshold) continue;
    float* each = w.each + chunk * CHUNK_SIZE;
    for (int64_t i = 0; i < CHUNK_SIZE; i += LANES) {
      const vf weight = load(each + i);
      store(each + i, weight >= threshold ? weight : vf{});
    }
    w.total += w.sums[chunk] = sum_of(each);
  }
}
