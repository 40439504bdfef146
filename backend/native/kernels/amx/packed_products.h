// Products with packed weights. They are the right operand, so the results are rows in their final order. Layout:
// panels of 32 outputs, each [steps][2][16 words][16 outputs], where a word has consecutive inputs: two of bfloat16 or
// four of int8. A step of two tiles has the same number of bytes for both.
//
// For int8 weights, inputs are quantised to 16-bit integers relative to the row's largest value, as a high and a low
// byte that are multiplied separately. So no precision of bfloat16 is lost, and no weight has to be converted to
// bfloat16, which would take longer than reading it.

constexpr int64_t PANEL = 2 * TILE;
constexpr int64_t STEP_BYTES = 2 * TILE * 64;
constexpr int64_t PREFETCH_AHEAD = 8;        // steps of a weight, if it is read only once
constexpr int64_t NEAR_BYTES = 1 << 20;      // of x that stay in a core's cache while panels are multiplied
constexpr int64_t ROWS_UNIT = 2 * TILE;      // rows that are multiplied together
constexpr int64_t BYTES = 64;                // products per step of an int8 sum
constexpr float MOST_HALVES = 127 * 256.0f;  // the largest integer whose high byte is an int8

int64_t steps_of(const Linear& a) { return a.ins / (a.format == INT8 ? BYTES : DEPTH); }

// Rows of x as tiles, one after the other; for int8, followed by the scales of all rows. Missing rows of the last tile
// are uninitialised: they take part in no other row's sums.
struct PackedRows {
  char* tiles;
  float* scales;
  int64_t tile_bytes;  // of all steps of 16 rows: for int8 two tiles per step, all high bytes before all low ones
  PackedRows(const Linear& a, void* memory)
      : tiles(static_cast<char*>(memory)), tile_bytes(steps_of(a) * TILE * 64 * (a.format == INT8 ? 2 : 1)) {
    scales = reinterpret_cast<float*>(tiles + ceil_div(a.rows, TILE) * tile_bytes);
  }
  char* tile(int64_t row) const { return tiles + row / TILE * tile_bytes; }
};

void pack_row(const Linear& a, int64_t row, const PackedRows& to) {
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  char* own = to.tile(row) + row % TILE * 64;
  for (int64_t k = 0; k < steps_of(a); k++) _mm512_store_si512(own + k * TILE * 64, _mm512_loadu_si512(x + k * DEPTH));
}

void pack_row_in_halves(const Linear& a, int64_t row, const PackedRows& to) {
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  char *high = to.tile(row) + row % TILE * 64, *low = high + to.tile_bytes / 2;
  const float most_of_row = avx512::largest_of(x, a.ins);
  const float factor = most_of_row > 0 ? MOST_HALVES / most_of_row : 0;
  to.scales[row] = most_of_row / MOST_HALVES;
  for (int64_t k = 0; k < a.ins; k += TILE) {
    const int64_t at = k / BYTES * TILE * BYTES + k % BYTES;
    const __m512i number = _mm512_cvtps_epi32((__m512)(avx512::load(x + k) * factor));
    const __m512i half = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
    _mm_store_si128((__m128i*)(high + at), _mm512_cvtepi32_epi8(half));
    _mm_store_si128((__m128i*)(low + at), _mm512_cvtepi32_epi8(number));  // the remainder is the low byte
  }
}

// A macro, because tile numbers must be literals even if the compiler does not optimise.
#define ADD_PRODUCT(sum, x, w)                    \
  if constexpr (IS_INT8) _tile_dpbssd(sum, x, w); \
  else _tile_dpbf16ps(sum, x, w)

struct Prefetch {  // memory to prefetch while multiplying: `lines` cache lines per step
  const char* from;
  int64_t lines;
  void at(int64_t step) const {
    for (int64_t i = 0; i < lines; i++) _mm_prefetch(from + (step * lines + i) * 64, _MM_HINT_T1);
  }
};

// Multiplies two tiles of x (one without `BOTH`) by a panel. Adds to sums[2 i + j], of tile i of x and outputs 16 j to
// 16 j + 15, or overwrites them if these are the first steps.
template <bool IS_INT8, bool BOTH>
inline void multiply_panel(const char* x0, const char* x1, const char* panel, int64_t steps, Prefetch weights,
                           Prefetch next_sums, bool is_first, float (*sums)[TILE * TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (!is_first) {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
    if constexpr (BOTH) {
      _tile_loadd(2, sums[2], 64);
      _tile_loadd(3, sums[3], 64);
    }
  }
  for (int64_t k = 0; k < steps; k++) {
    const char* w = panel + k * STEP_BYTES;
    weights.at(k);
    next_sums.at(k);
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x0 + k * TILE * 64, 64);
    ADD_PRODUCT(0, 6, 4);
    _tile_loadd(5, w + TILE * 64, 64);
    ADD_PRODUCT(1, 6, 5);
    if constexpr (BOTH) {
      _tile_loadd(7, x1 + k * TILE * 64, 64);
      ADD_PRODUCT(2, 7, 4);
      ADD_PRODUCT(3, 7, 5);
    }
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (BOTH) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
}
#undef ADD_PRODUCT

void finish_rows(const Linear& a, int64_t t, int64_t n, const float (*sums)[TILE * TILE]) {
  for (int64_t i = 0; i < min_of(2 * TILE, a.rows - t); i++) {
    const float* own = sums[i / TILE * 2] + i % TILE * TILE;
    avx512::finish<bf16>(a, t + i, n, avx512::load(own), avx512::load(own + TILE * TILE));
  }
}

// The sums are integers: those of the high bytes, then those of the low bytes.
void finish_rows_int8(const Linear& a, int64_t t, int64_t n, const float* row_scales,
                      const float (*sums)[TILE * TILE]) {
  const float* scales = static_cast<const float*>(a.scales);
  const vf first = avx512::load(scales + avx512::first_of(a, n)),
           second = avx512::load(scales + avx512::second_of(a, n));
  const auto whole = [&](int64_t i, int64_t j) {
    const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums[j] + i * TILE));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 + j] + i * TILE));
    return (vf)_mm512_fmadd_ps(high, _mm512_set1_ps(256), low);
  };
  for (int64_t i = 0; i < min_of(TILE, a.rows - t); i++)
    avx512::finish<bf16>(a, t + i, n, whole(i, 0) * row_scales[t + i] * first,
                         whole(i, 1) * row_scales[t + i] * second);
}

// Steps [from, from + count) of all products: one panel by all rows, then the next panel, which is prefetched
// meanwhile. If these are not all steps, sums are stored in `kept` for the next ones, and the sums of the next rows are
// prefetched, too.
void multiply_packed(const Linear& a, const PackedRows& x, int64_t from, int64_t count, float (*kept)[TILE * TILE]) {
  const bool is_int8 = a.format == INT8, is_first = from == 0, is_last = from + count == steps_of(a);
  const int64_t panels = a.outs / PANEL, rows_at_once = is_int8 ? TILE : 2 * TILE;
  const int64_t passes = ceil_div(a.rows, rows_at_once), panel_bytes = steps_of(a) * STEP_BYTES;
  const int64_t lines = ceil_div(STEP_BYTES / 64, passes);
  const bool are_kept = !is_first || !is_last;
  const auto panel_by_rows = [&](int64_t i) {
    const char* panel = static_cast<const char*>(a.w) + i * panel_bytes + from * STEP_BYTES;
    for (int64_t pass = 0; pass < passes; pass++) {
      const char* share_of_next = panel + panel_bytes + pass * count * lines * 64;
      const Prefetch weights{passes == 1 ? panel + PREFETCH_AHEAD * STEP_BYTES : share_of_next, lines};
      const int64_t t = pass * rows_at_once;
      const char *x0 = x.tile(t) + from * TILE * 64, *x1 = x0 + (is_int8 ? x.tile_bytes / 2 : x.tile_bytes);
      alignas(64) float own[4][TILE * TILE];
      float (*sums)[TILE * TILE] = are_kept ? kept + (i * passes + pass) * 4 : own;
      const Prefetch next{reinterpret_cast<const char*>(sums + 4), are_kept ? ceil_div(sizeof own / 64, count) : 0};
      if (is_int8) multiply_panel<true, true>(x0, x1, panel, count, weights, next, is_first, sums);
      else if (t + TILE < a.rows) multiply_panel<false, true>(x0, x1, panel, count, weights, next, is_first, sums);
      else multiply_panel<false, false>(x0, nullptr, panel, count, weights, next, is_first, sums);
      if (!is_last) continue;
      if (is_int8) finish_rows_int8(a, t, i * PANEL, x.scales, sums);
      else finish_rows(a, t, i * PANEL, sums);
    }
  };
  parallel_for(panels, max_of(1, panels / (call_settings.num_threads * 2 * TASKS_PER_THREAD)), panel_by_rows);
}

// How many steps are processed together: all, unless x is too large for a core's cache.
int64_t steps_together(const Linear& a) {
  return ceil_div(steps_of(a), ceil_div(a.rows * a.ins * int64_t(sizeof(bf16)), NEAR_BYTES));
}

// How many rows are processed together. If x is too large for a core's cache, there are two ways: as many rows as fit
// beside two panels, reading the weight again for the next rows; or some steps of all rows, writing and reading sums in
// between. The way that moves fewer bytes is chosen.
int64_t rows_together(const Linear& a) {
  const int64_t parts = ceil_div(steps_of(a), steps_together(a)), panel_bytes = steps_of(a) * STEP_BYTES;
  const int64_t row_bytes = a.ins * sizeof(bf16), sum_bytes = (a.format == INT8 ? 2 : 1) * sizeof(float);
  const int64_t near = (NEAR_BYTES - 2 * panel_bytes) / row_bytes / ROWS_UNIT * ROWS_UNIT;
  if (parts == 1 || near <= 0) return a.rows;
  const int64_t bytes_of_weight = (ceil_div(a.rows, near) - 1) * (a.outs / PANEL) * panel_bytes;
  const int64_t bytes_of_sums = (2 * parts - 1) * a.rows * a.outs * sum_bytes;
  return bytes_of_weight < bytes_of_sums ? avx512::even_part(a.rows, near, ROWS_UNIT) : a.rows;
}

// The product of `count` rows from row t on.
Linear some_rows(const Linear& a, int64_t t, int64_t count) {
  Linear some = a;
  some.x = static_cast<const bf16*>(a.x) + t * a.x_stride;
  some.out = static_cast<bf16*>(a.out) + t * (a.activation == NONE ? a.outs : a.outs / 2);
  some.rows = count;
  return some;
}

size_t packed_rows_bytes(const Linear& a) {
  return ceil_div(ceil_div(a.rows, TILE) * TILE * (a.ins * sizeof(bf16) + sizeof(float)), 64) * 64;
}

// The size of packed rows and stored sums: enough for any number of rows up to this one, as a mixture of experts needs.
size_t packed_bytes(const Linear& a) {
  if (steps_together(a) == steps_of(a)) return packed_rows_bytes(a);
  const int64_t sums = ceil_div(a.rows, PANEL) * PANEL * a.outs * (a.format == INT8 ? 2 : 1);
  return packed_rows_bytes(a) + sums * sizeof(float);
}

void multiply_rows(const Linear& a, void* memory) {
  const PackedRows x(a, memory);
  const bool is_int8 = a.format == INT8;
  parallel_for(a.rows, 0, [&](int64_t row) { is_int8 ? pack_row_in_halves(a, row, x) : pack_row(a, row, x); });
  compiler_barrier();
  float (*kept)[TILE * TILE] = reinterpret_cast<float (*)[TILE * TILE]>(x.tiles + packed_rows_bytes(a));
  const int64_t together = steps_together(a);
  for (int64_t from = 0; from < steps_of(a); from += together)
    multiply_packed(a, x, from, min_of(together, steps_of(a) - from), kept);
}

void linear_packed(const Linear& a, void* memory) {
  const int64_t together = rows_together(a);
  for (int64_t t = 0; t < a.rows; t += together) multiply_rows(some_rows(a, t, min_of(together, a.rows - t)), memory);
}

void embed(const Embed& a) {
  const int64_t steps = a.ins / DEPTH;
  const __m512i words = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi32(TILE));
  parallel_for(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const int64_t at = panel * steps * STEP_BYTES + out / TILE * TILE * 64 + out % TILE * 4;
    const char* w = static_cast<const char*>(a.w) + at;
    for (int64_t k = 0; k < steps; k++)
      _mm512_storeu_si512(static_cast<bf16*>(a.out) + t * a.ins + k * DEPTH,
                          _mm512_i32gather_epi32(words, w + k * STEP_BYTES, 4));
  });
}
