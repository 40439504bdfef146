// Tokens from logits.

template <class T>
void argmax(const Argmax& a) {
  share(a.rows, 1, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.x) + t * a.size;
    float top = -__builtin_inff();
    int64_t found = 0;  // where those begin among which the largest is
    for (int64_t begin = 0; begin < a.size; begin += LOOKED_AT) {
      const int64_t end = least(begin + LOOKED_AT, a.size);
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

inline int64_t drawn(const Draw& a, int64_t t) {
  const float* x = a.x + a.row[t] * a.size;
  const float top = highest_of(x, a.size);
  if (__builtin_isinf(top)) {  // nothing can be said of the others, or there is nothing that may be drawn
    int64_t i = 0;
    while (i < a.size - 1 && x[i] != top) i++;
    return i;
  }
  Weights w = weigh(x, a.size, top, a.temperature[t]);
  if (is_filtered(a, t)) filter(a, t, w);
  const double point = a.share[t] * w.total;
  double before = 0;
  int64_t chunk = 0;
  while (chunk < w.chunks - 1 && !(before + w.sums[chunk] > point)) before += w.sums[chunk++];
  int64_t last = a.size - 1;  // in case that rounding leaves the point behind all of them
  for (int64_t i = chunk * LOOKED_AT; i < (chunk + 1) * LOOKED_AT; i++) {
    if (w.each[i] > 0) last = i;
    before += w.each[i];
    if (before > point) break;
  }
  return last;
}

inline void draw(const Draw& a) {
  share(a.rows, 1, [&](int64_t t) { a.chosen[t] = drawn(a, t); });
}
