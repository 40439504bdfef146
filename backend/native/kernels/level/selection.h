// Selection among weights: where a prefix of them in falling order ends.

inline double sum_above(const float* x, int64_t size, float least) {  // of the numbers above `least`
  double sums[8] = {};  // eight of them, so that they are added in the same order at every level
  int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (int64_t j = 0; j < 8; j++) sums[j] += x[i + j] > least ? x[i + j] : 0;
  for (; i < size; i++) sums[0] += x[i] > least ? x[i] : 0;
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
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

struct End {          // the end of a prefix
  float weight = 0;   // the least weight in it
  int64_t above = 0;  // how many weights are larger
  double mass = 0;    // and their sum
};

inline bool are_equal(const float* weights, int64_t count) {  // weights are never -0 or NaN
  return count < 2 || !__builtin_memcmp(weights, weights + 1, (count - 1) * sizeof(float));
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

// Counting takes longest if many weights are about equal, as those of a model that is not sure: each waits for the one
// before it, which has changed the same bin. So a range in which a prefix nearly certainly ends is found first, by sums
// in float32 of vectors. Larger weights are then only summed, and smaller ones are not looked at.
struct Range {
  float low, high;  // both included
};

inline Range range_of(const float* weights, int64_t count) {  // the least and the largest
  vf low = all(__builtin_inff()), high = vf{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const vf v = load(weights + i);
    low = -max(-low, -v), high = max(high, v);
  }
  Range range = {-highest_of(-low), highest_of(high)};
  for (; i < count; i++) {
    range.low = weights[i] < range.low ? weights[i] : range.low;
    range.high = weights[i] > range.high ? weights[i] : range.high;
  }
  return range;
}

// Where the sum of the weights in falling order reaches `wanted`, by halving the interval of the bits, which have the
// same order as non-negative floats. The bounds differ by 2^-steps of its length. Sets weights after the end to 0.
inline Range bisect(float* weights, int64_t count, double wanted, Range range, int steps) {
  for (int64_t i = count; i % PAIR; i++) weights[i] = 0;
  uint32_t low, high;
  __builtin_memcpy(&low, &range.low, 4), __builtin_memcpy(&high, &range.high, 4);
  for (int step = 0; step < steps && high - low > 1; step++) {
    const uint32_t middle = low + (high - low) / 2;
    float least;
    __builtin_memcpy(&least, &middle, 4);
    vf even{}, odd{};
    for (int64_t i = 0; i < count; i += PAIR) {
      const vf first = load(weights + i), second = load(weights + i + LANES);
      even += first >= least ? first : vf{}, odd += second >= least ? second : vf{};
    }
    (sum(even + odd) >= wanted ? low : high) = middle;
  }
  __builtin_memcpy(&range.low, &low, 4), __builtin_memcpy(&range.high, &high, 4);
  return range;
}

constexpr int64_t SAMPLE = 4096, MANY = 4 * SAMPLE;  // weights of a sample, and of how many it is taken at least

// The range in which a prefix ends that has a share of the sum of many weights, by a sample of them. False if the
// sample does not tell.
inline bool range_of_share(float* sample, double share, Range& range) {
  constexpr double DEVIATIONS = 3, MAX_ERROR = 0.1;
  constexpr int STEPS = 14;
  constexpr Range ALL = {0x1p-32f, 1};
  double mass = 0, squares = 0;
  float squared[CHUNK_SIZE];
  for (int64_t chunk = 0; chunk < SAMPLE; chunk += CHUNK_SIZE) {
    for (int64_t i = 0; i < CHUNK_SIZE; i++) squared[i] = sample[chunk + i] * sample[chunk + i];
    mass += sum_of(sample + chunk), squares += sum_of(squared);
  }
  const double error = DEVIATIONS * __builtin_sqrt(share * (1 - share) * squares) / mass;  // of the sample's shares
  if (!(error < MAX_ERROR)) return false;
  range.high = bisect(sample, SAMPLE, (share - error) * mass, ALL, STEPS).high;
  const float least = (1 - share) * mass / (2 * SAMPLE);  // smaller ones sum to less than half of what is dropped
  range.low = share + error < 1 ? bisect(sample, SAMPLE, (share + error) * mass, ALL, STEPS).low : least;
  return true;
}

// The least weight of the shortest prefix whose sum is at least `wanted`, of which `above` are larger weights than
// these. total: the sum of these. Changes `few`, which has room for as many.
inline float end_of_mass(const float* weights, int64_t count, float* few, double total, double wanted,
                         double above = 0) {
  constexpr int64_t SOME = 512;
  constexpr int STEPS = 8;
  const auto is_kept = [wanted](int64_t, double mass) { return mass < wanted; };
  const float* left = weights;
  int64_t size = count;
  End larger;
  larger.mass = above;
  const auto narrow = [&](Range range) {  // false if the prefix does not end in the range
    larger.mass += sum_above(left, size, range.high);
    size = copy_range(left, size, range.low, range.high, few), left = few;
    return larger.mass < wanted && larger.mass + sum_above(few, size, -1) >= wanted;
  };
  bool is_found = !are_equal(weights, count);
  if (is_found && count >= MANY) {
    for (int64_t i = 0; i < SAMPLE; i++) few[i] = weights[count * i / SAMPLE];
    Range range;
    is_found = range_of_share(few, (wanted - above) / total, range) && narrow(range);
  }
  if (is_found && size >= SOME && size < MANY) {
    if (left == weights) __builtin_memcpy(few, weights, size * sizeof(float)), left = few;
    is_found = narrow(bisect(few, size, wanted - larger.mass, range_of(few, size), STEPS));
  }
  if (is_found) return end_of_prefix(left, size, few, is_kept, larger).weight;
  larger.mass = above;
  return end_of_prefix(weights, count, few, is_kept, larger).weight;
}
