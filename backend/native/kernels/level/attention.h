// Attention with dot products: for decodes, and for all rows that prompt_attention.h or AMX do not take.
//
// `Rows` computes a few query rows of one sequence for a few neighbouring key/value heads: scores, softmax, weighted
// sum of values, for a slice of the positions at a time. It is generic over the dtype T of the queries, the format C of
// the cache, and the size DIM of a head, which is 0 if it is only known at run time. ScoreStep and WeighStep
// (attention_steps.h) say how queries and the cache are read and multiplied. attention_tasks.h divides the rows among
// the threads.

constexpr int64_t SLICE = 256;    // positions that are scored before their values are weighed
constexpr int64_t PART_ROWS = 8;  // rows in a part, at most

// A few rows of one sequence. A row is one query head of one token.
struct RowPart {
  int64_t seq, row, count;
  int64_t begin, end;  // the positions that any of the rows sees; begin: a multiple of 16

  RowPart(const Attend& a, int64_t seq, int64_t row, int64_t count) : seq(seq), row(row), count(count) {
    begin = a.window ? max_of(0, last_seen(a, 0) - a.window + 1) / 16 * 16 : 0;
    end = last_seen(a, count - 1) + 1;
  }
  int64_t last_seen(const Attend& a, int64_t r) const {  // the last position that the r-th row sees
    return a.seq_lens[seq] - (a.starts[seq + 1] - a.starts[seq]) + (row + r) / (a.num_heads / a.num_kv_heads);
  }
  int64_t first_slice() const { return begin / SLICE; }
  int64_t slices() const { return ceil_div(end, SLICE) - first_slice(); }
};

// A row's weighted sum of values over some positions: the sums, in pairs of vectors, then the highest exponent and the
// sum of the weights, which are relative to it (softmax.h).
inline int64_t sums_of_row(int64_t dim) { return ceil_div(dim, PAIR) * PAIR; }  // in floats
inline int64_t floats_of_row(int64_t dim) { return sums_of_row(dim) + PAIR; }

// Adds the sums over one more slice. Slices that a row does not see change no bit. Not inlined, so that all callers
// round alike.
inline __attribute__((noinline)) void add_slice(float* sums, const float* more, int64_t sum_dim) {
  const float own = sums[sum_dim], other = more[sum_dim], top = other > own ? other : own;
  const float before = exp2<float>(all(own - base_of(top)))[0], factor = exp2<float>(all(other - base_of(top)))[0];
  for (int64_t d = 0; d < sum_dim; d += LANES) store(sums + d, load(sums + d) * before + load(more + d) * factor);
  sums[sum_dim] = top;
  sums[sum_dim + 1] = sums[sum_dim + 1] * before + more[sum_dim + 1] * factor;
}

// A number that is known when the kernels are compiled, or only at run time if N is 0.
template <int64_t N>
struct Size {
  constexpr Size(int64_t) {}
  constexpr operator int64_t() const { return N; }
};
template <>
struct Size<0> {
  const int64_t n;
  Size(int64_t n) : n(n) {}
  operator int64_t() const { return n; }
};

// A part of the rows for a few neighbouring key/value heads. The keys and values of a position are read once for all
// rows of all these heads, since those heads are adjacent in a block. Slices begin at multiples of SLICE and are added
// in their order, and a row adds zero for positions that other rows see and it does not, so a row's sums depend neither
// on the other rows nor on the number of threads.
template <class T, class C, int64_t DIM>
struct Rows {
  typedef ScoreStep<T, C> Step;
  typedef WeighStep<T, C> Weigh;
  typedef typename Step::Stored Stored;
  typedef typename Weigh::Weight Weight;
  static constexpr int64_t LINE = 64 / sizeof(C);          // numbers in a cache line
  static constexpr int64_t AT_ONCE = 16, MIN_AT_ONCE = 4;  // positions in a run, unless a block or slice ends
  static constexpr int NEAR = 3, FAR = 2;                  // for __builtin_prefetch: to L1, to L2
  static constexpr int RUNS_AHEAD = WIDTH == 64 ? 3 : 1;   // that are prefetched: the next one to L1, others to L2
  // Bytes of a run that stays in L1 beside the next one, unless MIN_AT_ONCE positions have more. Other levels than
  // AVX-512 take longer for a run than for memory.
  static constexpr int64_t RUN_BYTES = WIDTH == 64 ? 8 << 10 : 64 << 10;
  // Numbers of sums in registers: for scores, rows times keys; for values, rows times pairs of vectors.
  static constexpr int QUERY_ROWS = 4, SCORED_KEYS = WIDTH == 64 ? 4 : 2;
  static constexpr int WEIGHED_ROWS = WIDTH == 64 ? 8 : 4, WEIGHED_SUMS = WIDTH == 64 ? 16 : 12;

  const Attend& a;
  const RowPart part;
  const int64_t head, heads, row = part.row, count = part.count;
  const int64_t group = a.num_heads / a.num_kv_heads, row_of_head = row_size<C>(a.head_dim),
                stride = a.num_kv_heads * row_of_head;
  const Size<DIM> dim = a.head_dim;
  const int64_t query_dim = ceil_div(dim, Step::SIZE) * Step::SIZE, whole_steps = dim / Step::SIZE * Step::SIZE,
                sum_dim = sums_of_row(dim), sum_stride = floats_of_row(dim);
  // Positions that are processed for all heads before the next ones.
  const int64_t at_once = positions_at_once(heads * row_of_head * sizeof(C));
  const int32_t* const table = a.tables + part.seq * a.table_width;
  int64_t first[PART_ROWS], last[PART_ROWS];  // the first and last position that a row sees
  int64_t begin, end, width;    // the slice that any row sees; width: its positions, rounded up to whole vectors
  float *sums, *scores, *tops;  // [heads][rows][sum_stride]; [heads][rows][width]; [heads][rows]
  Stored* queries;              // [heads][rows][query_dim], see query_at

  Rows(const Attend& a, const RowPart& part, int64_t head, int64_t heads) : a(a), part(part), head(head), heads(heads) {
    for (int64_t r = 0; r < count; r++) {
      last[r] = part.last_seen(a, r);
      first[r] = a.window ? max_of(0, last[r] - a.window + 1) : 0;
    }
    // Two sets of sums, scores, queries and tops
    const int64_t each = 2 * sum_stride + SLICE + query_dim + 1;
    sums = static_cast<float*>(thread_scratch.get(heads * count * each * sizeof(float)));
    scores = sums + 2 * heads * count * sum_stride;
    queries = reinterpret_cast<Stored*>(scores + heads * count * SLICE);
    tops = scores + heads * count * (SLICE + query_dim);
    for (int64_t h = 0; h < heads; h++)
      for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < dim; d += Step::SIZE)
          Step::keep(static_cast<const T*>(a.query) + at(h, r) + d, queries + query_at(h, r, d), dim - d);
  }

  static int64_t positions_at_once(int64_t bytes_of_position) {
    int64_t n = AT_ONCE;
    while (n > MIN_AT_ONCE && n * bytes_of_position > RUN_BYTES) n /= 2;
    return n;
  }

  int64_t at(int64_t h, int64_t r) const {  // the offset of a row in the queries and in the outputs
    return ((a.starts[part.seq] + (row + r) / group) * a.num_heads + (head + h) * group + (row + r) % group) * dim;
  }

  // Where a step of a row is in `queries`: beside that of the other rows that are scored together, QUERY_ROWS or the
  // rest.
  int64_t query_at(int64_t h, int64_t r, int64_t d) const {
    const int64_t first = r / QUERY_ROWS * QUERY_ROWS, together = min_of(QUERY_ROWS, count - first);
    return (h * count + first) * query_dim + d * together + (r - first) * Step::SIZE;
  }

  void run() {  // over all slices
    float* const all_sums = sums + heads * count * sum_stride;
    for (int64_t i = 0; i < heads * count; i++) begin_sums(i / count, i % count, all_sums + i * sum_stride);
    for (int64_t slice = 0; slice < part.slices(); slice++) {
      run_slice(slice, sums);
      for (int64_t i = 0; i < heads * count; i++) add_slice(all_sums + i * sum_stride, sums + i * sum_stride, sum_dim);
    }
    for (int64_t i = 0; i < heads * count; i++) finish(i / count, i % count, all_sums + i * sum_stride);
  }

  // Writes the sums over one slice of the part.
  void run_slice(int64_t slice, float* to) {
    const int64_t from = (part.first_slice() + slice) * SLICE;
    sums = to;
    begin = max_of(part.begin, from), end = min_of(part.end, from + SLICE), width = ceil_div(end - begin, PAIR) * PAIR;
    each_run(a.keys, {a.values, begin, end}, [&](int64_t h, int64_t i, const C* keys, int64_t n, Ahead ahead) {
      score(h, i, keys, n, ahead);
      times_scales(scores, h, i, keys, n);
    });
    __builtin_memset(sums, 0, heads * count * sum_stride * sizeof(float));
    for (int64_t i = 0; i < heads * count; i++) find_top(i);
    each_run(a.values, {a.keys, end, part.end}, [&](int64_t h, int64_t i, const C* values, int64_t n, Ahead ahead) {
      const int64_t from = weights_until(i), until = weights_until(i + n);
      for (int64_t r = 0; from < until && r < count; r++) softmax(h * count + r, from, until);
      times_scales(reinterpret_cast<Weight*>(scores), h, i, values, n);
      weigh(h, i, values, n, ahead);
    });
  }

  void begin_sums(int64_t h, int64_t r, float* own) const {  // a sink is a first score without a value
    __builtin_memset(own, 0, sum_stride * sizeof(float));
    own[sum_dim] = a.sinks ? a.sinks[(head + h) * group + (row + r) % group] * LOG2_E : -__builtin_inff();
    own[sum_dim + 1] = a.sinks ? 1 : 0;
  }
  void finish(int64_t h, int64_t r, const float* own) const {
    const float inverse = 1.0f / own[sum_dim + 1];
    for (int64_t d = 0; d < dim; d += PAIR)
      Weigh::finish(static_cast<T*>(a.out) + at(h, r) + d, pair_of(own + d), inverse, dim - d);
  }

  // Where a visit's parts of the next runs begin. It prefetches them while it computes.
  struct Ahead {
    const C* of_run[RUNS_AHEAD];
    static Ahead all(const C* from) {
      Ahead ahead;
      unroll<RUNS_AHEAD>([&](auto i) __attribute__((always_inline)) { ahead.of_run[i] = from; });
      return ahead;
    }
    inline __attribute__((always_inline)) Ahead operator+(int64_t numbers) const {
      Ahead ahead;
      unroll<RUNS_AHEAD>([&](auto i) __attribute__((always_inline)) { ahead.of_run[i] = of_run[i] + numbers; });
      return ahead;
    }
  };
  struct Reading {  // positions of a cache that are read after those of another one
    const void* cache;
    int64_t begin, end;
  };

  // Calls visit(head, i, from, n, ahead) for runs of n consecutive positions, for each head of a run before the next
  // run, which is the order in a block. Blocks are anywhere in memory, so the hardware does not prefetch the next one.
  // Each visit prefetches a part of the next run to L1, and with AVX-512 of the two runs after it to L2. A core has
  // only few buffers for lines on their way to L1: if the lines came from memory directly, these would limit the speed.
  // And it drops some prefetches to L2 while it has many others to do, the more the faster the kernels compute, so each
  // line is prefetched to L2 twice, in different runs. That takes a third less time than once. Narrower vectors are
  // never that fast: there, prefetches to L2 cost more time than they save.
  template <class F>
  inline __attribute__((always_inline)) void each_run(const void* cache, Reading then, F visit) {
    for (int64_t p = begin; p < end;) {
      const int64_t n = min_of(at_once, min_of(a.block_size - uint32_t(p) % uint32_t(a.block_size), end - p));
      const C *const from = at(cache, p), *next[RUNS_AHEAD];
      for (int i = 0; i < RUNS_AHEAD; i++) next[i] = at(cache, p + (i + 1) * n, then);
      for (int64_t h = 0; h < heads; h++) visit(h, p - begin, from + h * row_of_head, n, ahead_of(next, h, n, from));
      p += n;
    }
  }
  const C* at(const void* cache, int64_t p) const {
    const uint32_t position = uint32_t(p), size = uint32_t(a.block_size);  // of 32 bits, which divide faster
    return static_cast<const C*>(cache) + (int64_t(table[position / size]) * size + position % size) * stride +
           head * row_of_head;
  }
  const C* at(const void* cache, int64_t p, const Reading& then) const {  // null after the end of both
    if (p < end) return at(cache, p);
    const int64_t q = then.begin + p - end;
    return q < then.end ? at(then.cache, q) : nullptr;
  }

  // What a head prefetches of the next runs; `own`, which is in the cache, in place of a run that does not exist.
  // Memory must be prefetched in its order, a few lines at a time: then the hardware recognises a stream and joins in,
  // and memory is read a third faster. So the heads of a run prefetch consecutive parts of it, whatever these hold.
  Ahead ahead_of(const C* const* next, int64_t h, int64_t n, const C* own) const {
    Ahead ahead;
    unroll<RUNS_AHEAD>([&](auto i) __attribute__((always_inline)) {
      ahead.of_run[i] = part_of<i == 0 ? NEAR : FAR>(next[i], h, n, own);
    });
    return ahead;
  }
  // Where a head's part of a run begins. If the task has only some of the heads, their parts are not consecutive and
  // are requested at once; then the result is `own`, too.
  template <int CACHE>
  const C* part_of(const C* run, int64_t h, int64_t n, const C* own) const {
    if (!run) return own;
    const int64_t each = n * row_of_head;
    if (heads == a.num_kv_heads) {
      if (IS_SCALED<C>) prefetch<CACHE>(run + (h + 1) * each - 1, 1);  // scales take no step of their own
      return run + h * each;
    }
    for (int64_t i = 0; i < n; i++) prefetch<CACHE>(run + i * stride + h * row_of_head, row_of_head);
    return own;
  }
  // Requests the cache lines of `size` numbers.
  template <int CACHE>
  static inline __attribute__((always_inline)) void prefetch(const C* from, int64_t size) {
    for (int64_t i = 0; i < size; i += LINE) __builtin_prefetch(from + i, 0, CACHE);
  }
  // The i-th of N adjacent parts of SIZE numbers. The first of several parts in a line requests it.
  template <int i, int N, int SIZE>
  static inline __attribute__((always_inline)) void prefetch_part(Ahead ahead) {
    if constexpr (SIZE >= LINE || N % (LINE / SIZE) || i % (LINE / SIZE) == 0) {
      unroll<RUNS_AHEAD>([&](auto j) __attribute__((always_inline)) {
        prefetch<j == 0 ? NEAR : FAR>(ahead.of_run[j] + i * SIZE, SIZE);
      });
    }
  }

  // Multiplies scores or weights of a head's rows, n positions from i on, by the scales of these positions, if any.
  template <class V>
  void times_scales(V* of_rows, int64_t h, int64_t i, const C* from, int64_t n) {
    if constexpr (IS_SCALED<C>) {
      float scales[AT_ONCE];
      for (int64_t j = 0; j < n; j++) scales[j] = scale_of(from + j * stride, dim);
      for (int64_t r = 0; r < count; r++)
        for (int64_t j = 0; j < n; j++) of_rows[(h * count + r) * width + i + j] *= scales[j];
    }
  }

  void score(int64_t h, int64_t i, const C* keys, int64_t n, Ahead ahead) {
    const Stored* query = queries + h * count * query_dim;
    float* to = scores + h * count * width + i;
    int64_t r = 0;
    for (; r + QUERY_ROWS <= count; r += QUERY_ROWS) {
      score_rows<QUERY_ROWS, SCORED_KEYS>(query + r * query_dim, keys, n, ahead, to + r * width);
      ahead = Ahead::all(keys);  // prefetched only once
    }
    switch (count - r) {
      case 3: return score_rows<3, 4>(query + r * query_dim, keys, n, ahead, to + r * width);
      case 2: return score_rows<2, 4>(query + r * query_dim, keys, n, ahead, to + r * width);
      case 1: return score_rows<1, 8>(query + r * query_dim, keys, n, ahead, to + r * width);
    }
  }
  template <int R, int N>  // N keys at once: limited by the registers for sums
  void score_rows(const Stored* query, const C* keys, int64_t n, Ahead ahead, float* to) {
    for (; n >= N; n -= N, keys += N * stride, ahead = ahead + N * row_of_head, to += N)
      products<R, N>(query, keys, ahead, to);
    for (; n > 0; n--, keys += stride, ahead = ahead + row_of_head, to++) products<R, 1>(query, keys, ahead, to);
  }
  template <int R, int N>
  inline __attribute__((always_inline)) void products(const Stored* query, const C* key, Ahead ahead, float* to) {
    vf own[R][N];
    zero(own);
    const int64_t whole = DIM ? DIM / Step::SIZE * Step::SIZE : whole_steps;
    for (int64_t d = 0; d < whole; d += Step::SIZE)
      unroll<Step::PARTS_OF_STEP>([&](auto part) __attribute__((always_inline)) {
        typename Step::V rows[R];
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          rows[r] = Step::of_query(query + d * R + r * Step::SIZE, part);
        });
        if constexpr (WIDTH == 32) force_reload(key);
        unroll<N>([&](auto n) __attribute__((always_inline)) {
          if constexpr (part == 0) prefetch_part<n, N, Step::SIZE>(ahead + d * N);
          const auto k = Step::of_key(key + n * stride + d, part);
          unroll<R>([&](auto r) __attribute__((always_inline)) { own[r][n] = Step::add(own[r][n], rows[r], k); });
        });
      });
    unroll<R>([&](auto r) __attribute__((always_inline)) { sums_of<N>(own[r], to + r * width); });
    if (whole < dim) add_rest(R, N, whole, query, key, to);
  }
  // The last dimensions of heads whose size is not a whole number of steps.
  __attribute__((noinline)) void add_rest(int64_t rows, int64_t n, int64_t d, const Stored* query, const C* key,
                                          float* to) const {
    for (int64_t i = 0; i < n; i++) {
      C rest[Step::SIZE] = {};
      __builtin_memcpy(rest, key + i * stride + d, (dim - d) * sizeof(C));
      for (int64_t r = 0; r < rows; r++) {
        vf products = {};
        for (int part = 0; part < Step::PARTS_OF_STEP; part++)
          products =
              Step::add(products, Step::of_query(query + d * rows + r * Step::SIZE, part), Step::of_key(rest, part));
        to[r * width + i] += sum(products);
      }
    }
  }

  void find_top(int64_t i) {  // the row's highest exponent
    float* const own = scores + i * width;
    prepare_scores(a, own, width, first[i % count] - begin, min_of(last[i % count], end - 1) - begin);
    tops[i] = highest_score(own, width) * exponent_factor(a);
  }
  // Up to where scores are weights before position i is weighed: a single position is multiplied as a pair.
  int64_t weights_until(int64_t i) const {
    return i ? min_of(ceil_div(i + Weigh::POSITIONS - 1, PAIR) * PAIR, width) : 0;
  }
  // Turns a row's scores of some positions into weights in place, and adds those up. After the last positions, stores
  // the highest exponent and the sum of the weights. Weights are computed just before they are used, because memory is
  // not read meanwhile.
  void softmax(int64_t i, int64_t from, int64_t until) {
    float *const own = scores + i * width, *const tail = sums + i * sum_stride + sum_dim;
    Pair totals = pair_of(tail);
    to_weights<T, Weight>(own, from, until, exponent_factor(a), base_of(tops[i]), totals);
    store(tail, totals);
    if (until < width) return;
    // A last single position is multiplied as a pair, so the weight after it must be zero.
    if constexpr (Weigh::POSITIONS > 1) store(reinterpret_cast<Weight*>(own) + width, vf{});
    tail[0] = tops[i], tail[1] = sum(totals.first + totals.second);
  }

  void weigh(int64_t h, int64_t i, const C* values, int64_t n, Ahead ahead) {
    int64_t r = 0;
    for (; r + WEIGHED_ROWS <= count; r += WEIGHED_ROWS) {
      weigh_rows<WEIGHED_ROWS>(h, r, i, values, n, ahead);
      ahead = Ahead::all(values);  // prefetched only once
    }
    weigh_rest<WEIGHED_ROWS - 1>(h, r, i, values, n, ahead);
  }
  template <int R>
  void weigh_rest(int64_t h, int64_t r, int64_t i, const C* values, int64_t n, Ahead ahead) {
    if (count - r == R) return weigh_rows<R>(h, r, i, values, n, ahead);
    if constexpr (R > 1) weigh_rest<R - 1>(h, r, i, values, n, ahead);
  }
  template <int R>
  void weigh_rows(int64_t h, int64_t r, int64_t i, const C* values, int64_t n, Ahead ahead) {
    const Weight* weights = weights_of(h * count + r) + i;
    float* to = sums + (h * count + r) * sum_stride;
    constexpr int most = WEIGHED_SUMS / 2 / R, V = most >= 4 ? 4 : most >= 2 ? 2 : 1;
    int64_t d = 0;
    for (; d + V * PAIR <= dim; d += V * PAIR) add_weighted<R, V>(weights, values, d, n, ahead + d * n, to + d, PAIR);
    for (; d < dim; d += PAIR) add_weighted<R, 1>(weights, values, d, n, ahead + d * n, to + d, dim - d);
  }
  const Weight* weights_of(int64_t row) const { return reinterpret_cast<const Weight*>(scores + row * width); }
  template <int R, int V>
  inline __attribute__((always_inline)) void add_weighted(const Weight* weights, const C* value, int64_t d, int64_t n,
                                                          Ahead ahead, float* to, int64_t left) {
    const int64_t weight_stride = weights_of(1) - weights_of(0), stride = this->stride,
                  sum_stride = this->sum_stride;  // local copies, because compilers would reload members
    Pair own[R][V];
    unroll<R * V>([&](auto i) __attribute__((always_inline)) {
      own[i / V][i % V] = pair_of(to + i / V * sum_stride + i % V * PAIR);
    });
    const auto step = [&](int64_t i, int64_t next) __attribute__((always_inline)) {
      typename Weigh::Weights of_rows[R];
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        of_rows[r] = Weigh::of_weights(weights + r * weight_stride + i);
      });
      unroll<V>([&](auto j) __attribute__((always_inline)) {
        constexpr int P = Weigh::POSITIONS;
        unroll<P>([&](auto p)
                      __attribute__((always_inline)) { prefetch_part<j * P + p, V * P, PAIR>(ahead + i * V * PAIR); });
        const C* from = value + i * stride + d + j * PAIR;
        if constexpr (P == 2) {
          const Pair values = Weigh::of_values(from, next, left);
          unroll<R>([&](auto r)
                        __attribute__((always_inline)) { own[r][j] = Weigh::add(own[r][j], values, of_rows[r]); });
        } else {  // one vector of a pair at a time: with AVX2, sums and weights leave no register for two
          const vf first = Weigh::of_values(from, 0, left);
          unroll<R>([&](auto r) __attribute__((always_inline)) {
            own[r][j].first = add_product(own[r][j].first, first, of_rows[r]);
          });
          force_reload(from);
          const vf second = Weigh::of_values(from, 1, left);
          unroll<R>([&](auto r) __attribute__((always_inline)) {
            own[r][j].second = add_product(own[r][j].second, second, of_rows[r]);
          });
        }
      });
    };
    int64_t i = 0;
    if constexpr (Weigh::POSITIONS == 1) {
      do step(i, 0);
      while (++i < n);
    } else {
      for (; i + Weigh::POSITIONS <= n; i += Weigh::POSITIONS) step(i, stride);
      if (i < n) step(i, 0);
    }
    unroll<R * V>([&](auto i) __attribute__((always_inline)) {
      store(to + i / V * sum_stride + i % V * PAIR, own[i / V][i % V]);
    });
  }
};
