// Log-probabilities of one token of each row and of the most likely ones.

struct Candidate {
  float logit;
  int64_t index;
};

// Whether a is more likely than b. As in `argmax`, NaN comes first, and of equals the lower index.
inline bool precedes(Candidate a, Candidate b) {
  if (a.logit > b.logit || a.logit < b.logit) return a.logit > b.logit;
  const bool is_number = a.logit == a.logit, other_is_number = b.logit == b.logit;
  return is_number == other_is_number ? a.index < b.index : other_is_number;
}

struct Shortlist {  // the first `room` of all candidates that it is offered, in order
  Candidate* first;
  int64_t room, count;
  void offer(Candidate candidate) {
    if (count == room && !precedes(candidate, first[room - 1])) return;
    int64_t place = count < room ? count++ : room - 1;
    for (; place > 0 && precedes(candidate, first[place - 1]); place--) first[place] = first[place - 1];
    first[place] = candidate;
  }
};

// The highest of CHUNK_SIZE logits, or NaN if there is one. Adds the number of logits above `own` to `larger`, per
// lane.
inline float peak_of(const float* chunk, float own, vi& larger) {
  vf most = all(-__builtin_inff());
  vi wrong = {};
  for (int64_t i = 0; i < CHUNK_SIZE; i += LANES) {
    const vf v = load(chunk + i);
    most = max(v, most);
    wrong |= v != v;
    larger -= v > all(own);
  }
  float peak = -__builtin_inff();
  for (int64_t lane = 0; lane < LANES; lane++) {
    peak = most[lane] > peak ? most[lane] : peak;
    if (wrong[lane]) peak = __builtin_nanf("");
  }
  return peak;
}

struct RowStats {
  double log_sum;  // log(sum(exp(x))); NaN if a logit is NaN or inf, or if all are -inf
  int64_t larger;  // number of logits above the token's own
};

// Reads the row once and writes the highest logit of each chunk to `peaks`. Exponentials are relative to the highest
// logit so far, and chunks are summed in double precision: `log_sum` is exact within 1e-6.
inline RowStats row_stats(float own, const float* x, int64_t size, float* peaks) {
  constexpr float INF = __builtin_inff();
  float top = -INF, rest[CHUNK_SIZE], weights[CHUNK_SIZE];
  double total = 0;
  vi larger = {};
  for (int64_t begin = 0; begin < size; begin += CHUNK_SIZE) {
    const float* chunk = x + begin;
    if (begin + CHUNK_SIZE > size) {
      for (float& each : rest) each = -INF;
      __builtin_memcpy(rest, chunk, (size - begin) * sizeof(float));
      chunk = rest;
    }
    const float peak = peaks[begin / CHUNK_SIZE] = peak_of(chunk, own, larger);
    if (peak == -INF) continue;
    if (peak > top || peak != peak) {
      total *= __builtin_exp(double(top) - peak);
      top = peak;
    }
    for (int64_t i = 0; i < CHUNK_SIZE; i += LANES) store(weights + i, exp(load(chunk + i) - top));
    total += sum_of(weights);
  }
  const bool is_finite = top > -INF && top < INF;
  RowStats stats = {is_finite ? top + __builtin_log(total) : __builtin_nan(""), 0};
  for (int64_t lane = 0; lane < LANES; lane++) stats.larger += larger[lane];
  return stats;
}

inline void logprobs_of_row(const Logprobs& a, int64_t t) {
  const float* x = a.x + (a.row ? a.row[t] : t) * a.size;
  const float own = x[a.token[t]];
  const int64_t chunks = ceil_div(a.size, CHUNK_SIZE), num_searched = min_of(a.top, chunks);
  Candidate* room =
      static_cast<Candidate*>(thread_scratch.get((num_searched + a.top) * sizeof(Candidate) + chunks * sizeof(float)));
  float* peaks = reinterpret_cast<float*>(room + num_searched + a.top);
  const RowStats stats = row_stats(own, x, a.size, peaks);
  a.logprob[t] = own - stats.log_sum;
  a.rank[t] = stats.larger + 1;
  if (!a.top) return;

  // The `top` most likely tokens are in the `top` chunks with the highest peaks: every token of another chunk is less
  // likely than all these peaks.
  Shortlist found = {room, num_searched, 0}, likeliest = {room + num_searched, a.top, 0};
  for (int64_t chunk = 0; chunk < chunks; chunk++) found.offer({peaks[chunk], chunk});
  for (int64_t i = 0; i < found.count; i++) {
    const int64_t begin = found.first[i].index * CHUNK_SIZE, end = min_of(begin + CHUNK_SIZE, a.size);
    for (int64_t token = begin; token < end; token++) likeliest.offer({x[token], token});
  }
  for (int64_t i = 0; i < a.top; i++) {
    a.top_token[t * a.top + i] = likeliest.first[i].index;
    a.top_logprob[t * a.top + i] = likeliest.first[i].logit - stats.log_sum;
  }
}

inline void logprobs(const Logprobs& a) {
  parallel_for(a.rows, 1, [&](int64_t t) { logprobs_of_row(a, t); });
}
