// Products with weights that were packed when they were loaded.
//
// A panel is 2 * LANES outs that are summed together. With AMX it lies as tiles read it: see amx.h. Elsewhere it lies
// as it is read in step with the inputs: see panels_of_floats.h and panels_of_pairs.h, of which one is for this level.

constexpr int64_t PANEL = 2 * LANES;

// Which outs the two halves of a panel are: with an activation, gates and what they are gates of.
inline int64_t first_of(const Linear& a, int64_t n) { return a.activation == NONE ? n : n / 2; }
inline int64_t second_of(const Linear& a, int64_t n) { return a.activation == NONE ? n + LANES : (a.outs + n) / 2; }

// What is made of a panel's sums of one row.
template <class T>
inline void finish(const Linear& a, int64_t row, int64_t n, vf first, vf second) {
  if (a.bias) {
    first += load(static_cast<const T*>(a.bias) + first_of(a, n));
    second += load(static_cast<const T*>(a.bias) + second_of(a, n));
  }
  T* out = static_cast<T*>(a.out);
  if (a.activation == NONE) {
    out += row * a.outs + n;
    store(out, first);
    store(out + LANES, second);
  } else {
    store(out + row * (a.outs / 2) + n / 2, gated(a.activation, first, second));
  }
}

constexpr int64_t NEAR_ROWS = 72;      // of x, for so many steps, that stay in the next cache while panels go by
constexpr int64_t NEAR_PANELS = 8;     // that go by
constexpr int64_t ROWS_AT_ONCE = 288;  // that are kept in the form in which they are multiplied

// As many as are taken at once, where at most `most` are: even shares of `count`, in multiples of `unit`, as `most` is.
inline int64_t even_share(int64_t count, int64_t most, int64_t unit) {
  return ceil_div(ceil_div(count, ceil_div(count, most)), unit) * unit;
}

// What is brought near beside the products: cache lines, so many with each STRIDE_STEPS steps, and not into the nearest
// cache, which is full.
struct Fetch {
  const char* from = nullptr;
  int64_t lines = 0;
};
constexpr int64_t STRIDE_STEPS = 8;

// Between two rows, in bytes: whole cache lines, and an odd number of them, since multiples of a power of two would
// meet in one place of a cache.
inline int64_t whole_lines(int64_t bytes) { return (ceil_div(bytes, 64) | 1) * 64; }

#include "panels_of_floats.h"

#include "panels_of_pairs.h"

// The rows of x that are multiplied together, `stride` apart.
template <class W>
struct KeptRows {
  typedef typename Kept<W>::T T;
  const T* at;
  int64_t first, count, stride;
  const T* row(int64_t t) const { return at + (t - first) * stride; }
};

template <class W>
inline void finish_panel(const Linear& a, const KeptRows<W>& x, int64_t row, int64_t n, vf first, vf second) {
  const float factor = Kept<W>::factor(x.row(row), a.ins);
  first *= factor, second *= factor;
  if constexpr (sizeof(W) == 1) {
    first *= load(static_cast<const float*>(a.scales) + first_of(a, n));
    second *= load(static_cast<const float*>(a.scales) + second_of(a, n));
  }
  finish<bf16>(a, row, n, first, second);
}

// Few rows: each panel is read once, several beside each other, so that no sum waits for the one before.
template <class W, int R, int P>
void few_rows(const Linear& a, const KeptRows<W>& x, int64_t panel, int64_t end) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins);
  for (; panel + P <= end; panel += P) {
    vf sums[R][P][2];
    zero(sums);
    Panel<W> panels[P];
    for (int p = 0; p < P; p++) panels[p] = Panel<W>(w + (panel + p) * bytes);
    multiply(x.at, x.stride, panels, a.ins, Fetch{}, sums);
    each<R * P>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / P, p = i % P;
      finish_panel<W>(a, x, x.first + r, (panel + p) * PANEL, sums[r][p][0], sums[r][p][1]);
    });
  }
  if constexpr (P > 1) few_rows<W, R, 1>(a, x, panel, end);
}

template <class W, int R>
inline void add_rows(const typename Kept<W>::T* x, int64_t stride, const Panel<W>& panel, int64_t steps, Fetch fetch,
                     vf* kept) {
  vf sums[R][1][2];
  each<R * 2>([&](auto i) __attribute__((always_inline)) { sums[i / 2][0][i % 2] = kept[i]; });
  const Panel<W> panels[] = {panel};
  multiply(x, stride, panels, steps, fetch, sums);
  each<R * 2>([&](auto i) __attribute__((always_inline)) { kept[i] = sums[i / 2][0][i % 2]; });
}
template <class W, int R = Kept<W>::MOST_ROWS>
inline void add_tile(int64_t rows, const typename Kept<W>::T* x, int64_t stride, const Panel<W>& panel, int64_t steps,
                     Fetch fetch, vf* kept) {
  if (rows == R) return add_rows<W, R>(x, stride, panel, steps, fetch, kept);
  if constexpr (R > 1) return add_tile<W, R - 1>(rows, x, stride, panel, steps, fetch, kept);
}

// Many rows, at most NEAR_ROWS, by panels [panel, end), at most NEAR_PANELS: sums wait in a buffer while others go by.
// Unless there are so few rows that a panel is best read from its beginning to its end, as the hardware foresees.
// after: the panel that follows when these are done.
template <class W>
void many_rows(const Linear& a, const KeptRows<W>& x, int64_t t, int64_t rows, int64_t panel, int64_t end,
               int64_t after) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins), tiles = ceil_div(rows, Kept<W>::MOST_ROWS);
  const int64_t all_lines = ceil_div(Panel<W>::bytes(GROUP), 64 * GROUP / STRIDE_STEPS);
  const bool is_straight = rows <= Kept<W>::STRAIGHT_ROWS;
  const int64_t lines = is_straight ? 0 : ceil_div(all_lines, tiles);
  const int64_t together = is_straight ? a.ins : even_share(a.ins, Kept<W>::NEAR_STEPS, Kept<W>::UNIT);
  vf kept[NEAR_PANELS * NEAR_ROWS * 2];
  __builtin_memset(kept, 0, (end - panel) * rows * 2 * sizeof(vf));
  for (int64_t k = 0; k < a.ins; k += together) {
    const int64_t steps = least(together, a.ins - k);
    for (int64_t p = panel; p < end; p++) {
      const char* next = w + (p + 1) * bytes + Panel<W>::bytes(k);
      if (p + 1 == end) next = k + steps < a.ins ? w + panel * bytes + Panel<W>::bytes(k + steps) : w + after * bytes;
      for (int64_t i = 0; i < tiles; i++) {  // as even as can be
        const int64_t from = i * rows / tiles, until = (i + 1) * rows / tiles;
        vf* const own = kept + ((p - panel) * rows + from) * 2;
        const Fetch fetch{next, i * lines < all_lines ? lines : 0};
        add_tile<W>(until - from, Kept<W>::at(x.row(t + from), k), x.stride, Panel<W>(w + p * bytes, k), steps, fetch,
                    own);
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
size_t kept_bytes(const Linear& a) {
  return least(a.rows, ROWS_AT_ONCE) * Kept<W>::stride(a.ins) * sizeof(typename Kept<W>::T);
}

// Of few rows fewer panels together, so that there is enough to share, and the same for all threads where that can be.
inline int64_t panels_together(int64_t panels, int64_t rows) {
  if (rows > NEAR_ROWS) return NEAR_PANELS;
  for (int64_t n = NEAR_PANELS / 2; n > 1; n--)
    if (panels % (n * calling.num_threads) == 0) return n;
  return NEAR_PANELS / 2;
}

template <class W>
void linear_packed(const Linear& a, void* memory) {
  typedef typename Kept<W>::T T;
  const bool lies_well = Kept<W>::lies_well(a.x_stride);
  const int64_t panels = a.outs / PANEL;
  const int64_t at_once = lies_well ? a.rows : even_share(a.rows, ROWS_AT_ONCE, Kept<W>::MOST_ROWS);
  for (int64_t t = 0; t < a.rows; t += at_once) {
    const bf16* rows = static_cast<const bf16*>(a.x) + t * a.x_stride;
    KeptRows<W> x{static_cast<T*>(memory), t, least(at_once, a.rows - t), Kept<W>::stride(a.ins)};
    if (lies_well) {
      x.at = reinterpret_cast<const T*>(rows), x.stride = a.x_stride;
    } else {
      share(x.count, x.count * a.ins < FEW ? x.count : 0,
            [&](int64_t i) { Kept<W>::keep(rows + i * a.x_stride, a.ins, static_cast<T*>(memory) + i * x.stride); });
    }
    // Of many rows, each member of the team has some to itself, by all panels: they stay in its core's cache.
    const int64_t fair = most(NEAR_ROWS, least(ROWS_AT_ONCE, ceil_div(x.count, calling.num_threads)));
    const int64_t own = even_share(x.count, fair, Kept<W>::MOST_ROWS);
    const int64_t near = even_share(own, NEAR_ROWS, Kept<W>::MOST_ROWS);
    const int64_t together = panels_together(panels, x.count), groups = ceil_div(panels, together);
    const int64_t parts = ceil_div(own, near), pieces = groups * parts;
    // Each piece is then long enough to be taken by itself, and none are left over that one thread does alone.
    share(ceil_div(x.count, own) * pieces, x.count > near, [&](int64_t item) {
      const int64_t from = item % pieces / parts * together, end = least(panels, from + together);
      const int64_t first = item / pieces * own, last = least(x.count, first + own);
      const int64_t row = first + item % parts * near;
      if (row >= last) return;
      const int64_t after = row + near < last ? from : end;
      constexpr int P = sizeof(W) == sizeof(int4x32) ? 1 : 2;  // whose products and sums are apart
      switch (x.count) {
        case 1: return few_rows<W, 1, 2 * P>(a, x, from, end);
        case 2: return few_rows<W, 2, P>(a, x, from, end);
        default: return many_rows<W>(a, x, t + row, least(near, last - row), from, end, after);
      }
    });
  }
}

// Rows of a packed weight of bfloat16.
inline void embed(const Embed& a) {
  constexpr int64_t WORD = WIDTH == 64 ? 2 : 1;  // inputs beside each other
  share(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const bf16* w = static_cast<const bf16*>(a.w) + panel * PANEL * a.ins;
    w += WORD == 1 ? out % LANES * 2 + out / LANES : out * WORD;
    for (int64_t k = 0; k < a.ins; k++)
      static_cast<bf16*>(a.out)[t * a.ins + k] = w[k / WORD * WORD * PANEL + k % WORD];
  });
}
