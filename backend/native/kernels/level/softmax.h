// Scores of one row over consecutive positions, and how they become weights. Numbers of positions are multiples of
// PAIR. A weight is a power of 2: its exponent is the score times a factor, minus the row's highest exponent.

constexpr float LOG2_E = 1.44269504f;

inline float exponent_factor(const Attend& a) { return LOG2_E * (a.softcap ? 1 : float(a.scale)); }

// What a row's exponents are relative to. If it has seen no position, whose exponents are -inf, its weights are zero.
inline float base_of(float highest) { return highest == -__builtin_inff() ? 0 : highest; }
inline vf base_of(vf highest) { return highest == -__builtin_inff() ? vf{} : highest; }

// Prepares scores of which the row sees those from `first` to `last`: caps them, and sets the others to -inf.
inline void prepare_scores(const Attend& a, float* scores, int64_t count, int64_t first, int64_t last) {
  if (a.softcap)
    for (int64_t k = 0; k < count; k += LANES)
      store(scores + k, capped(load(scores + k) * float(a.scale), float(a.softcap)));
  vf lane;
  for (int64_t i = 0; i < LANES; i++) lane[i] = float(i);
  const vf from = all(float(first)), to = all(float(last));
  const auto hide = [&](int64_t k, int64_t end) {
    for (; k < end; k += LANES) {
      const vf position = lane + float(k);
      store(scores + k, (position >= from) & (position <= to) ? load(scores + k) : all(-__builtin_inff()));
    }
  };
  const int64_t before = min_of(count, ceil_div(max_of(first, 0), LANES) * LANES);
  hide(0, before);
  hide(max_of(before, max_of(last + 1, 0) / LANES * LANES), count);
}

inline float highest_score(const float* scores, int64_t count) {
  vf first = all(-__builtin_inff()), second = first;
  for (int64_t k = 0; k < count; k += PAIR) {
    first = max(first, load(scores + k));
    second = max(second, load(scores + k + LANES));
  }
  return highest_of(max(first, second));
}

// Overwrites the scores of positions [from, until) with weights, and adds the weights to sums. A weight takes no more
// memory than a score, so no later score is overwritten. T: what the model computes in.
template <class T, class Weight>
inline void to_weights(float* scores, int64_t from, int64_t until, float factor, float base, Pair& sums) {
  Weight* const weights = reinterpret_cast<Weight*>(scores);
  for (int64_t k = from; k < until; k += PAIR) {
    const vf first = exp2<T>(load(scores + k) * factor - base);
    const vf second = exp2<T>(load(scores + k + LANES) * factor - base);
    store(weights + k, first);
    store(weights + k + LANES, second);
    sums.first += first, sums.second += second;
  }
}
// All of `count` scores. Returns the sums of weights.
template <class T, class Weight>
inline vf to_weights(float* scores, int64_t count, float factor, float base) {
  Pair sums = {};
  to_weights<T, Weight>(scores, 0, count, factor, base, sums);
  return sums.first + sums.second;
}
