// Log-probabilities: of one token of each row, and of the likeliest.

struct Candidate {
  float logit;
  int64_t index;
};

// Whether it is the likelier: as in `argmax`, what is no number before all others, and the first of equals.
inline bool precedes(Candidate a, Candidate b) {
  if (a.logit > b.logit || a.logit < b.logit) return a.logit > b.logit;
  const bool is_number = a.logit == a.logit, other_is_number = b.logit == b.logit;
  return is_number == other_is_number ? a.index < b.index : other_is_number;
}

struct Shortlist {  // of all that it is offered, those that precede the others, in order
  Candidate* first;
  int64_t room, count;
  void offer(Candidate candidate) {
    if (count == room && !precedes(candidate, first[room - 1])) return;
    int64_t place = count < room ? count++ : room - 1;
    for (; place > 0 && precedes(candidate, first[place - 1]); place--) first[place] = first[place - 1];
    first[place] = candidate;
  }
};

// The highest of LOOKED_AT logits, and no number if one of them is none. Those above `own` are counted lane by lane.
inline float peak_of(const float* chunk, float own, vi& larger) {
  vf most = all(-__builtin_inff());
  vi wrong = {};
  for (int64_t i = 0; i < LOOKED_AT; i += LANES) {
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

struct Standing {  // of one logit in its row
  double log_sum;  // log(sum(exp(x))); no number where a logit is none or inf, and where all are -inf
  int64_t larger;  // logits
};

// At one look at the row, of which the peaks of all chunks are left. Exponentials are relative to the highest logit so
// far, and summed in double precision: `log_sum` is within 1e-6 of the truth.
inline Standing standing_of(float own, const float* x, int64_t size, float* peaks) {
  constexpr float INF = __builtin_inff();
  float top = -INF, rest[LOOKED_AT], weights[LOOKED_AT];
  double total = 0;
  vi larger = {};
  for (int64_t begin = 0; begin < size; begin += LOOKED_AT) {
    const float* chunk = x + begin;
    if (begin + LOOKED_AT > size) {
      for (float& each : rest) each = -INF;
      __builtin_memcpy(rest, chunk, (size - begin) * sizeof(float));
      chunk = rest;
    }
    const float peak = peaks[begin / LOOKED_AT] = peak_of(chunk, own, larger);
    if (peak == -INF) continue;
    if (peak > top || peak != peak) {
      total *= __builtin_exp(double(top) - peak);
      top = peak;
    }
    for (int64_t i = 0; i < LOOKED_AT; i += LANES) store(weights + i, exp(load(chunk + i) - top));
    total += sum_of(weights);
  }
  const bool is_finite = top > -INF && top < INF;
  Standing standing = {is_finite ? top + __builtin_log(total) : __builtin_nan(""), 0};
  for (int64_t lane = 0; lane < LANES; lane++) standing.larger += larger[lane];
  return standing;
}

inline void logprobs_of_row(const Logprobs& a, int64_t t) {
  const float* x = a.x + (a.row ? a.row[t] : t) * a.size;
  const float own = x[a.token[t]];
  const int64_t chunks = ceil_div(a.size, LOOKED_AT), looked_into = least(a.top, chunks);
  Candidate* room =
      static_cast<Candidate*>(own_scratch.get((looked_into + a.top) * sizeof(Candidate) + chunks * sizeof(float)));
  float* peaks = reinterpret_cast<float*>(room + looked_into + a.top);
  const Standing standing = standing_of(own, x, a.size, peaks);
  a.logprob[t] = own - standing.log_sum;
  a.rank[t] = standing.larger + 1;
  if (!a.top) return;

  // The first so many tokens stand in as many chunks at most, those whose peaks come first: behind these peaks come all
  // tokens of any other chunk.
  Shortlist found = {room, looked_into, 0}, likeliest = {room + looked_into, a.top, 0};
  for (int64_t chunk = 0; chunk < chunks; chunk++) found.offer({peaks[chunk], chunk});
  for (int64_t i = 0; i < found.count; i++) {
    const int64_t begin = found.first[i].index * LOOKED_AT, end = least(begin + LOOKED_AT, a.size);
    for (int64_t token = begin; token < end; token++) likeliest.offer({x[token], token});
  }
  for (int64_t i = 0; i < a.top; i++) {
    a.top_token[t * a.top + i] = likeliest.first[i].index;
    a.top_logprob[t * a.top + i] = likeliest.first[i].logit - standing.log_sum;
  }
}

inline void logprobs(const Logprobs& a) {
  share(a.rows, 1, [&](int64_t t) { logprobs_of_row(a, t); });
}
