// Argmax and sampling.

// The highest of `least` and the numbers of a chunk, or NaN if there is one.
template <class T>
float highest_or_nan(const T* chunk, float least) {
  vf highest = all(least);
  vi wrong = {};
  for (int64_t i = 0; i < CHUNK_SIZE; i += LANES) {
    const vf v = load(chunk + i);
    wrong |= v != v;
    highest = max(v, highest);
  }
  float top = least;
  for (int64_t lane = 0; lane < LANES; lane++) {
    top = highest[lane] > top ? highest[lane] : top;
    if (wrong[lane]) top = __builtin_nanf("");
  }
  return top;
}

// The place of a number in a chunk, or of NaN, whichever is first.
template <class T>
int64_t place_of(const T* chunk, float number) {
  for (int64_t i = 0; i < CHUNK_SIZE; i++) {
    const float v = load(chunk + i, 1)[0];
    if (v == number || v != v) return i;
  }
  return 0;
}

template <class T>
int64_t argmax_of(const LogitsRow<T>& row) {
  float top = -__builtin_inff();
  int64_t found = 0;  // the chunk that has the largest number
  for (int64_t chunk = 0; chunk < row.chunks && top == top; chunk++) {
    const float own = row.with(chunk, [top](auto* from) { return highest_or_nan(from, top); });
    if (own == top) continue;
    top = own, found = chunk;
  }
  return found * CHUNK_SIZE + row.with(found, [top](auto* from) { return place_of(from, top); });
}

template <class T>
void argmax(const Argmax& a) {
  parallel_for(a.rows, 1, [&](int64_t t) {
    const Room room(a.size);
    a.chosen[t] = argmax_of(LogitsRow<T>(static_cast<const T*>(a.x) + t * a.size, a.size, room));
  });
}

// The first token up to which the weights of at least `least` sum to more than `share` of `total`, by the sums of
// chunks.
template <class T>
int64_t token_at(const LogitsRow<T>& row, const double* sums, double total, double share, float least) {
  const double point = share * total;
  double before = 0;
  int64_t chunk = 0;
  while (chunk < row.chunks - 1 && !(before + sums[chunk] > point)) before += sums[chunk++];
  float weights[CHUNK_SIZE];
  row.weigh(chunk, weights);
  int64_t last = row.size - 1;  // if rounding puts the point after all of them
  for (int64_t i = 0; i < CHUNK_SIZE; i++) {
    if (!(weights[i] > 0 && weights[i] >= least)) continue;
    last = chunk * CHUNK_SIZE + i;
    before += weights[i];
    if (before > point) break;
  }
  return last;
}

// Applies the penalties of a row to copies of the chunks that have its tokens.
template <class T>
void penalise_row(LogitsRow<T>& row, const Draw& a, int64_t t) {
  const int64_t* const tokens = reinterpret_cast<const int64_t*>(a.occurrences[t]);
  const float* const counts = reinterpret_cast<const float*>(a.occurrences[a.rows + t]);
  const int64_t count = a.occurrences[2 * a.rows + t];
  const float presence = a.penalties[t], frequency = a.penalties[a.rows + t], repetition = a.penalties[2 * a.rows + t];
  for (int64_t i = 0; i < count; i++) {
    float& value = row.copy(tokens[i] / CHUNK_SIZE)[tokens[i] % CHUNK_SIZE];
    value = penalised(value, counts[i], presence, frequency, repetition);
  }
}

template <class T>
int64_t draw_row(const Draw& a, int64_t t) {
  const Room room(a.size);
  LogitsRow<T> row(static_cast<const T*>(a.x) + a.row[t] * a.size, a.size, room);
  if (a.occurrences) penalise_row(row, a, t);
  if (a.temperature[t] == 0) return argmax_of(row);
  row.find_peaks();
  if (__builtin_isinf(row.top)) {  // an infinite logit wins, and if all are -inf, no token may be sampled
    int64_t chunk = 0;
    while (chunk < row.chunks - 1 && row.peaks[chunk] != row.top) chunk++;
    const float top = row.top;
    return min_of(a.size - 1, chunk * CHUNK_SIZE + row.with(chunk, [top](auto* from) { return place_of(from, top); }));
  }
  row.use(a.temperature[t]);
  float least;
  const double total = keep(row, room, Filters(a, t), least);
  return token_at(row, room.sums, total, a.share[t], least);
}

template <class T>
void draw(const Draw& a) {
  parallel_for(a.rows, 1, [&](int64_t t) { a.chosen[t] = draw_row<T>(a, t); });
}
