// Argmax and sampling.

template <class T>
void argmax(const Argmax& a) {
  parallel_for(a.rows, 1, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.x) + t * a.size;
    float top = -__builtin_inff();
    int64_t found = 0;  // the chunk that has the largest number; then the number itself
    for (int64_t begin = 0; begin < a.size; begin += CHUNK_SIZE) {
      const int64_t end = min_of(begin + CHUNK_SIZE, a.size);
      vf highest = all(top);
      vi wrong = {};
      int64_t i = begin;
      for (; i + LANES <= end; i += LANES) {
        const vf v = load(x + i);
        wrong |= v != v;
        highest = max(v, highest);
      }
      float own = top;
      for (int64_t lane = 0; lane < LANES; lane++) {
        own = highest[lane] > own ? highest[lane] : own;
        if (wrong[lane]) own = __builtin_nanf("");
      }
      for (; i < end; i++) {
        const float v = load(x + i, 1)[0];
        if (!(v <= own)) own = v;
      }
      if (own == top) continue;
      top = own, found = begin;
      if (top != top) break;
    }
    while (found + 1 < a.size) {
      const float v = load(x + found, 1)[0];
      if (v == top || v != v) break;
      found++;
    }
    a.chosen[t] = found;
  });
}

inline int64_t draw_row(const Draw& a, int64_t t) {
  const float* x = a.x + a.row[t] * a.size;
  const float top = highest_of(x, a.size);
  if (__builtin_isinf(top)) {  // an infinite logit wins, and if all are -inf, no token may be sampled
    int64_t i = 0;
    while (i < a.size - 1 && x[i] != top) i++;
    return i;
  }
  const bool has_filters = is_filtered(a, t);
  Weights w = weigh(x, a.size, top, a.temperature[t], has_filters);
  if (has_filters) filter(a, t, w);
  const double point = a.share[t] * w.total;
  double before = 0;
  int64_t chunk = 0;
  while (chunk < w.chunks - 1 && !(before + w.sums[chunk] > point)) before += w.sums[chunk++];
  int64_t last = a.size - 1;  // if rounding puts the point after all of them
  for (int64_t i = chunk * CHUNK_SIZE; i < (chunk + 1) * CHUNK_SIZE; i++) {
    if (w.each[i] > 0) last = i;
    before += w.each[i];
    if (before > point) break;
  }
  return last;
}

inline void draw(const Draw& a) {
  parallel_for(a.rows, 1, [&](int64_t t) { a.chosen[t] = draw_row(a, t); });
}
