// Attention of many rows of one sequence, as matrix products. The sequence's keys and values are packed as panels of
// positions and of dimensions, so that scores and outputs are products as in packed_products.h. A tile of rows (the
// query heads that share a key/value head, token after token) goes along the positions with an online softmax.

constexpr int64_t TILE_ROWS = 24;
constexpr int64_t STEP_POSITIONS = 256;  // between two rescalings of the online softmax
constexpr int64_t SCORE_STRIDE = STEP_POSITIONS + 16;
constexpr int64_t PACKED_AT_ONCE = 64 << 20;  // bytes of packed keys and values, unless one head has more

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

struct QueryTile {
  typedef InputLayout<bf16>::T T;  // how queries and weights are multiplied
  static constexpr int64_t MOST_ROWS = InputLayout<bf16>::MOST_ROWS;
  static constexpr int64_t WEIGHT_STRIDE =
      SCORE_STRIDE * sizeof(float) / sizeof(T);  // weights overwrite the scores in place

  const Attend& a;
  int64_t seq, head, row, group, dim, query_len, num_rows;
  float score_scale;  // still to be applied to the stored scores
  int64_t first_seen[TILE_ROWS], last_seen[TILE_ROWS];
  float highest[TILE_ROWS], correction[TILE_ROWS];
  vf total[TILE_ROWS];
  alignas(64) float scores[TILE_ROWS * SCORE_STRIDE];

  QueryTile(const Attend& a, int64_t seq, int64_t head, int64_t row)
      : a(a),
        seq(seq),
        head(head),
        row(row),
        group(a.num_heads / a.num_kv_heads),
        dim(a.head_dim),
        query_len(a.starts[seq + 1] - a.starts[seq]),
        num_rows(min_of(TILE_ROWS, query_len * group - row)),
        score_scale(a.softcap ? 1 : float(a.scale)) {}

  int64_t at(int64_t i) const {  // the offset of a row in the queries and in the outputs
    return ((a.starts[seq] + (row + i) / group) * a.num_heads + head * group + (row + i) % group) * dim;
  }

  static size_t bytes(int64_t dim) {
    return TILE_ROWS * (InputLayout<bf16>::stride(dim) * sizeof(T) + dim * sizeof(float));
  }

  // keys, values: of this head. memory: `bytes` for queries and outputs
  void run(const PackedKv& packed, const uint32_t* keys, const uint32_t* values, void* memory) {
    T* queries = static_cast<T*>(memory);
    vf* outputs = reinterpret_cast<vf*>(queries + TILE_ROWS * InputLayout<bf16>::stride(dim));  // [D / PANEL][rows][2]
    for (int64_t i = 0; i < num_rows; i++) {
      InputLayout<bf16>::keep(static_cast<const bf16*>(a.query) + at(i), dim,
                              queries + i * InputLayout<bf16>::stride(dim));
      last_seen[i] = a.seq_lens[seq] - query_len + (row + i) / group;
      first_seen[i] = a.window ? max_of(0, last_seen[i] - a.window + 1) : 0;
      // A sink is a first score without a value.
      highest[i] = a.sinks ? a.sinks[head * group + (row + i) % group] / score_scale : -__builtin_inff();
      total[i] = vf{a.sinks ? 1.0f : 0.0f};
    }
    __builtin_memset(outputs, 0, TILE_ROWS * dim * sizeof(float));
    const int64_t end = last_seen[num_rows - 1] + 1;
    for (int64_t p = first_seen[0] / PANEL * PANEL; p < end; p += STEP_POSITIONS) {
      const int64_t count = ceil_div(min_of(STEP_POSITIONS, end - p), PANEL) * PANEL, offset = p - packed.begin;
      score(queries, keys + offset / PANEL * dim * LANES, count);
      for (int64_t i = 0; i < num_rows; i++) softmax(i, p, count);
      weigh(values + offset * LANES, packed.positions, count, outputs);
    }
    for (int64_t i = 0; i < num_rows; i++) {
      const float inverse = 1.0f / sum(total[i]);
      bf16* out = static_cast<bf16*>(a.out) + at(i);
      for (int64_t d = 0; d < dim; d += PANEL) {
        const vf* own = outputs + (d / PANEL * TILE_ROWS + i) * 2;
        store(out + d, own[0] * inverse);
        store(out + d + LANES, own[1] * inverse);
      }
    }
  }

  // Calls f(from, until) for groups of rows that are multiplied together, as even as possible.
  template <class F>
  void each_few_rows(F f) const {
    const int64_t parts = ceil_div(num_rows, MOST_ROWS);
    for (int64_t i = 0; i < parts; i++) f(i * num_rows / parts, (i + 1) * num_rows / parts);
  }

  void score(const T* queries, const uint32_t* keys, int64_t count) {
    const int64_t stride = InputLayout<bf16>::stride(dim);
    for (int64_t p = 0; p < count; p += PANEL)
      each_few_rows([&](int64_t from, int64_t until) {
        vf sums[MOST_ROWS][2];
        zero(sums);
        add_tile<bf16>(until - from, queries + from * stride, stride, Panel<bf16>(keys + p / PANEL * dim * LANES), dim,
                       {}, sums[0]);
        for (int64_t i = from; i < until; i++) {
          store(scores + i * SCORE_STRIDE + p, sums[i - from][0]);
          store(scores + i * SCORE_STRIDE + p + LANES, sums[i - from][1]);
        }
      });
  }

  // Sets the scores that row i does not see to -inf, among `count` scores from position p on: at both ends.
  void hide(int64_t i, int64_t p, int64_t count) {
    float* own = scores + i * SCORE_STRIDE;
    vf lane;
    for (int64_t j = 0; j < LANES; j++) lane[j] = float(j);
    const int64_t first = first_seen[i] - p, last = last_seen[i] - p;
    const vf from = all(float(first)), to = all(float(last));
    const auto within = [&](int64_t k, int64_t end) {
      for (; k < end; k += LANES) {
        const vf position = lane + float(k);
        store(own + k, (position >= from) & (position <= to) ? load(own + k) : all(-__builtin_inff()));
      }
    };
    const int64_t before = min_of(count, ceil_div(max_of(first, 0), LANES) * LANES);
    within(0, before);
    within(max_of(before, max_of(last + 1, 0) / LANES * LANES), count);
  }

  // Turns a row's scores into weights. correction: the factor for what has been summed so far.
  void softmax(int64_t i, int64_t p, int64_t count) {
    float* own = scores + i * SCORE_STRIDE;
    const float scale = score_scale;
    if (a.softcap)
      for (int64_t k = 0; k < count; k += LANES)
        store(own + k, capped(load(own + k) * float(a.scale), float(a.softcap)));
    hide(i, p, count);
    vf top = all(highest[i]);
    for (int64_t k = 0; k < count; k += LANES) top = max(top, load(own + k));
    float most_of_row = top[0];
    for (int64_t j = 1; j < LANES; j++) most_of_row = top[j] > most_of_row ? top[j] : most_of_row;
    // A row that has seen no position yet has no highest score. With base 0, its weights are all exp(-inf) = 0.
    const float base = most_of_row == -__builtin_inff() ? 0 : most_of_row;
    correction[i] = exp(all((highest[i] - base) * scale))[0];
    highest[i] = most_of_row;
    vf weights = {};
    T* to = reinterpret_cast<T*>(own);
    for (int64_t k = 0; k < count; k += LANES) {
      const vf weight = exp((load(own + k) - base) * scale);
      store(to + k, weight);
      weights += weight;
    }
    total[i] = total[i] * correction[i] + weights;
  }

  void weigh(const uint32_t* values, int64_t positions, int64_t count, vf* outputs) {
    for (int64_t d = 0; d < dim; d += PANEL)
      each_few_rows([&](int64_t from, int64_t until) {
        vf* own = outputs + (d / PANEL * TILE_ROWS + from) * 2;
        for (int64_t i = from; i < until; i++)
          for (int64_t j = 0; j < 2; j++) own[(i - from) * 2 + j] *= correction[i];
        add_tile<bf16>(until - from, reinterpret_cast<const T*>(scores) + from * WEIGHT_STRIDE, WEIGHT_STRIDE,
                       Panel<bf16>(values + d / PANEL * positions * LANES), count, {}, own);
      });
  }
};

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
    parallel_for(heads * tiles, 1, [&](int64_t i) {
      const int64_t head = i % heads,
                    tile = tiles - 1 - i / heads;  // the last tiles see most positions: longest tasks first
      QueryTile query(a, seq, first + head, tile * TILE_ROWS);
      query.run(packed, packed.keys + head * head_words, packed.values + head * head_words,
                thread_scratch.get(QueryTile::bytes(dim)));
    });
  }
}
