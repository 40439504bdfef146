// Products with weights that were packed when they were loaded.
//
// A panel is 2 * LANES outputs that are summed together. Its layout for AMX is that of tiles: see amx.h. Otherwise it
// is stored in the order of the inputs: see panels_of_floats.h and panels_of_pairs.h, one of which is used at this
// level.
//
// `linear_packed` converts the inputs to the layout that the panels are multiplied with (InputLayout), in groups of
// rows that fit into a core's cache, and runs few_rows or many_rows on the team.

constexpr int64_t PANEL = 2 * LANES;

// The outputs of the two halves of a panel. With an activation: gates, and what they are gates of.
inline int64_t first_of(const Linear& a, int64_t n) { return a.activation == NONE ? n : n / 2; }
inline int64_t second_of(const Linear& a, int64_t n) { return a.activation == NONE ? n + LANES : (a.outs + n) / 2; }

// Applies bias and activation to a panel's sums of one row, and stores them.
template <class T>
inline void finish(const Linear& a, int64_t row, int64_t n, vf first, vf second) {
  if (a.bias) {
    first += load(static_cast<const T*>(a.bias) + first_of(a, n));
    second += load(static_cast<const T*>(a.bias) + second_of(a, n));
  }
  T* out = static_cast<T*>(a.out);
  const int64_t stride = is_block_type(a.format) ? a.out_stride : a.activation == NONE ? a.outs : a.outs / 2;
  if (a.activation == NONE) {
    out += row * stride + n;
    store(out, first);
    store(out + LANES, second);
  } else {
    store(out + row * stride + n / 2, gated(a.activation, first, second));
  }
}

constexpr int64_t NEAR_ROWS =
    72;  // rows of x that stay in the L2 cache while NEAR_PANELS panels are multiplied with them
constexpr int64_t NEAR_PANELS = 8;     // panels per task
constexpr int64_t ROWS_AT_ONCE = 288;  // rows of x that are converted at once

// Divides `count` into even parts of at most `most`, in multiples of `unit`. `most` is a multiple of `unit`, too.
inline int64_t even_part(int64_t count, int64_t most, int64_t unit) {
  return ceil_div(ceil_div(count, ceil_div(count, most)), unit) * unit;
}

// Memory to prefetch while multiplying: `lines` cache lines with every STRIDE_STEPS steps, into L2, because L1 is full.
struct Prefetch {
  const char* from = nullptr;
  int64_t lines = 0;
};
constexpr int64_t STRIDE_STEPS = 8;

// A row stride in bytes: an odd number of whole cache lines, because rows whose stride is a multiple of a power of two
// would compete for the same sets of a cache.
inline int64_t whole_lines(int64_t bytes) { return (ceil_div(bytes, 64) | 1) * 64; }

// Whether a panel of this type is converted once for several tiles of rows, because converting it for each takes
// longer.
template <class W>
constexpr bool IS_EXPANDED = false;

#include "panels_of_floats.h"

#include "panels_of_pairs.h"

// Converted rows of x that are multiplied together, `stride` apart.
template <class W>
struct InputRows {
  typedef typename InputLayout<W>::T T;
  const T* at;
  int64_t first, count, stride;
  const T* row(int64_t t) const { return at + (t - first) * stride; }
};

template <class W>
inline void finish_panel(const Linear& a, const InputRows<W>& x, int64_t row, int64_t n, vf first, vf second) {
  const float factor = InputLayout<W>::factor(x.row(row), a.ins);
  first *= factor, second *= factor;
  if constexpr (sizeof(W) == 1) {
    first *= load(static_cast<const float*>(a.scales) + first_of(a, n));
    second *= load(static_cast<const float*>(a.scales) + second_of(a, n));
  }
  finish<bf16>(a, row, n, first, second);
}

// Bytes of panels that few rows prefetch while they multiply the ones before: with AVX2, of grouped weights, which take
// longer to multiply than to read. Where reading takes longer, the hardware's prefetcher is better, and is disturbed.
template <class W>
constexpr int64_t PREFETCHED_PANELS = 0;
template <>
constexpr int64_t PREFETCHED_PANELS<int4x32> = WIDTH == 32 ? 256 << 10 : 0;
template <>
constexpr int64_t PREFETCHED_PANELS<mxfp4x32> = PREFETCHED_PANELS<int4x32>;

// One or two rows: P panels at once, each read once, so that no sum waits for the previous one.
template <class W, int R, int P>
void few_rows(const Linear& a, const InputRows<W>& x, int64_t panel, int64_t end) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins);
  const int64_t lines =
      P * bytes <= PREFETCHED_PANELS<W> ? ceil_div(P * Panel<W>::bytes(GROUP), 64 * GROUP / STRIDE_STEPS) : 0;
  for (; panel + P <= end; panel += P) {
    vf sums[R][P][2];
    zero(sums);
    Panel<W> panels[P];
    for (int p = 0; p < P; p++) panels[p] = Panel<W>(w + (panel + p) * bytes);
    multiply(x.at, x.stride, panels, a.ins, Prefetch{w + (panel + P) * bytes, lines}, sums);
    unroll<R * P>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / P, p = i % P;
      finish_panel<W>(a, x, x.first + r, (panel + p) * PANEL, sums[r][p][0], sums[r][p][1]);
    });
  }
  if constexpr (P > 1) few_rows<W, R, 1>(a, x, panel, end);
}

template <class W, int R>
inline void add_rows(const typename InputLayout<W>::T* x, int64_t stride, const Panel<W>& panel, int64_t steps,
                     Prefetch prefetch, vf* kept) {
  vf sums[R][1][2];
  unroll<R * 2>([&](auto i) __attribute__((always_inline)) { sums[i / 2][0][i % 2] = kept[i]; });
  const Panel<W> panels[] = {panel};
  multiply(x, stride, panels, steps, prefetch, sums);
  unroll<R * 2>([&](auto i) __attribute__((always_inline)) { kept[i] = sums[i / 2][0][i % 2]; });
}
template <class W, int R = InputLayout<W>::MOST_ROWS>
inline void add_tile(int64_t rows, const typename InputLayout<W>::T* x, int64_t stride, const Panel<W>& panel,
                     int64_t steps, Prefetch prefetch, vf* kept) {
  if (rows == R) return add_rows<W, R>(x, stride, panel, steps, prefetch, kept);
  if constexpr (R > 1) return add_tile<W, R - 1>(rows, x, stride, panel, steps, prefetch, kept);
}

// As add_tile, by a panel that is expanded.
template <class W, int R = InputLayout<W>::MOST_ROWS>
inline void add_expanded_tile(int64_t rows, const float* x, int64_t stride, const Panel<W>& panel, const vf* expanded,
                              int64_t steps, Prefetch prefetch, vf* kept) {
  if constexpr (R > 1)
    if (rows < R) return add_expanded_tile<W, R - 1>(rows, x, stride, panel, expanded, steps, prefetch, kept);
  vf sums[R][1][2];
  unroll<R * 2>([&](auto i) __attribute__((always_inline)) { sums[i / 2][0][i % 2] = kept[i]; });
  multiply_expanded(x, stride, panel, expanded, steps, prefetch, sums);
  unroll<R * 2>([&](auto i) __attribute__((always_inline)) { kept[i] = sums[i / 2][0][i % 2]; });
}

// Many rows, at most NEAR_ROWS, by panels [panel, end), at most NEAR_PANELS. Inputs are processed in parts, and sums
// wait in a buffer between them. With at most STRAIGHT_ROWS rows, a panel is read from beginning to end instead, which
// the hardware prefetches best. after: the panel that this thread needs next.
template <class W>
void many_rows(const Linear& a, const InputRows<W>& x, int64_t t, int64_t rows, int64_t panel, int64_t end,
               int64_t after) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins), tiles = ceil_div(rows, InputLayout<W>::MOST_ROWS);
  const int64_t all_lines = ceil_div(Panel<W>::bytes(GROUP), 64 * GROUP / STRIDE_STEPS);
  const bool is_straight = rows <= InputLayout<W>::STRAIGHT_ROWS;
  const int64_t lines = is_straight ? 0 : ceil_div(all_lines, tiles);
  const int64_t together = is_straight ? a.ins : even_part(a.ins, InputLayout<W>::NEAR_STEPS, InputLayout<W>::UNIT);
  const bool expands = IS_EXPANDED<W> && tiles > 2;
  vf expanded[IS_EXPANDED<W> ? InputLayout<W>::NEAR_STEPS * 2 : 1];
  vf kept[NEAR_PANELS * NEAR_ROWS * 2];
  __builtin_memset(kept, 0, (end - panel) * rows * 2 * sizeof(vf));
  for (int64_t k = 0; k < a.ins; k += together) {
    const int64_t steps = min_of(together, a.ins - k);
    for (int64_t p = panel; p < end; p++) {
      const char* next = w + (p + 1) * bytes + Panel<W>::bytes(k);
      if (p + 1 == end) next = k + steps < a.ins ? w + panel * bytes + Panel<W>::bytes(k + steps) : w + after * bytes;
      const Panel<W> own_panel(w + p * bytes, k);
      if constexpr (IS_EXPANDED<W>)
        if (expands) expand(own_panel, steps, expanded);
      for (int64_t i = 0; i < tiles; i++) {  // as even as possible
        const int64_t from = i * rows / tiles, until = (i + 1) * rows / tiles;
        vf* const own = kept + ((p - panel) * rows + from) * 2;
        const Prefetch prefetch{next, i * lines < all_lines ? lines : 0};
        const auto* const inputs = InputLayout<W>::at(x.row(t + from), k);
        if constexpr (IS_EXPANDED<W>) {
          if (expands) add_expanded_tile<W>(until - from, inputs, x.stride, own_panel, expanded, steps, prefetch, own);
        }
        if (!expands) add_tile<W>(until - from, inputs, x.stride, own_panel, steps, prefetch, own);
        next += steps / STRIDE_STEPS * lines * 64;
      }
    }
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t p = panel; p < end; p++) {
      const vf* own = kept + ((p - panel) * rows + i) * 2;
      finish_panel<W>(a, x, t + i, p * PANEL, own[0], own[1]);
    }
}

template <class W>
size_t input_bytes(const Linear& a) {
  return min_of(a.rows, ROWS_AT_ONCE) * InputLayout<W>::stride(a.ins) * sizeof(typename InputLayout<W>::T);
}

// Panels per task: fewer for few rows, so that there are enough tasks, if possible the same number for all threads.
inline int64_t panels_together(int64_t panels, int64_t rows) {
  if (rows > NEAR_ROWS) return NEAR_PANELS;
  for (int64_t n = NEAR_PANELS / 2; n > 1; n--)
    if (panels % (n * call_settings.num_threads) == 0) return n;
  return NEAR_PANELS / 2;
}

template <class W>
constexpr int FEW_PANELS = WIDTH == 64 ? 1 : 2;  // that two rows are multiplied with at once
// Grouped weights need separate registers for products and sums.
template <>
constexpr int FEW_PANELS<int4x32> = 1;
template <>
constexpr int FEW_PANELS<mxfp4x32> = 1;
// For one row. Reading bfloat16 takes longer than multiplying it, and a core reads fewer streams of memory faster.
template <class W>
constexpr int ONE_ROW_PANELS = WIDTH == 64                 ? 1
                               : sizeof(W) == sizeof(bf16) ? FEW_PANELS<W>
                                                           : 2 * FEW_PANELS<W>;

template <class W>
void linear_packed(const Linear& a, void* memory) {
  typedef typename InputLayout<W>::T T;
  const bool is_usable_in_place = InputLayout<W>::is_usable_in_place(a.x_stride);
  const int64_t panels = a.outs / PANEL;
  const int64_t at_once = is_usable_in_place ? a.rows : even_part(a.rows, ROWS_AT_ONCE, InputLayout<W>::MOST_ROWS);
  for (int64_t t = 0; t < a.rows; t += at_once) {
    const bf16* rows = static_cast<const bf16*>(a.x) + t * a.x_stride;
    InputRows<W> x{static_cast<T*>(memory), t, min_of(at_once, a.rows - t), InputLayout<W>::stride(a.ins)};
    if (is_usable_in_place) {
      x.at = reinterpret_cast<const T*>(rows), x.stride = a.x_stride;
    } else {
      parallel_for(x.count, x.count * a.ins < MIN_SHARED_ITEMS ? x.count : 0, [&](int64_t i) {
        InputLayout<W>::keep(rows + i * a.x_stride, a.ins, static_cast<T*>(memory) + i * x.stride);
      });
    }
    // Each thread gets its own rows and multiplies them with all panels, so that they stay in its core's cache.
    const int64_t fair = max_of(NEAR_ROWS, min_of(ROWS_AT_ONCE, ceil_div(x.count, call_settings.num_threads)));
    const int64_t own = even_part(x.count, fair, InputLayout<W>::MOST_ROWS);
    const int64_t near = even_part(own, NEAR_ROWS, InputLayout<W>::MOST_ROWS);
    const int64_t together = panels_together(panels, x.count), groups = ceil_div(panels, together);
    const int64_t parts = ceil_div(own, near), pieces = groups * parts;
    // With many rows, a piece is long enough to be a task of its own.
    parallel_for(ceil_div(x.count, own) * pieces, x.count > near, [&](int64_t item) {
      const int64_t from = item % pieces / parts * together, end = min_of(panels, from + together);
      const int64_t first = item / pieces * own, last = min_of(x.count, first + own);
      const int64_t row = first + item % parts * near;
      if (row >= last) return;
      const int64_t after = row + near < last ? from : end;
      switch (x.count) {
        case 1: return few_rows<W, 1, ONE_ROW_PANELS<W>>(a, x, from, end);
        case 2: return few_rows<W, 2, FEW_PANELS<W>>(a, x, from, end);
        default: return many_rows<W>(a, x, t + row, min_of(near, last - row), from, end, after);
      }
    });
  }
}

// Rows of a packed bfloat16 weight.
inline void embed(const Embed& a) {
  constexpr int64_t WORD = WIDTH == 64 ? 2 : 1;  // consecutive inputs in one word
  parallel_for(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const bf16* w = static_cast<const bf16*>(a.w) + panel * PANEL * a.ins;
    w += WORD == 1 ? out % LANES * 2 + out / LANES : out * WORD;
    for (int64_t k = 0; k < a.ins; k++)
      static_cast<bf16*>(a.out)[t * a.ins + k] = w[k / WORD * WORD * PANEL + k % WORD];
  });
}
