// Tokens from logits.

constexpr int64_t LOOKED_AT = 256;  // logits that are taken together, before it is asked which of them it is

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

inline void draw(const Draw& a) {
  share(a.rows, 1, [&](int64_t t) {
    const float *x = a.x + t * a.size, temperature = a.temperature[t];
    const int64_t chunks = ceil_div(a.size, LOOKED_AT);
    double* sums = static_cast<double*>(own_scratch.get(chunks * (sizeof(double) + LOOKED_AT * sizeof(float))));
    float* weights = reinterpret_cast<float*>(sums + chunks);
    vf highest = all(-__builtin_inff());
    int64_t i = 0;
    for (; i + LANES <= a.size; i += LANES) highest = max(load(x + i), highest);
    float top = -__builtin_inff();
    for (int64_t lane = 0; lane < LANES; lane++) top = highest[lane] > top ? highest[lane] : top;
    for (; i < a.size; i++) top = x[i] > top ? x[i] : top;
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const int64_t begin = chunk * LOOKED_AT, end = begin + LOOKED_AT;
      for (i = begin; i < least(end, a.size); i += LANES)
        store(weights + i, exp((load(x + i, a.size - i) - top) / temperature));
      for (i = least(end, a.size); i < end; i++) weights[i] = 0;
      double partial[8] = {};
      for (i = begin; i < end; i += 8)
        for (int64_t j = 0; j < 8; j++) partial[j] += weights[i + j];
      sums[chunk] = ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
                    ((partial[4] + partial[5]) + (partial[6] + partial[7]));
      total += sums[chunk];
    }
    const double point = a.share[t] * total;
    double before = 0;
    int64_t chunk = 0;
    while (chunk < chunks - 1 && !(before + sums[chunk] > point)) before += sums[chunk++];
    int64_t last = a.size - 1;  // in case that rounding, or what is no number, leaves the point behind all of them
    for (i = chunk * LOOKED_AT; i < least((chunk + 1) * LOOKED_AT, a.size); i++) {
      if (weights[i] > 0) last = i;
      before += weights[i];
      if (before > point) break;
    }
    a.chosen[t] = last;
  });
}
