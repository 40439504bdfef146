// The weights of a row of logits, exp((x - top) / temperature) in float32: at most 1, and 1 for the most likely token.
//
// A row is read in chunks. Their highest logits are found first, so that filters need the exponentials of few chunks.
// Weights are not kept: recomputing those of one chunk takes less time than writing those of all.

constexpr int64_t CHUNK_SIZE = 256;
constexpr int64_t COLUMNS = 16;  // of a chunk: a column is every sixteenth number

inline double sum_of_columns(const vf (&columns)[COLUMNS / LANES]) {
  float numbers[COLUMNS];
  for (int64_t i = 0; i < COLUMNS / LANES; i++) store(numbers + i * LANES, columns[i]);
  double sums[COLUMNS / 2];
  for (int64_t i = 0; i < COLUMNS / 2; i++) sums[i] = double(numbers[i]) + numbers[i + COLUMNS / 2];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
// The sum of part(number) of a chunk's numbers, in the same order at every level: those of a column are added as a
// balanced tree in float32, which rounds four times, and the columns in float64.
template <class Part>
inline double sum_of(const float* chunk, Part part) {
  constexpr int64_t EACH = CHUNK_SIZE / COLUMNS;
  vf columns[COLUMNS / LANES];
  unroll<COLUMNS / LANES>([&](auto column) __attribute__((always_inline)) {
    vf parts[EACH];
    unroll<EACH>([&](auto i)
                     __attribute__((always_inline)) { parts[i] = part(load(chunk + i * COLUMNS + column * LANES)); });
    unroll<EACH / 2>([&](auto i) __attribute__((always_inline)) { parts[i] = parts[2 * i] + parts[2 * i + 1]; });
    unroll<EACH / 4>([&](auto i) __attribute__((always_inline)) { parts[i] = parts[2 * i] + parts[2 * i + 1]; });
    columns[column] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  });
  return sum_of_columns(columns);
}
inline double sum_of(const float* chunk) {
  return sum_of(chunk, [](vf v) { return v; });
}

struct Room {                          // a thread's memory for one row
  float* peaks;                        // [chunks]
  double* sums;                        // [chunks]: of weights
  int64_t* ends;                       // [chunks]: where the chunk's part of `some` ends
  float** copies;                      // [chunks]
  float *some, *few, *fewer, *copied;  // [chunks * CHUNK_SIZE] each; reading LANES after the end is safe
  explicit Room(int64_t size) {
    const int64_t chunks = ceil_div(size, CHUNK_SIZE), count = chunks * CHUNK_SIZE;
    sums = static_cast<double*>(thread_scratch.get(count * 4 * sizeof(float) + chunks * 28 + 2 * WIDTH));
    ends = reinterpret_cast<int64_t*>(sums + chunks);
    copies = reinterpret_cast<float**>(ends + chunks);
    some = reinterpret_cast<float*>(copies + chunks);
    few = some + count, fewer = few + count, copied = fewer + count, peaks = copied + count;
  }
};

// A row of logits in chunks. Some chunks are copies in float32: the last one, if the row ends within it, since it has
// -inf after the end; and those with penalties. So a row of bfloat16 is read as it is.
template <class T>
struct LogitsRow {
  const T* x;
  int64_t size, chunks;
  float** copies;    // [chunks]; null: not copied
  float* next;       // where there is room for the next copy
  float* peaks;      // [chunks]: the highest logit of each chunk, and after `use` its weight
  float top, scale;  // the highest logit; a weight is 2 to the power of scale * (logit - top)

  LogitsRow(const T* logits, int64_t count, const Room& room)
      : x(logits),
        size(count),
        chunks(ceil_div(count, CHUNK_SIZE)),
        copies(room.copies),
        next(room.copied),
        peaks(room.peaks) {
    __builtin_memset(copies, 0, chunks * sizeof *copies);
    if (size % CHUNK_SIZE) copy(chunks - 1);
  }
  float* copy(int64_t index) {  // of a chunk, which can be changed
    if (copies[index]) return copies[index];
    float* const to = copies[index] = next;
    next += CHUNK_SIZE;
    const T* const from = x + index * CHUNK_SIZE;
    const int64_t count = min_of(CHUNK_SIZE, size - index * CHUNK_SIZE);
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i));
    for (int64_t i = count; i < CHUNK_SIZE; i++) to[i] = -__builtin_inff();
    return to;
  }
  template <class F>
  auto with(int64_t index, F f) const {  // calls f with the numbers of a chunk, which may be copies
    return copies[index] ? f(static_cast<const float*>(copies[index])) : f(x + index * CHUNK_SIZE);
  }
  void find_peaks() {
    top = -__builtin_inff();
    for (int64_t i = 0; i < chunks; i++) {
      peaks[i] = with(i, [](auto* from) { return peak_of(from); });
      top = peaks[i] > top ? peaks[i] : top;
    }
  }
  template <class U>
  static float peak_of(const U* chunk) {  // -inf if all are NaN
    vf even = all(-__builtin_inff()), odd = even;
    for (int64_t i = 0; i < CHUNK_SIZE; i += PAIR) {
      const Pair pair = pair_of(chunk + i);
      even = max(pair.first, even), odd = max(pair.second, odd);
    }
    return highest_of(max(even, odd));
  }
  // Sets the temperature of the weights, after `find_peaks`. The highest logit must be finite.
  void use(float temperature) {
    scale = 1.44269504f / temperature;
    for (int64_t i = 0; i < chunks; i += LANES) store(peaks + i, weight(load(peaks + i, chunks - i)), chunks - i);
  }
  vf weight(vf logit) const {  // 0 for NaN
    const vf power = exp2<float>((logit - top) * scale);
    return power > 0 ? power : vf{};
  }
  void weigh(int64_t index, float* to) const {  // the weights of a chunk
    with(index, [&](auto* from) {
      for (int64_t i = 0; i < CHUNK_SIZE; i += LANES) store(to + i, weight(load(from + i)));
    });
  }
  // Whether a chunk may have a weight of at least `least`, above 0. Rounding may make the weight of a lower logit the
  // larger one of the two by a unit in the last place.
  bool reaches(int64_t index, float least) const { return peaks[index] >= lowered(least) && peaks[index] > 0; }
  static float lowered(float weight) { return weight * (1 - 0x1p-20f); }
};
