// Attention of many rows of one sequence, as matrix products. The sequence's keys and values are packed as panels of
// positions and of dimensions, so that scores and outputs are products as in packed_products.h. A tile of rows (the
// query heads that share a key/value head, token after token) goes along the positions with an online softmax.

constexpr int64_t TILE_ROWS = 24;
constexpr int64_t STEP_POSITIONS = 256;  // between two rescalings of the online softmax
constexpr int64_t SCORE_STRIDE = STEP_POSITIONS + 16;
constexpr int64_t MOST_TILES = 8;               // that go along the positions together
constexpr int64_t NEAR_TILE_BYTES = 128 << 10;  // of queries and outputs that stay in a core's cache
constexpr int64_t PACKED_AT_ONCE = 64 << 20;    // bytes of packed keys and values, unless one head has more

inline int64_t packed_head_bytes(const Attend& a) {
  return ceil_div(longest_sequence(a) + PANEL, PANEL) * PANEL * a.head_dim * sizeof(bf16) * 2;
}
inline int64_t heads_together(const Attend& a) {
  return min_of(a.num_kv_heads, max_of(1, PACKED_AT_ONCE / packed_head_bytes(a)));
}

struct PackedKv {
  uint32_t *keys, *values;   // words: [heads][positions / PANEL][D][LANES]; [heads][D / PANEL][positions][LANES]
  int64_t begin, positions;  // the first position, and their number: whole panels
};

inline bool fits_tiles(const Attend& a, int64_t seq) {
  const int64_t rows = (a.starts[seq + 1] - a.starts[seq]) * (a.num_heads / a.num_kv_heads);
  return a.dtype == BFLOAT16 && a.head_dim % PANEL == 0 && rows >= PANEL;
}

// Stores two steps of a panel in the layout of packed bfloat16 weights: pairs of its first half and of its second.
inline void store_pairs(uint32_t* to, vu first, vu second) {
#if WIDTH < 64
  const vu even = (first & 0xffff) | second << 16, odd = first >> 16 | (second & 0xffff0000u);
  first = even, second = odd;
#endif
  __builtin_memcpy(to, &first, sizeof first);
  __builtin_memcpy(to + LANES, &second, sizeof second);
}

// Packs PANEL positions of one head. Positions after the end of the sequence are replaced, because stale content of a
// block (possibly NaN) must not be multiplied. dequantised: room for PANEL keys and PANEL values in bfloat16.
template <class C>
void pack_positions(const Attend& a, int64_t seq, int64_t head, int64_t position, const PackedKv& to, uint32_t* keys,
                    uint32_t* values, bf16* dequantised) {
  const int32_t* table = a.tables + seq * a.table_width;
  const int64_t dim = a.head_dim, size = row_size<C>(dim), left = a.seq_lens[seq] - position;
  const bf16 *key[PANEL], *value[PANEL];
  for (int64_t i = 0; i < PANEL; i++) {
    const int64_t p = position + min_of(i, left - 1);
    const int64_t slot = int64_t(table[p / a.block_size]) * a.block_size + p % a.block_size;
    const C* const own_key = static_cast<const C*>(a.keys) + (slot * a.num_kv_heads + head) * size;
    const C* const own_value = static_cast<const C*>(a.values) + (slot * a.num_kv_heads + head) * size;
    if constexpr (IS_SCALED<C>) {
      key[i] = dequantised + i * dim, value[i] = dequantised + (PANEL + i) * dim;
      dequantise_row(own_key, dim, dequantised + i * dim);
      dequantise_row(own_value, dim, dequantised + (PANEL + i) * dim);
    } else {
      key[i] = own_key, value[i] = own_value;
    }
  }
  for (int64_t d = 0; d < dim; d += 2) {
    vu first, second;  // pairs of dimensions of each position
    for (int64_t i = 0; i < LANES; i++) {
      first[i] = read<uint32_t>(key[i] + d);
      second[i] = read<uint32_t>(key[LANES + i] + d);
    }
    store_pairs(keys + d * LANES, first, second);
  }
  for (int64_t d = 0; d < dim; d += PANEL)
    for (int64_t i = 0; i < PANEL; i += 2) {  // pairs of positions of each dimension
      const auto both = [&](int64_t from) {
        const vu even = i < left ? widened(&value[i][from].bits) : vu{};
        return even | (i + 1 < left ? widened(&value[i + 1][from].bits) << 16 : vu{});
      };
      store_pairs(values + (d / PANEL * to.positions + i) * LANES, both(d), both(d + LANES));
    }
}

// The rows of one tile, and what is summed for them: it goes along the positions one step at a time.
struct QueryTile {
  typedef InputLayout<bf16>::T T;  // how queries and weights are multiplied
  static constexpr int MOST_ROWS = InputLayout<bf16>::MOST_ROWS;
  static constexpr int64_t WHOLE_ROWS = (TILE_ROWS + LANES - 1) / LANES * LANES;  // whole vectors
  static constexpr int64_t WEIGHT_STRIDE =
      SCORE_STRIDE * sizeof(float) / sizeof(T);  // weights overwrite the scores in place

  const Attend* attend;
  int64_t seq, head, row, group, dim, query_len, num_rows;
  int64_t begin, end;  // the positions that any of the rows sees; begin: a multiple of PANEL
  float factor;        // of the stored scores; then they are exponents of 2
  T* queries;          // [rows][stride]
  vf* outputs;         // [D / PANEL][rows][2]
  int64_t first_seen[TILE_ROWS], last_seen[TILE_ROWS];
  // The highest exponent of each row, what the weights of a step are relative to, and the factor for what was summed
  // before that step.
  float highest[WHOLE_ROWS], bases[WHOLE_ROWS], correction[WHOLE_ROWS];
  vf total[TILE_ROWS];

  static size_t bytes(int64_t dim) {  // for queries and outputs
    return TILE_ROWS * (InputLayout<bf16>::stride(dim) * sizeof(T) + dim * sizeof(float));
  }

  void start(const Attend& a, int64_t seq, int64_t head, int64_t row, void* memory) {
    attend = &a;
    this->seq = seq, this->head = head, this->row = row;
    group = a.num_heads / a.num_kv_heads, dim = a.head_dim, query_len = a.starts[seq + 1] - a.starts[seq];
    num_rows = min_of(TILE_ROWS, query_len * group - row);
    factor = exponent_factor(a);
    queries = static_cast<T*>(memory);
    outputs = reinterpret_cast<vf*>(queries + TILE_ROWS * InputLayout<bf16>::stride(dim));
    __builtin_memset(outputs, 0, TILE_ROWS * dim * sizeof(float));
    for (int64_t i = 0; i < num_rows; i++) {
      InputLayout<bf16>::keep(static_cast<const bf16*>(a.query) + at(i), dim,
                              queries + i * InputLayout<bf16>::stride(dim));
      last_seen[i] = a.seq_lens[seq] - query_len + (row + i) / group;
      first_seen[i] = a.window ? max_of(0, last_seen[i] - a.window + 1) : 0;
      // A sink is a first score without a value.
      highest[i] = a.sinks ? a.sinks[head * group + (row + i) % group] * LOG2_E : -__builtin_inff();
      total[i] = vf{a.sinks ? 1.0f : 0.0f};
    }
    begin = first_seen[0] / PANEL * PANEL, end = last_seen[num_rows - 1] + 1;
  }

  int64_t at(int64_t i) const {  // the offset of a row in the queries and in the outputs
    const Attend& a = *attend;
    return ((a.starts[seq] + (row + i) / group) * a.num_heads + head * group + (row + i) % group) * dim;
  }

  // Adds what the rows see of the step that begins at `position`. keys, values: of this head.
  void add_step(int64_t position, const PackedKv& packed, const uint32_t* keys, const uint32_t* values, float* scores) {
    const int64_t from = max_of(position, begin), until = min_of(position + STEP_POSITIONS, end);
    if (from >= until) return;
    const int64_t count = ceil_div(until - from, PANEL) * PANEL, offset = from - packed.begin;
    score(keys + offset / PANEL * dim * LANES, count, scores);
    softmax(from, count, scores);
    weigh(values + offset * LANES, packed.positions, count, reinterpret_cast<const T*>(scores));
  }

  void finish() const {
    for (int64_t i = 0; i < num_rows; i++) {
      const float inverse = 1.0f / sum(total[i]);
      bf16* out = static_cast<bf16*>(attend->out) + at(i);
      for (int64_t d = 0; d < dim; d += PANEL) {
        const vf* own = outputs + (d / PANEL * TILE_ROWS + i) * 2;
        store(out + d, own[0] * inverse);
        store(out + d + LANES, own[1] * inverse);
      }
    }
  }

  // Calls f(from, R) for groups of R rows that are multiplied together, as even as possible. R is a compile-time
  // constant.
  template <class F>
  inline void each_few_rows(F f) const {
    const int64_t parts = ceil_div(num_rows, MOST_ROWS);
    for (int64_t i = 0; i < parts; i++) {
      const int64_t from = i * num_rows / parts, until = (i + 1) * num_rows / parts;
      with_rows<MOST_ROWS>(until - from, [&](auto rows) { f(from, rows); });
    }
  }
  template <int R, class F>
  static inline void with_rows(int64_t rows, F f) {
    if (rows == R) return f(std::integral_constant<int, R>{});
    if constexpr (R > 1) with_rows<R - 1>(rows, f);
  }

  void score(const uint32_t* keys, int64_t count, float* scores) const {
    const int64_t stride = InputLayout<bf16>::stride(dim);
    for (int64_t p = 0; p < count; p += PANEL)
      each_few_rows([&](int64_t from, auto rows) {
        constexpr int R = rows;
        const Panel<bf16> panel[] = {Panel<bf16>(keys + p / PANEL * dim * LANES)};
        vf sums[R][1][2];
        zero(sums);
        multiply(queries + from * stride, stride, panel, dim, {}, sums);
        float* const to = scores + from * SCORE_STRIDE + p;
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          store(to + r * SCORE_STRIDE, sums[r][0][0]);
          store(to + r * SCORE_STRIDE + LANES, sums[r][0][1]);
        });
      });
  }

  // Turns scores from position p on into weights, in place.
  void softmax(int64_t p, int64_t count, float* scores) {
    for (int64_t i = 0; i < num_rows; i++) {
      float* const own = scores + i * SCORE_STRIDE;
      prepare_scores(*attend, own, count, first_seen[i] - p, last_seen[i] - p);
      bases[i] = highest_score(own, count) * factor;
    }
    for (int64_t i = 0; i < WHOLE_ROWS; i += LANES) {  // of several rows at once
      const vf before = load(highest + i), now = max(before, load(bases + i));
      store(highest + i, now);
      store(bases + i, base_of(now));
      store(correction + i, exp2<bf16>(before - base_of(now)));
    }
    for (int64_t i = 0; i < num_rows; i++)
      total[i] = total[i] * correction[i] + to_weights<bf16, T>(scores + i * SCORE_STRIDE, count, factor, bases[i]);
  }

  void weigh(const uint32_t* values, int64_t positions, int64_t count, const T* weights) {
    for (int64_t d = 0; d < dim; d += PANEL)
      each_few_rows([&](int64_t from, auto rows) {
        constexpr int R = rows;
        const Panel<bf16> panel[] = {Panel<bf16>(values + d / PANEL * positions * LANES)};
        vf* const own = outputs + (d / PANEL * TILE_ROWS + from) * 2;
        const float* const factors = correction + from;
        vf sums[R][1][2];
        unroll<R * 2>([&](auto i) __attribute__((always_inline)) { sums[i / 2][0][i % 2] = own[i] * factors[i / 2]; });
        multiply(weights + from * WEIGHT_STRIDE, WEIGHT_STRIDE, panel, count, {}, sums);
        unroll<R * 2>([&](auto i) __attribute__((always_inline)) { own[i] = sums[i / 2][0][i % 2]; });
      });
  }
};

// Computes neighbouring tiles together, from `row` to `end`.
inline void run_tiles(const Attend& a, int64_t seq, int64_t head, int64_t tile, int64_t end_tile,
                      const PackedKv& packed, const uint32_t* keys, const uint32_t* values) {
  QueryTile tiles[MOST_TILES];
  alignas(64) float scores[TILE_ROWS * SCORE_STRIDE];
  const int64_t count = end_tile - tile;
  char* const memory = static_cast<char*>(thread_scratch.get(count * QueryTile::bytes(a.head_dim)));
  for (int64_t i = 0; i < count; i++)
    tiles[i].start(a, seq, head, (tile + i) * TILE_ROWS, memory + i * QueryTile::bytes(a.head_dim));
  for (int64_t p = tiles[0].begin / STEP_POSITIONS * STEP_POSITIONS; p < tiles[count - 1].end; p += STEP_POSITIONS)
    for (int64_t i = 0; i < count; i++) tiles[i].add_step(p, packed, keys, values, scores);
  for (int64_t i = 0; i < count; i++) tiles[i].finish();
}

// Tiles per task: as many as stay in a core's cache, unless a thread would have nothing to do otherwise.
inline int64_t tiles_together(int64_t tiles, int64_t heads, int64_t dim) {
  const int64_t near = NEAR_TILE_BYTES / QueryTile::bytes(dim);
  const int64_t fair = tiles * heads / (call_settings.num_threads * TASKS_PER_THREAD);
  return max_of(1, min_of(min_of(near, MOST_TILES), fair));
}

// Processes as many heads at a time as PACKED_AT_ONCE allows.
inline void attend_tiles(const Attend& a, int64_t seq, void* memory) {
  const int64_t query_len = a.starts[seq + 1] - a.starts[seq], seq_len = a.seq_lens[seq], dim = a.head_dim;
  const int64_t begin = a.window ? max_of(0, seq_len - query_len + 1 - a.window) / PANEL * PANEL : 0;
  const int64_t panels = ceil_div(seq_len - begin, PANEL), head_words = panels * LANES * dim;
  const int64_t tiles = ceil_div(query_len * (a.num_heads / a.num_kv_heads), TILE_ROWS);
  const int64_t together = heads_together(a);
  const auto pack = a.kv_format == SCALED_INT8   ? pack_positions<int8_t>
                    : a.kv_format == SCALED_E4M3 ? pack_positions<e4m3>
                                                 : pack_positions<bf16>;
  const PackedKv packed{static_cast<uint32_t*>(memory), static_cast<uint32_t*>(memory) + together * head_words, begin,
                        panels * PANEL};
  for (int64_t first = 0; first < a.num_kv_heads; first += together) {
    const int64_t heads = min_of(together, a.num_kv_heads - first);
    parallel_for(heads * panels, 0, [&](int64_t i) {
      const int64_t head = i / panels, panel = i % panels;
      bf16* const rows = static_cast<bf16*>(thread_scratch.get(2 * PANEL * dim * sizeof(bf16)));
      pack(a, seq, first + head, begin + panel * PANEL, packed, packed.keys + head * head_words + panel * dim * LANES,
           packed.values + head * head_words + panel * PANEL * LANES, rows);
    });
    const int64_t groups = ceil_div(tiles, tiles_together(tiles, heads, dim));
    parallel_for(heads * groups, 1, [&](int64_t i) {
      const int64_t head = i % heads,
                    group = groups - 1 - i / heads;  // the last tiles see most positions: longest tasks first
      run_tiles(a, seq, first + head, group * tiles / groups, (group + 1) * tiles / groups, packed,
                packed.keys + head * head_words, packed.values + head * head_words);
    });
  }
}
