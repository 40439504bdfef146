// Attention of any rows: decodes, and whatever nothing else suits.

// R rows of one sequence for each of some neighbouring key/value heads, a row being a token's head. Their scores are
// all kept, and each position's keys and values are read once, for all the heads together, since they lie beside each
// other. Positions count from a multiple of 16, so that a row's sums do not depend on its neighbours in the tile: what
// these see and it does not, it adds as zero.
template <class T, int R>
struct Rows {
  typedef typename Step<T>::Kept Kept;         // queries: floats, made once, unless they are summed as they are
  static constexpr int KEYS = R <= 3 ? 4 : 2;  // at once: as many sums as there are registers for
  static constexpr int64_t VALUES = 4;         // vectors of a head at once

  const Attend& a;
  const int64_t seq, head, heads, row;
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, stride = a.num_kv_heads * dim;
  const int64_t kept_dim = ceil_div(dim, Step<T>::SIZE) * Step<T>::SIZE;
  const int32_t* const table = a.tables + seq * a.table_width;
  int64_t first[R], last[R];  // the positions that a row sees
  int64_t begin, end, width;  // those that any sees, and so many that they are whole vectors
  float *scores, *sums;       // [heads][R][width]; [heads][R][D]
  Kept* queries;              // [heads][R][kept_dim]

  Rows(const Attend& a, int64_t seq, int64_t head, int64_t heads, int64_t row)
      : a(a), seq(seq), head(head), heads(heads), row(row) {
    const int64_t query_len = a.starts[seq + 1] - a.starts[seq];
    for (int r = 0; r < R; r++) {
      last[r] = a.seq_lens[seq] - query_len + (row + r) / group;
      first[r] = a.window ? most(0, last[r] - a.window + 1) : 0;
    }
    begin = first[0] / 16 * 16, end = last[R - 1] + 1, width = ceil_div(end - begin, 16) * 16;
    const int64_t own_dim = ceil_div(dim, LANES) * LANES;
    scores = static_cast<float*>(own_scratch.get(heads * R * (width + own_dim + kept_dim) * sizeof(float)));
    sums = scores + heads * R * width;
    queries = reinterpret_cast<Kept*>(sums + heads * R * own_dim);
  }

  int64_t at(int64_t h, int r) const {  // where a row stands, in the queries as in the outputs
    return ((a.starts[seq] + (row + r) / group) * a.num_heads + (head + h) * group + (row + r) % group) * dim;
  }

  void run() {
    take_queries();
    each_run(a.keys, [&](int64_t h, int64_t i, const T* key, int64_t count) __attribute__((always_inline)) {
      for (; count >= KEYS; i += KEYS, key += KEYS * stride, count -= KEYS) score<KEYS>(h, i, key);
      for (; count > 0; i++, key += stride, count--) score<1>(h, i, key);
    });
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) soften(scores + (h * R + r) * width, r, sums + (h * R + r) * dim);
    each_run(a.values, [&](int64_t h, int64_t i, const T* value, int64_t count)
                           __attribute__((always_inline)) { weigh(h, i, value, count); });
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) {
        const float* own = sums + (h * R + r) * dim;
        T* out = static_cast<T*>(a.out) + at(h, r);
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(own + d, dim - d), dim - d);
      }
  }

  void take_queries() {
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) {
        const T* query = static_cast<const T*>(a.query) + at(h, r);
        Kept* to = queries + (h * R + r) * kept_dim;
        if constexpr (sizeof(Kept) == sizeof(T)) {
          __builtin_memset(to, 0, kept_dim * sizeof(T));
          __builtin_memcpy(to, query, dim * sizeof(T));
        } else {
          for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(query + d, dim - d));
        }
      }
  }

  // Calls visit(head, i, from, count) for the runs of positions that lie beside each other, and each head of theirs.
  template <class F>
  inline __attribute__((always_inline)) void each_run(const void* cache, F visit) {
    for (int64_t p = begin; p < end;) {
      const int64_t offset = p % a.block_size, count = least(a.block_size - offset, end - p);
      const int64_t slot = int64_t(table[p / a.block_size]) * a.block_size + offset;
      const T* from = static_cast<const T*>(cache) + slot * stride + head * dim;
      // The next block is elsewhere, which no prefetching of the hardware's knows.
      const bool has_next = p + count < end;
      const T* next = has_next ? from + (int64_t(table[p / a.block_size + 1]) * a.block_size - slot) * stride : from;
      for (int64_t h = 0; h < heads; h++, from += dim, next += dim) {
        for (int64_t i = 0; i < count; i++)
          for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(next + i * stride + d);
        visit(h, p - begin, from, count);
      }
      p += count;
    }
  }

  template <int N>
  inline __attribute__((always_inline)) void score(int64_t h, int64_t i, const T* key) {
    vf products[R][N];
    zero(products);
    const Kept* query = queries + h * R * kept_dim;
    const auto step = [&](int64_t d, int64_t left) __attribute__((always_inline)) {
      typename Step<T>::V q[R];
      for (int r = 0; r < R; r++) q[r] = Step<T>::of_kept(query + r * kept_dim + d, left);
      for (int n = 0; n < N; n++) {
        const auto k = Step<T>::of_x(key + n * stride + d, left);
        for (int r = 0; r < R; r++) products[r][n] = Step<T>::add(products[r][n], q[r], k);
      }
    };
    const int64_t whole = dim / Step<T>::SIZE * Step<T>::SIZE;
    for (int64_t d = 0; d < whole; d += Step<T>::SIZE) step(d, Step<T>::SIZE);
    if (whole < dim) step(whole, dim - whole);
    for (int r = 0; r < R; r++) sums_of<N>(products[r], scores + (h * R + r) * width + i);
  }

  // A row's scores become weights, whose sum is one, and its sums zero.
  void soften(float* own, int r, float* sums_of_row) {
    vf highest = all(-__builtin_inff()), total = {}, lane;
    for (int64_t i = 0; i < LANES; i++) lane[i] = float(i);
    const vf from = all(float(first[r] - begin)), to = all(float(last[r] - begin));
    for (int64_t i = 0; i < width; i += LANES) {
      vf s = load(own + i) * float(a.scale);
      if (a.softcap) s = capped(s, float(a.softcap));
      const vf position = lane + float(i);
      s = (position >= from) & (position <= to) ? s : all(-__builtin_inff());
      highest = max(highest, s);
      store(own + i, s);
    }
    float top = highest[0];
    for (int64_t i = 1; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    for (int64_t i = 0; i < width; i += LANES) {
      const vf weight = exp(load(own + i) - top);
      store(own + i, weight);
      total += weight;
    }
    const float inverse = 1.0f / sum(total);
    for (int64_t i = 0; i < width; i += LANES) store(own + i, load(own + i) * inverse);
    __builtin_memset(sums_of_row, 0, dim * sizeof(float));
  }

  void weigh(int64_t h, int64_t i, const T* value, int64_t count) {
    int64_t d = 0;
    for (; d + VALUES * LANES <= dim; d += VALUES * LANES) weigh<VALUES>(h, i, value, count, d, LANES);
    for (; d < dim; d += LANES) weigh<1>(h, i, value, count, d, least(LANES, dim - d));
  }

  // V vectors of the head, from d on; of the last one there may be only so much.
  template <int V>
  inline __attribute__((always_inline)) void weigh(int64_t h, int64_t i, const T* value, int64_t count, int64_t d,
                                                   int64_t left) {
    const float* weights = scores + h * R * width + i;
    float* to = sums + h * R * dim + d;
    vf own[R][V];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) own[r][j] = load(to + r * dim + j * LANES, left);
    for (int64_t n = 0; n < count; n++)
      for (int j = 0; j < V; j++) {
        const vf v = load(value + n * stride + d + j * LANES, left);
        for (int r = 0; r < R; r++) own[r][j] += v * weights[r * width + n];
      }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) store(to + r * dim + j * LANES, own[r][j], left);
  }
};

// All sequences but those that are skipped, as one piece of work.
template <class T>
void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  constexpr int64_t R = 4;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const auto rows_of = [&](int64_t seq) {
    return skips(a, seq) ? 0 : ceil_div((a.starts[seq + 1] - a.starts[seq]) * group, R);
  };
  int64_t rows = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) rows += rows_of(seq);
  // Heads together, as long as there is enough to share.
  const int64_t heads =
      most(1, least(a.num_kv_heads, rows * a.num_kv_heads / (calling.num_threads * SHARES_PER_THREAD)));
  const int64_t parts = ceil_div(a.num_kv_heads, heads);
  share(rows * parts, 1, [&](int64_t i) {
    const int64_t first = i % parts * heads, count = least(heads, a.num_kv_heads - first);
    int64_t seq = 0;
    for (i /= parts; i >= rows_of(seq); seq++) i -= rows_of(seq);
    const int64_t row = i * R;
    switch (least(R, (a.starts[seq + 1] - a.starts[seq]) * group - row)) {
      case 4: return Rows<T, 4>(a, seq, first, count, row).run();
      case 3: return Rows<T, 3>(a, seq, first, count, row).run();
      case 2: return Rows<T, 2>(a, seq, first, count, row).run();
      default: return Rows<T, 1>(a, seq, first, count, row).run();
    }
  });
}
inline void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  a.dtype == FLOAT32 ? attend<float>(a, skips) : attend<bf16>(a, skips);
}
