// Attention of many rows of one sequence, with an online softmax.

// Multiplies N tiles of one column, left(i, k), by the same tiles right(k). Several at a time hide the latency of each.
template <int N, class Left>
inline void multiply(Left left, int64_t left_stride, const void* right, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(7, static_cast<const uint32_t*>(right) + k * TILE * TILE, 64);
    _tile_loadd(4, left(0, k), left_stride);
    _tile_dpbf16ps(0, 4, 7);
    if constexpr (N > 1) {
      _tile_loadd(5, left(1, k), left_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (N > 2) {
      _tile_loadd(6, left(2, k), left_stride);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(4, left(3, k), left_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (N > 1) _tile_stored(1, sums + TILE * TILE, 64);
  if constexpr (N > 2) _tile_stored(2, sums + 2 * TILE * TILE, 64);
  if constexpr (N > 3) _tile_stored(3, sums + 3 * TILE * TILE, 64);
}
template <class Left>
inline void multiply(int64_t n, Left left, int64_t left_stride, const void* right, int64_t steps, float* sums) {
  switch (n) {
    case 1: return multiply<1>(left, left_stride, right, steps, sums);
    case 2: return multiply<2>(left, left_stride, right, steps, sums);
    case 3: return multiply<3>(left, left_stride, right, steps, sums);
    default: return multiply<4>(left, left_stride, right, steps, sums);
  }
}

// One tile of attention: 16 rows, being the query heads that share a key/value head, token after token.
struct QueryTile {
  const Attend& a;
  const int32_t* table;
  const uint16_t* values;  // [positions / 32][D / 16][16][32], from position `begin` on
  int64_t seq, head, row, begin, group, dim, query_len, num_rows;
  alignas(64) int32_t first_seen[TILE], last_seen[TILE];
  alignas(64) float scores[STEP_KEYS][TILE];
  alignas(64) uint32_t weights[STEP_KEYS / 2][TILE];
  alignas(64) float product[4 * TILE][TILE];

  QueryTile(const Attend& a, const uint16_t* values, int64_t seq, int64_t head, int64_t row, int64_t begin)
      : a(a),
        table(a.tables + seq * a.table_width),
        values(values),
        seq(seq),
        head(head),
        row(row),
        begin(begin),
        group(a.num_heads / a.num_kv_heads),
        dim(a.head_dim),
        query_len(a.starts[seq + 1] - a.starts[seq]),
        num_rows(min_of(TILE, query_len * group - row)) {}

  const bf16* query(int64_t lane) const {
    const int64_t r = row + lane;
    return static_cast<const bf16*>(a.query) +
           ((a.starts[seq] + r / group) * a.num_heads + head * group + r % group) * dim;
  }
  const bf16* key(int64_t position) const {
    const int64_t slot = int64_t(table[position / a.block_size]) * a.block_size + position % a.block_size;
    return static_cast<const bf16*>(a.keys) + (slot * a.num_kv_heads + head) * dim;
  }

  // memory: room for the packed queries, D / 2 x 16 words, and for the outputs, D x 16 floats
  void run(void* memory) {
    uint32_t* queries = static_cast<uint32_t*>(memory);
    float* output = reinterpret_cast<float*>(queries + dim / 2 * TILE);
    const uint32_t* rows[TILE] = {};
    for (int64_t i = 0; i < TILE; i++) {
      const int64_t lane = min_of(i, num_rows - 1);
      rows[i] = reinterpret_cast<const uint32_t*>(query(lane));
      last_seen[i] = a.seq_lens[seq] - query_len + (row + lane) / group;
      first_seen[i] = a.window ? max_of(0, last_seen[i] - a.window + 1) : 0;
    }
    pack_pairs(rows, num_rows, dim / 2, queries);
    __builtin_memset(output, 0, dim * TILE * sizeof(float));
    vf highest = avx512::all(-__builtin_inff()), total = avx512::all(0);
    if (a.sinks) {  // a first score without a value
      for (int64_t i = 0; i < TILE; i++) highest[i] = a.sinks[head * group + (row + min_of(i, num_rows - 1)) % group];
      total = avx512::all(1);
    }
    const int64_t end = last_seen[num_rows - 1] + 1;
    for (int64_t p = first_seen[0] / DEPTH * DEPTH; p < end; p += STEP_KEYS) {
      const int64_t count = min_of(STEP_KEYS, end - p);
      score(queries, p, count);
      const vf correction = softmax(p, count, highest, total);
      weigh(p, count, correction, output);
    }
    const vf inverse = avx512::all(1) / total;
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i r[TILE];
      for (int64_t i = 0; i < TILE; i++) r[i] = (__m512i)(avx512::load(output + (d + i) * TILE) * inverse);
      transpose(r);
      for (int64_t i = 0; i < num_rows; i++)
        avx512::store(static_cast<bf16*>(a.out) + (query(i) - static_cast<const bf16*>(a.query)) + d, (vf)r[i]);
    }
  }

  void score(const uint32_t* queries, int64_t p, int64_t count) {
    const int64_t stride = a.num_kv_heads * dim * sizeof(bf16), tiles = ceil_div(count, TILE);
    for (int64_t i = 0; i < tiles; i += 4) {
      const bf16* keys[4];
      for (int64_t j = 0; j < min_of(4, tiles - i); j++) keys[j] = key(p + (i + j) * TILE);
      const auto left = [&](int64_t j, int64_t k) { return keys[j] + k * DEPTH; };
      multiply(min_of(4, tiles - i), left, stride, queries, dim / DEPTH, scores[i * TILE]);
    }
  }

  // Turns scores into weights, in pairs of positions. Returns the factor for what has been summed so far.
  vf softmax(int64_t p, int64_t count, vf& highest, vf& total) {
    const __m512i first = _mm512_load_si512(first_seen), last = _mm512_load_si512(last_seen);
    const bool all_seen = p >= first_seen[TILE - 1] && p + count - 1 <= last_seen[0];
    const vf scale = avx512::all(float(a.scale)), hidden = avx512::all(-__builtin_inff());
    vf top = highest;
    for (int64_t i = 0; i < count; i++) {
      vf s = avx512::load(scores[i]) * scale;
      if (a.softcap) s = avx512::capped(s, float(a.softcap));
      if (!all_seen) {
        const __m512i position = _mm512_set1_epi32(int32_t(p + i));
        const __mmask16 seen = _mm512_cmple_epi32_mask(position, last) & _mm512_cmpge_epi32_mask(position, first);
        s = (vf)_mm512_mask_mov_ps((__m512)hidden, seen, (__m512)s);
      }
      avx512::store(scores[i], s);
      top = (vf)_mm512_max_ps((__m512)top, (__m512)s);
    }
    // A row that has seen no position yet has no highest score. With base 0, its weights are all exp(-inf) = 0.
    const vf base = (vf)_mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask((__m512)top, (__m512)hidden), (__m512)top);
    const vf correction = avx512::exp(highest - base);
    const int64_t padded = ceil_div(count, DEPTH) * DEPTH;
    for (int64_t i = count; i < padded; i++) avx512::store(scores[i], hidden);
    total *= correction;
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pairs = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
    for (int64_t i = 0; i < padded; i += 2) {
      const vf even = avx512::exp(avx512::load(scores[i]) - base),
               odd = avx512::exp(avx512::load(scores[i + 1]) - base);
      total += even + odd;
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);  // the 16 even ones in the low half
      _mm512_store_si512(weights[i / 2], _mm512_permutexvar_epi16(pairs, both));
    }
    compiler_barrier();
    highest = top;
    return correction;
  }

  void weigh(int64_t p, int64_t count, vf correction, float* output) {
    const int64_t d_tiles = dim / TILE;
    const uint16_t* packed = values + (p - begin) / DEPTH * dim * DEPTH;
    for (int64_t d = 0; d < d_tiles; d += 4) {
      const int64_t n = min_of(4, d_tiles - d);
      const auto left = [&](int64_t j, int64_t k) { return packed + (k * d_tiles + d + j) * TILE * DEPTH; };
      multiply(n, left, 64, weights, ceil_div(count, DEPTH), product[0]);
      for (int64_t i = 0; i < n * TILE; i++) {
        float* sum = output + (d * TILE + i) * TILE;
        avx512::store(sum, avx512::load(sum) * correction + avx512::load(product[i]));
      }
    }
  }
};

// Sequences with enough rows for a tile. The others are computed as without AMX.
bool fits_tiles(const Attend& a, int64_t seq) {
  const int64_t rows = (a.starts[seq + 1] - a.starts[seq]) * (a.num_heads / a.num_kv_heads);
  return a.dtype == BFLOAT16 && a.kv_format == UNQUANTISED && a.head_dim % DEPTH == 0 && a.block_size % TILE == 0 &&
         rows >= TILE;
}

inline __m512i words_at(const uint16_t* row, int64_t d) {
  return row ? (__m512i)avx512::widened(row + d) : _mm512_setzero_si512();
}

void attend_sequence(const Attend& a, int64_t seq, uint16_t* packed) {
  const int64_t heads = a.num_kv_heads, dim = a.head_dim, seq_len = a.seq_lens[seq];
  const int64_t query_len = a.starts[seq + 1] - a.starts[seq];
  const int64_t begin = a.window ? max_of(0, seq_len - query_len + 1 - a.window) / DEPTH * DEPTH : 0;
  const int64_t steps = ceil_div(seq_len - begin, DEPTH), tiles = ceil_div(query_len * a.num_heads / heads, TILE);
  const int32_t* table = a.tables + seq * a.table_width;
  parallel_for(heads * steps, 0, [&](int64_t i) {
    const int64_t head = i / steps, p = begin + i % steps * DEPTH;
    const uint16_t* from[DEPTH];  // null after the end of the sequence, where a block's content must not be multiplied
    for (int64_t j = 0; j < DEPTH; j++) {
      from[j] = nullptr;
      if (p + j >= seq_len) continue;
      const int64_t slot = int64_t(table[(p + j) / a.block_size]) * a.block_size + (p + j) % a.block_size;
      from[j] = static_cast<const uint16_t*>(a.values) + (slot * heads + head) * dim;
    }
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i r[TILE];  // pairs of positions
      for (int64_t j = 0; j < TILE; j++) {
        const __m512i even = words_at(from[2 * j], d), odd = words_at(from[2 * j + 1], d);
        r[j] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      }
      transpose(r);
      for (int64_t j = 0; j < TILE; j++) _mm512_store_si512(packed + i * dim * DEPTH + (d + j) * DEPTH, r[j]);
    }
  });
  parallel_for(heads * tiles, 1, [&](int64_t i) {
    const int64_t head = i % heads,
                  tile = tiles - 1 - i / heads;  // the last tiles see most positions: longest tasks first
    QueryTile query(a, packed + head * steps * dim * DEPTH, seq, head, tile * TILE, begin);
    query.run(thread_scratch.get(dim * TILE * 6));
  });
}
