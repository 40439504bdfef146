// Products with weights that were packed when they were loaded.
//
// A panel is 2 * LANES outs that are summed together. With AMX it lies as tiles read it: see amx.h. Elsewhere it is
// read in step with one input after the other: of bfloat16 [K][LANES][2], so that a word holds an out of the panel's
// first half below one of its second, and a shift and a mask make floats of both; of int8 [K][2][LANES]; of int4 in
// groups of 32 inputs [K / 32][9][LANES] words, of which byte i of word j has input 4 j + i, an out of the first half
// in the low four bits and one of the second in the high ones, and the last word has the two scales.

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
    first = a.activation == SILU ? silu(first) : gelu(first);
    store(out + row * (a.outs / 2) + n / 2, first * second);
  }
}

#if WIDTH < 64  // wider ones have products of bfloat16

constexpr int64_t MOST_ROWS = 6;       // that a panel is multiplied with at once: its sums fill twelve registers
constexpr int64_t NEAR_STEPS = 512;    // of a panel, and as many of the rows beside it, that stay in the nearest cache
constexpr int64_t NEAR_ROWS = 72;      // of x, for so many steps, that stay in the next one while panels go by
constexpr int64_t NEAR_PANELS = 8;     // that go by
constexpr int64_t ROWS_AT_ONCE = 288;  // that are made floats before they are multiplied

template <class W>
struct Panel;
template <>
struct Panel<bf16> {
  const uint32_t* words;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0) : words(static_cast<const uint32_t*>(from) + k * LANES) {}
  void at(int64_t k, vf& first, vf& second) const {
    const vu both = read<vu>(words + k * LANES);
    first = (vf)(both << 16);
    second = (vf)(both & 0xffff0000u);
  }
  static int64_t bytes(int64_t steps) { return steps * LANES * 4; }
};
template <>
struct Panel<int8_t> {
  const int8_t* numbers;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0) : numbers(static_cast<const int8_t*>(from) + k * PANEL) {}
  void at(int64_t k, vf& first, vf& second) const {
    first = load(numbers + k * PANEL);
    second = load(numbers + k * PANEL + LANES);
  }
  static int64_t bytes(int64_t steps) { return steps * PANEL; }
};

template <>
struct Panel<int4x32> {
  static constexpr int64_t GROUP_WORDS = 9 * LANES;
  const uint32_t* words;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0)
      : words(static_cast<const uint32_t*>(from) + k / GROUP * GROUP_WORDS) {}
  static int64_t bytes(int64_t steps) { return steps * GROUP_WORDS * 4 / GROUP; }
};

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

// R rows of x, `stride` floats apart, by P panels: added to sums.
template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<W> (&panels)[P],
                                                    int64_t steps, Fetch fetch, vf (&sums)[R][P][2]) {
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    for (int p = 0; p < P; p++) {
      vf first, second;
      panels[p].at(k, first, second);
      for (int r = 0; r < R; r++) {
        const float value = x[r * stride + k];
        sums[r][p][0] += first * value;
        sums[r][p][1] += second * value;
      }
    }
  };
  int64_t k = 0;
  for (; k + STRIDE_STEPS <= steps; k += STRIDE_STEPS) {
    for (int64_t i = 0; i < fetch.lines; i++, fetch.from += 64) __builtin_prefetch(fetch.from, 0, 2);
    for (int64_t i = 0; i < STRIDE_STEPS; i++) step(k + i);
  }
  for (; k < steps; k++) step(k);
}

// The same, of whole groups: a group's numbers, as they are held, and what they are held too large by.
template <int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<int4x32> (&panels)[P],
                                                    int64_t steps, Fetch fetch, vf (&sums)[R][P][2]) {
  for (int64_t g = 0; g < steps / GROUP; g++, x += GROUP) {
    for (int64_t i = 0; i < fetch.lines * GROUP / STRIDE_STEPS; i++, fetch.from += 64)
      __builtin_prefetch(fetch.from, 0, 2);
    vf products[R][P][2];
    zero(products);
    for (int64_t j = 0; j < 8; j++) {
      vu words[P];
      for (int p = 0; p < P; p++) words[p] = read<vu>(panels[p].words + g * Panel<int4x32>::GROUP_WORDS + j * LANES);
      const auto step = [&](auto index) __attribute__((always_inline)) {
        constexpr int I = sizeof index - 1;
        for (int p = 0; p < P; p++) {
          const vf first = as_floats((vi)(words[p] >> (8 * I) & 15)),
                   second = as_floats((vi)(words[p] >> (8 * I + 4) & 15));
          for (int r = 0; r < R; r++) {
            const float value = x[r * stride + 4 * j + I];
            products[r][p][0] += first * value;
            products[r][p][1] += second * value;
          }
        }
      };
      struct First {
        char size[1];
      };
      struct Second {
        char size[2];
      };
      struct Third {
        char size[3];
      };
      struct Fourth {
        char size[4];
      };
      step(First{}), step(Second{}), step(Third{}), step(Fourth{});
    }
    for (int r = 0; r < R; r++) {
      vf all_of_group = {};
      for (int64_t k = 0; k < GROUP; k += LANES) all_of_group += load(x + r * stride + k);
      const float excess = 8 * sum(all_of_group);
      for (int p = 0; p < P; p++) {
        const vu scales = read<vu>(panels[p].words + g * Panel<int4x32>::GROUP_WORDS + 8 * LANES);
        sums[r][p][0] += (products[r][p][0] - excess) * (vf)(scales << 16);
        sums[r][p][1] += (products[r][p][1] - excess) * (vf)(scales & 0xffff0000u);
      }
    }
  }
}

// The rows of x that are multiplied together, as floats, `stride` apart.
struct FloatRows {
  float* at;
  int64_t first, count, stride;
  const float* row(int64_t t) const { return at + (t - first) * stride; }
};

template <class W>
inline void finish_panel(const Linear& a, int64_t row, int64_t n, vf first, vf second) {
  if constexpr (sizeof(W) == 1) {
    first *= load(static_cast<const float*>(a.scales) + first_of(a, n));
    second *= load(static_cast<const float*>(a.scales) + second_of(a, n));
  }
  finish<bf16>(a, row, n, first, second);
}

// Few rows: each panel is read once, several beside each other, so that no sum waits for the one before.
template <class W, int R, int P>
void few_rows(const Linear& a, const FloatRows& x, int64_t panel, int64_t end) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins);
  for (; panel + P <= end; panel += P) {
    vf sums[R][P][2];
    zero(sums);
    Panel<W> panels[P];
    for (int p = 0; p < P; p++) panels[p] = Panel<W>(w + (panel + p) * bytes);
    multiply(x.at, x.stride, panels, a.ins, Fetch{}, sums);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) finish_panel<W>(a, x.first + r, (panel + p) * PANEL, sums[r][p][0], sums[r][p][1]);
  }
  if constexpr (P > 1) few_rows<W, R, 1>(a, x, panel, end);
}

template <class W, int R>
inline void add_tile(const float* x, int64_t stride, const Panel<W>& panel, int64_t steps, Fetch fetch, vf* kept) {
  vf sums[R][1][2];
  __builtin_memcpy(sums, kept, sizeof sums);
  const Panel<W> panels[] = {panel};
  multiply(x, stride, panels, steps, fetch, sums);
  __builtin_memcpy(kept, sums, sizeof sums);
}
template <class W>
inline void add_tile(int64_t rows, const float* x, int64_t stride, const Panel<W>& panel, int64_t steps, Fetch fetch,
                     vf* kept) {
  switch (rows) {
    case 1: return add_tile<W, 1>(x, stride, panel, steps, fetch, kept);
    case 2: return add_tile<W, 2>(x, stride, panel, steps, fetch, kept);
    case 3: return add_tile<W, 3>(x, stride, panel, steps, fetch, kept);
    case 4: return add_tile<W, 4>(x, stride, panel, steps, fetch, kept);
    case 5: return add_tile<W, 5>(x, stride, panel, steps, fetch, kept);
    default: return add_tile<W, 6>(x, stride, panel, steps, fetch, kept);
  }
}

// Many rows, at most NEAR_ROWS, by panels [panel, end), at most NEAR_PANELS: sums wait in a buffer while others go by.
// after: the panel that follows when these are done.
template <class W>
void many_rows(const Linear& a, const FloatRows& x, int64_t t, int64_t rows, int64_t panel, int64_t end,
               int64_t after) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins), tiles = ceil_div(rows, MOST_ROWS);
  const int64_t all_lines = ceil_div(Panel<W>::bytes(GROUP), 64 * GROUP / STRIDE_STEPS);
  const int64_t lines = ceil_div(all_lines, tiles), together = even_share(a.ins, NEAR_STEPS, GROUP);
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
        add_tile<W>(until - from, x.row(t + from) + k, x.stride, Panel<W>(w + p * bytes, k), steps, fetch, own);
        next += steps / STRIDE_STEPS * lines * 64;
      }
    }
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t p = panel; p < end; p++) {
      const vf* own = kept + ((p - panel) * rows + i) * 2;
      finish_panel<W>(a, t + i, p * PANEL, own[0], own[1]);
    }
}

// Between two rows of x as floats: whole cache lines, and never a power of two, whose multiples would meet in one place
// of a cache.
inline int64_t float_stride(int64_t ins) { return ceil_div(ins, 16) * 16 + 16; }

template <class W>
void linear_packed(const Linear& a, void* memory) {
  const int64_t panels = a.outs / PANEL, at_once = even_share(a.rows, ROWS_AT_ONCE, MOST_ROWS);
  for (int64_t t = 0; t < a.rows; t += at_once) {
    const FloatRows x{static_cast<float*>(memory), t, least(at_once, a.rows - t), float_stride(a.ins)};
    share(x.count, x.count * a.ins < FEW ? x.count : 0, [&](int64_t i) {
      const bf16* from = static_cast<const bf16*>(a.x) + (t + i) * a.x_stride;
      float* to = x.at + i * x.stride;
      for (int64_t k = 0; k < a.ins; k += LANES) store(to + k, load(from + k, a.ins - k), a.ins - k);
    });
    // Of few rows, fewer panels together, so that there is enough to share.
    const int64_t together = x.count > NEAR_ROWS ? NEAR_PANELS : NEAR_PANELS / 2;
    const int64_t near = even_share(x.count, NEAR_ROWS, MOST_ROWS);
    const int64_t groups = ceil_div(panels, together), parts = ceil_div(x.count, near);
    share(groups * parts, 0, [&](int64_t item) {
      const int64_t from = item / parts * together, end = least(panels, from + together);
      const int64_t row = item % parts * near, after = row + near < x.count ? from : end;
      constexpr int P = sizeof(W) == sizeof(int4x32) ? 1 : 2;  // whose products and sums are apart
      switch (x.count) {
        case 1: return few_rows<W, 1, 2 * P>(a, x, from, end);
        case 2: return few_rows<W, 2, P>(a, x, from, end);
        default: return many_rows<W>(a, x, t + row, least(near, x.count - row), from, end, after);
      }
    });
  }
}

// Rows of a packed weight of bfloat16.
inline void embed(const Embed& a) {
  share(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const bf16* w = static_cast<const bf16*>(a.w) + panel * PANEL * a.ins + out % LANES * 2 + out / LANES;
    for (int64_t k = 0; k < a.ins; k++) static_cast<bf16*>(a.out)[t * a.ins + k] = w[k * PANEL];
  });
}

#endif
