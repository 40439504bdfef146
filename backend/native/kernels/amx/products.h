// Products with unpacked weights, which are the left operand.

// Prefetches one cache line of each row of the panels after the next: the hardware prefetcher does not follow 32 short
// rows at once.
inline void prefetch_next(const void* row, int64_t row_bytes) {
  for (int64_t i = 2 * TILE; i < 4 * TILE; i++)
    _mm_prefetch(static_cast<const char*>(row) + i * row_bytes, _MM_HINT_T1);
}

template <class W>
struct Panel {  // 16 rows of a weight, converted to bfloat16 32 columns at a time
  avx512::Row<W> rows[TILE];
  alignas(64) uint16_t expanded[TILE][DEPTH];
  Panel(const Linear& a, int64_t n) {
    for (int64_t i = 0; i < TILE; i++) rows[i] = avx512::Row<W>(a, n + i);
  }
  const void* tile(int64_t k) {
    for (int64_t i = 0; i < TILE; i++) _mm512_store_si512(expanded[i], rows[i].pairs(k, DEPTH));
    compiler_barrier();
    return expanded;
  }
  void prefetch_next(int64_t) const {}
  int64_t stride() const { return sizeof expanded[0]; }
};
template <>
struct Panel<bf16> {
  const bf16* rows;
  int64_t ins;
  Panel(const Linear& a, int64_t n) : rows(static_cast<const bf16*>(a.w) + n * a.ins), ins(a.ins) {}
  const void* tile(int64_t k) const { return rows + k; }
  void prefetch_next(int64_t k) const { amx::prefetch_next(rows + k, stride()); }
  int64_t stride() const { return ins * sizeof(bf16); }
};

void store_outputs(const Linear& a, const float* sums, int64_t n, int64_t t) {  // sums: [16 outs][16 rows]
  __m512i r[TILE];
  for (int64_t i = 0; i < TILE; i++) r[i] = _mm512_load_si512(sums + i * TILE);
  transpose(r);
  const vf scales = a.format == INT8 ? avx512::load(static_cast<const float*>(a.scales) + n) : avx512::all(1);
  const vf bias = a.bias ? avx512::load(static_cast<const bf16*>(a.bias) + n) : avx512::all(0);
  bf16* out = static_cast<bf16*>(a.out) + t * a.outs + n;
  for (int64_t i = 0; i < min_of(TILE, a.rows - t); i++) avx512::store(out + i * a.outs, (vf)r[i] * scales + bias);
}

template <class W>
void two_panels(const Linear& a, const uint32_t* packed, int64_t n) {
  Panel<W> first(a, n), second(a, n + TILE);
  alignas(64) float sums[2][TILE * TILE];
  const int64_t steps = a.ins / DEPTH, stride = first.stride();
  for (int64_t t = 0; t < a.rows; t += 2 * TILE) {
    const uint32_t *x0 = packed + t * a.ins / 2, *x1 = x0 + TILE * a.ins / 2;
    const bool both = t + TILE < a.rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
      if (t == 0) first.prefetch_next(k * DEPTH);
      for (int64_t i = 0; i < TILE; i++) {  // prefetches tiles of x
        _mm_prefetch(x0 + ((k + AHEAD) * TILE + i) * TILE, _MM_HINT_T0);
        if (both) _mm_prefetch(x1 + ((k + AHEAD) * TILE + i) * TILE, _MM_HINT_T0);
      }
      _tile_loadd(4, first.tile(k * DEPTH), stride);
      _tile_loadd(6, x0 + k * TILE * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second.tile(k * DEPTH), stride);
      _tile_dpbf16ps(1, 5, 6);
      if (both) {
        _tile_loadd(7, x1 + k * TILE * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    store_outputs(a, sums[0], n, t);
    store_outputs(a, sums[1], n + TILE, t);
    if (!both) continue;
    _tile_stored(2, sums[0], 64);
    _tile_stored(3, sums[1], 64);
    store_outputs(a, sums[0], n, t + TILE);
    store_outputs(a, sums[1], n + TILE, t + TILE);
  }
}

bool fits_tiles(const Linear& a) { return a.dtype == BFLOAT16 && a.ins % DEPTH == 0 && !is_block_type(a.format); }

template <class W>
void linear(const Linear& a, uint32_t* packed) {
  const int64_t tiles = ceil_div(a.rows, TILE), steps = a.ins / DEPTH;
  parallel_for(tiles * steps, 0, [&](int64_t i) {
    const int64_t t = i / steps * TILE, k = i % steps;
    const uint32_t* rows[TILE] = {};
    const int64_t num_rows = min_of(TILE, a.rows - t);
    for (int64_t r = 0; r < num_rows; r++)
      rows[r] = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.x) + (t + r) * a.x_stride) + k * TILE;
    pack_pairs(rows, num_rows, TILE, packed + t * a.ins / 2 + k * TILE * TILE);
  });
  const int64_t panels = a.outs / (2 * TILE);
  parallel_for(panels, 4, [&](int64_t i) { two_panels<W>(a, packed, i * 2 * TILE); });
  avx512::linear_columns<bf16, W>(a, panels * 2 * TILE, a.outs);
}
