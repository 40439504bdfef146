// Attention of any rows: decodes, and whatever nothing else suits.

// What one step of a score takes in: a pair of vectors, or as many as the CPU sums pairs of.
template <class T>
struct ScoreStep {
  static constexpr int64_t SIZE = PAIR;
  typedef Pair V;
  typedef float Kept;  // as what queries are kept, in the order of pairs
  static void keep(const T* query, Kept* to, int64_t left) { store(to, pair_of(query, left)); }
  static V of_query(const Kept* query) { return pair_of(query); }
  static V of_key(const T* key, int64_t left) { return pair_of(key, left); }
  static vf add(vf sum, V query, V key) { return (sum + query.first * key.first) + query.second * key.second; }
};
#if WIDTH == 64
template <>
struct ScoreStep<bf16> : Step<bf16> {
  static void keep(const bf16* query, Kept* to, int64_t left) { _mm512_storeu_si512(to, of_x(query, left)); }
  static V of_query(const Kept* query) { return of_x(query, SIZE); }
  static V of_key(const bf16* key, int64_t left) { return of_x(key, left); }
};
#endif

// Rows of one sequence for each of some neighbouring key/value heads, a row being a token's head. Their scores are all
// kept, and each position's keys and values are read once, for all rows of all these heads, since they lie beside each
// other. Positions count from a multiple of 16, so that a row's sums do not depend on its neighbours: what these see
// and it does not, it adds as zero.
template <class T>
struct Rows {
  typedef ScoreStep<T> Step;
  typedef typename Step::Kept Kept;
  static constexpr int64_t MOST = 8;
  static constexpr int64_t AT_ONCE = 8;  // positions, of all heads, before the next ones

  const Attend& a;
  const int64_t seq, head, heads, row, count;
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, stride = a.num_kv_heads * dim;
  const int64_t query_dim = ceil_div(dim, Step::SIZE) * Step::SIZE, sum_dim = ceil_div(dim, PAIR) * PAIR;
  const int32_t* const table = a.tables + seq * a.table_width;
  int64_t first[MOST], last[MOST];  // the positions that a row sees
  int64_t begin, end, width;        // those that any sees, and so many that they are whole vectors
  float *scores, *sums, *inverse;  // [heads][rows][width]; [heads][rows][sum_dim], in the order of pairs; [heads][rows]
  Kept* queries;                   // [heads][rows][query_dim]

  Rows(const Attend& a, int64_t seq, int64_t head, int64_t heads, int64_t row, int64_t count)
      : a(a), seq(seq), head(head), heads(heads), row(row), count(count) {
    const int64_t query_len = a.starts[seq + 1] - a.starts[seq];
    for (int64_t r = 0; r < count; r++) {
      last[r] = a.seq_lens[seq] - query_len + (row + r) / group;
      first[r] = a.window ? most(0, last[r] - a.window + 1) : 0;
    }
    begin = first[0] / 16 * 16, end = last[count - 1] + 1, width = ceil_div(end - begin, 16) * 16;
    const int64_t rows = heads * count;
    scores = static_cast<float*>(own_scratch.get(rows * (width + sum_dim + query_dim + 1) * sizeof(float)));
    sums = scores + rows * width;
    queries = reinterpret_cast<Kept*>(sums + rows * sum_dim);
    inverse = sums + rows * (sum_dim + query_dim);
  }

  int64_t at(int64_t h, int64_t r) const {  // where a row stands, in the queries as in the outputs
    return ((a.starts[seq] + (row + r) / group) * a.num_heads + (head + h) * group + (row + r) % group) * dim;
  }

  void run() {
    for (int64_t h = 0; h < heads; h++)
      for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < dim; d += Step::SIZE)
          Step::keep(static_cast<const T*>(a.query) + at(h, r) + d, queries + (h * count + r) * query_dim + d, dim - d);
    each_run(a.keys, a.values, [&](int64_t h, int64_t i, const T* keys, int64_t n) { score(h, i, keys, n); });
    for (int64_t i = 0; i < heads * count; i++) inverse[i] = soften(scores + i * width, i % count);
    __builtin_memset(sums, 0, heads * count * sum_dim * sizeof(float));
    each_run(a.values, nullptr, [&](int64_t h, int64_t i, const T* values, int64_t n) { weigh(h, i, values, n); });
    for (int64_t h = 0; h < heads; h++)
      for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < dim; d += PAIR) {
          Pair own = pair_of(sums + (h * count + r) * sum_dim + d);
          own.first *= inverse[h * count + r], own.second *= inverse[h * count + r];
          store(static_cast<T*>(a.out) + at(h, r) + d, own, dim - d);
        }
  }

  // Calls visit(head, i, from, n) for some positions that lie beside each other and one head of theirs, for each head
  // and then for the next ones, which is how a block lies. Blocks are anywhere, which no prefetching of the hardware's
  // knows: beside each position of a block, the same one of the next block is fetched. then: the cache that is read
  // next.
  template <class F>
  inline __attribute__((always_inline)) void each_run(const void* cache, const void* then, F visit) {
    for (int64_t p = begin; p < end;) {
      const int64_t block = p / a.block_size, offset = p % a.block_size;
      const int64_t n = least(AT_ONCE, least(a.block_size - offset, end - p));
      const bool has_next = (block + 1) * a.block_size < end;
      const T* from = at(cache, block, offset);
      const T* next = has_next ? at(cache, block + 1, offset) : then ? at(then, begin / a.block_size, offset) : nullptr;
      for (int64_t h = 0; h < heads; h++, from += dim) {
        if (next) fetch(next + h * dim, n);
        visit(h, p - begin, from, n);
      }
      p += n;
    }
  }
  const T* at(const void* cache, int64_t block, int64_t offset) const {
    return static_cast<const T*>(cache) + (int64_t(table[block]) * a.block_size + offset) * stride + head * dim;
  }
  void fetch(const T* from, int64_t n) const {  // one head of n positions
    for (int64_t i = 0; i < n; i++)
      for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i * stride + d, 0, 2);
  }

  void score(int64_t h, int64_t i, const T* keys, int64_t n) {
    const Kept* query = queries + h * count * query_dim;
    float* to = scores + h * count * width + i;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) score_rows<4, 2>(query + r * query_dim, keys, n, to + r * width);
    switch (count - r) {
      case 3: return score_rows<3, 4>(query + r * query_dim, keys, n, to + r * width);
      case 2: return score_rows<2, 4>(query + r * query_dim, keys, n, to + r * width);
      case 1: return score_rows<1, 8>(query + r * query_dim, keys, n, to + r * width);
    }
  }
  template <int R, int N>  // N keys at once: as many sums as there are registers for
  void score_rows(const Kept* query, const T* keys, int64_t n, float* to) {
    for (; n >= N; n -= N, keys += N * stride, to += N) products<R, N>(query, keys, to);
    for (; n > 0; n--, keys += stride, to++) products<R, 1>(query, keys, to);
  }
  template <int R, int N>
  inline __attribute__((always_inline)) void products(const Kept* query, const T* key, float* to) {
    vf own[R][N];
    zero(own);
    const int64_t whole = dim / Step::SIZE * Step::SIZE;
    for (int64_t d = 0; d < whole; d += Step::SIZE)
      each<N>([&](auto n) __attribute__((always_inline)) {
        forget(query);
        const auto k = Step::of_key(key + n * stride + d, Step::SIZE);
        each<R>([&](auto r) __attribute__((always_inline)) {
          own[r][n] = Step::add(own[r][n], Step::of_query(query + r * query_dim + d), k);
        });
      });
    each<R>([&](auto r) __attribute__((always_inline)) { sums_of<N>(own[r], to + r * width); });
    if (whole < dim) add_rest(R, N, whole, query, key, to);
  }
  // Of heads that are no whole steps, the last dimensions.
  __attribute__((noinline)) void add_rest(int64_t rows, int64_t n, int64_t d, const Kept* query, const T* key,
                                          float* to) const {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < n; i++)
        to[r * width + i] += sum(
            Step::add(vf{}, Step::of_query(query + r * query_dim + d), Step::of_key(key + i * stride + d, dim - d)));
  }

  // A row's scores become weights; the result is the inverse of their sum.
  float soften(float* own, int64_t r) {
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
    return 1.0f / sum(total);
  }

  void weigh(int64_t h, int64_t i, const T* values, int64_t n) {
    const float* weights = scores + h * count * width + i;
    float* to = sums + h * count * sum_dim;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) weigh_rows<4, 1>(weights + r * width, values, n, to + r * sum_dim);
    switch (count - r) {
      case 3: return weigh_rows<3, 2>(weights + r * width, values, n, to + r * sum_dim);
      case 2: return weigh_rows<2, 2>(weights + r * width, values, n, to + r * sum_dim);
      case 1: return weigh_rows<1, 4>(weights + r * width, values, n, to + r * sum_dim);
    }
  }
  template <int R, int V>  // V pairs at once: as many sums as there are registers for
  void weigh_rows(const float* weights, const T* values, int64_t n, float* to) {
    int64_t d = 0;
    for (; d + V * PAIR <= dim; d += V * PAIR) add_weighed<R, V>(weights, values + d, n, to + d, PAIR);
    for (; d < dim; d += PAIR) add_weighed<R, 1>(weights, values + d, n, to + d, dim - d);
  }
  template <int R, int V>
  inline __attribute__((always_inline)) void add_weighed(const float* weights, const T* value, int64_t n, float* to,
                                                         int64_t left) {
    Pair own[R][V];
    each<R * V>([&](auto i) __attribute__((always_inline)) {
      own[i / V][i % V] = pair_of(to + i / V * sum_dim + i % V * PAIR);
    });
    for (int64_t i = 0; i < n; i++)
      each<V>([&](auto j) __attribute__((always_inline)) {
        forget(weights);
        const Pair v = pair_of(value + i * stride + j * PAIR, left);
        each<R>([&](auto r) __attribute__((always_inline)) {
          own[r][j].first += v.first * weights[r * width + i];
          own[r][j].second += v.second * weights[r * width + i];
        });
      });
    each<R * V>([&](auto i)
                    __attribute__((always_inline)) { store(to + i / V * sum_dim + i % V * PAIR, own[i / V][i % V]); });
  }
};

// All sequences but those that are skipped, as one piece of work.
template <class T>
void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const auto rows_of = [&](int64_t seq) { return skips(a, seq) ? 0 : (a.starts[seq + 1] - a.starts[seq]) * group; };
  int64_t rows = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) rows += rows_of(seq);
  // Rows and heads together, as long as there is enough to share.
  const int64_t shares = calling.num_threads * SHARES_PER_THREAD;
  const int64_t together = most(1, least(Rows<T>::MOST, rows * a.num_kv_heads / shares));
  int64_t parts = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) parts += ceil_div(rows_of(seq), together);
  const int64_t heads = most(1, least(a.num_kv_heads, parts * a.num_kv_heads / shares));
  const int64_t head_parts = ceil_div(a.num_kv_heads, heads);
  share(parts * head_parts, 1, [&](int64_t i) {
    const int64_t first = i % head_parts * heads, count = least(heads, a.num_kv_heads - first);
    int64_t seq = 0, part = i / head_parts;
    for (; part >= ceil_div(rows_of(seq), together); seq++) part -= ceil_div(rows_of(seq), together);
    const int64_t row = part * together;
    Rows<T>(a, seq, first, count, row, least(together, rows_of(seq) - row)).run();
  });
}
inline void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  a.dtype == FLOAT32 ? attend<float>(a, skips) : attend<bf16>(a, skips);
}
