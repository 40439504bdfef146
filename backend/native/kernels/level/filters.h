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

inline double sum_of(const float* chunk) {  // in the same order at every level
  double partial[8] = {};
  for (int64_t i = 0; i < CHUNK_SIZE; i += 8)
    for (int64_t j = 0; j < 8; j++) partial[j] += chunk[i + j];
  return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
         ((partial[4] + partial[5]) + (partial[6] + partial[7]));
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

struct End {      // the end of a prefix
  float weight;   // the least weight in it
  int64_t above;  // how many weights are larger
  double mass;    // and their sum
};

// Finds where a prefix of the weights in falling order ends. The prefix has the largest weight, and each further one as
// long as is_kept(number of larger weights, their sum) holds. A radix selection instead of sorting: the bits of
// non-negative floats have the same order as the floats. Weights are counted and summed by the highest digit of their
// bits, then those in the digit where the prefix ends by the next digit; after the last digit, all that are left are
// equal.
template <class IsKept>
End end_of_prefix(const float* weights, int64_t count, float* few, IsKept is_kept) {
  constexpr int DIGIT = 10;  // bits: three digits hold 1.0f and all below it
  struct Bin {
    int64_t count;
    double mass;
  } bins[1 << DIGIT];
  End end = {0, 0, 0};
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
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
      const float weight = weights[i];
      few[left] = weight;
      left += digit(weight) == last;
    }
    weights = few, count = left;
  }
  end.weight = weights[0];
  return end;
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
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < w.chunks; chunk++) {
    if (w.highest[chunk] < bound) continue;
    for (int64_t i = chunk * CHUNK_SIZE; i < (chunk + 1) * CHUNK_SIZE; i++) {
      const float weight = w.each[i];
      w.some[count] = weight;
      count += weight >= bound;
    }
  }

  float threshold = bound;
  double left = w.total;  // the sum of what the other filters keep, which top-p refers to
  if (has_top_k && top_k < count) {
    const End end = end_of_prefix(w.some, count, w.few, is_of_top_k);
    threshold = end.weight;
    left = end.mass + double(top_k - end.above) * end.weight;
  } else if (has_top_k || has_min_p) {
    left = 0;
    for (int64_t i = 0; i < count; i++) left += w.some[i];
  }
  if (!has_top_p) return threshold;
  const double wanted = top_p * left;
  return end_of_prefix(w.some, count, w.few, [wanted](int64_t, double mass) { return mass < wanted; }).weight;
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
