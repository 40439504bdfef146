// Panels of packed weights that are converted to floats when they are multiplied, for CPUs without bfloat16 products.
//
// Layouts, K being the number of inputs:
//   bfloat16: [K][LANES][2]. A word has an output of the panel's first half below one of its second half, so a shift
//             and a mask make floats of both.
//   int8:     [K][2][LANES].
//   int4:     [K / 32][9][LANES] words per group of 32 inputs. Byte i of word j has input 4 j + i: an output of the
//             first half in the low four bits and one of the second in the high ones. The last word has both scales.

#if WIDTH < 64

template <>
constexpr bool IS_EXPANDED<int8_t> = true;
template <>
constexpr bool IS_EXPANDED<int4x32> = true;
template <>
constexpr bool IS_EXPANDED<mxfp4x32> = true;
template <class W>
constexpr bool IS_GROUPED = !std::is_same<W, int8_t>::value;

// How rows of x are stored for weights of type W, and how much of both is processed at once.
template <class W>
struct InputLayout {
  typedef float T;
  static constexpr int64_t MOST_ROWS = 6;      // multiplied with a panel at once: their sums fill twelve registers
  static constexpr int64_t STRAIGHT_ROWS = 0;  // up to which a panel is read from beginning to end
  // Inputs per part: those of a panel, as floats if it is expanded, and of the rows fit into L1
  static constexpr int64_t NEAR_STEPS = IS_EXPANDED<W> ? 256 : 512;
  static constexpr int64_t UNIT = GROUP;  // inputs that are not separated
  static int64_t stride(int64_t ins) { return whole_lines(ins * sizeof(T)) / sizeof(T); }
  static bool is_usable_in_place(int64_t) { return false; }  // whether rows of x with this stride need no conversion
  static void keep(const bf16* from, int64_t ins, float* to) {
    for (int64_t k = 0; k < ins; k += LANES) store(to + k, load(from + k, ins - k), ins - k);
  }
  static const float* at(const float* row, int64_t k) { return row + k; }
  static float factor(const float*, int64_t) { return 1; }
};

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
    second = high_halves(both);
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
struct Panel<float> {  // an expanded one: [K][2][LANES]
  const vf* numbers;
  Panel() = default;
  explicit Panel(const vf* from) : numbers(from) {}
  void at(int64_t k, vf& first, vf& second) const { first = numbers[2 * k], second = numbers[2 * k + 1]; }
};

struct GroupedPanel {
  static constexpr int64_t GROUP_WORDS = 9 * LANES;
  const uint32_t* words;
  GroupedPanel() = default;
  explicit GroupedPanel(const void* from, int64_t k = 0)
      : words(static_cast<const uint32_t*>(from) + k / GROUP * GROUP_WORDS) {}
  static int64_t bytes(int64_t steps) { return steps * GROUP_WORDS * 4 / GROUP; }
};
template <>
struct Panel<int4x32> : GroupedPanel {
  using GroupedPanel::GroupedPanel;
};
template <>
struct Panel<mxfp4x32> : GroupedPanel {
  using GroupedPanel::GroupedPanel;
};

// The number of a code, from the word that has it at bit SHIFT. Flipping a code's highest bit subtracts 8 from it.
template <int SHIFT>
inline vf number_in(const int4x32*, vu word) {
  return as_floats((vi)((word ^ 0x88888888u) << (28 - SHIFT)) >> 28);
}
template <int SHIFT>
inline vf number_in(const mxfp4x32* tag, vu word) {
  return numbers_of(tag, word >> SHIFT & 15);
}

// Converts `steps` inputs of a panel to floats, as in Panel<float>.
inline void expand(const Panel<int8_t>& panel, int64_t steps, vf* to) {
  for (int64_t k = 0; k < steps; k++) panel.at(k, to[2 * k], to[2 * k + 1]);
}
template <class W>
inline void expand(const Panel<W>& panel, int64_t steps, vf* to) {
  const W* const tag = nullptr;
  for (int64_t g = 0; g < steps / GROUP; g++)
    for (int64_t j = 0; j < 8; j++) {
      const vu word = read<vu>(panel.words + g * GroupedPanel::GROUP_WORDS + j * LANES);
      unroll<8>([&](auto i) __attribute__((always_inline)) { *to++ = number_in<4 * i>(tag, word); });
    }
}

// Multiplies R rows of x, `stride` apart, by P panels and adds the products to sums.
template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<W> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    unroll<P>([&](auto p) __attribute__((always_inline)) {
      vf first, second;
      panels[p].at(k, first, second);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const float value = x[r * stride + k];
        sums[r][p][0] += first * value;
        sums[r][p][1] += second * value;
      });
    });
  };
  int64_t k = 0;
  for (; k + STRIDE_STEPS <= steps; k += STRIDE_STEPS) {
    for (int64_t i = 0; i < prefetch.lines; i++, prefetch.from += 64) __builtin_prefetch(prefetch.from, 0, 2);
    for (int64_t i = 0; i < STRIDE_STEPS; i++) step(k + i);
  }
  for (; k < steps; k++) step(k);
}

// Adds the products of group g, multiplied by the group's scales.
template <class W, int R, int P>
inline __attribute__((always_inline)) void add_scaled(const Panel<W> (&panels)[P], int64_t g,
                                                      const vf (&products)[R][P][2], vf (&sums)[R][P][2]) {
  unroll<P>([&](auto p) __attribute__((always_inline)) {
    const vu scales = read<vu>(panels[p].words + g * GroupedPanel::GROUP_WORDS + 8 * LANES);
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      sums[r][p][0] += products[r][p][0] * (vf)(scales << 16);
      sums[r][p][1] += products[r][p][1] * (vf)(scales & 0xffff0000u);
    });
  });
}

// The same as `multiply` for grouped weights.
template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply_groups(const float* x, int64_t stride, const Panel<W> (&panels)[P],
                                                           int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  const W* const tag = nullptr;
  for (int64_t g = 0; g < steps / GROUP; g++, x += GROUP) {
    for (int64_t i = 0; i < prefetch.lines * GROUP / STRIDE_STEPS; i++, prefetch.from += 64)
      __builtin_prefetch(prefetch.from, 0, 2);
    vf products[R][P][2];
    zero(products);
    for (int64_t j = 0; j < 8; j++) {
      vu words[P];
      unroll<P>([&](auto p) __attribute__((always_inline)) {
        words[p] = read<vu>(panels[p].words + g * GroupedPanel::GROUP_WORDS + j * LANES);
      });
      unroll<4 * P>([&](auto i) __attribute__((always_inline)) {
        constexpr int byte = i / P, p = i % P;
        const vf first = number_in<8 * byte>(tag, words[p]), second = number_in<8 * byte + 4>(tag, words[p]);
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          const float value = x[r * stride + 4 * j + byte];
          products[r][p][0] += first * value;
          products[r][p][1] += second * value;
        });
      });
    }
    add_scaled(panels, g, products, sums);
  }
}

// The same by one panel that is expanded: the same operations in the same order, so that a row's result is the same.
template <class W, int R>
inline __attribute__((always_inline)) void multiply_expanded(const float* x, int64_t stride, const Panel<W>& panel,
                                                             const vf* expanded, int64_t steps, Prefetch prefetch,
                                                             vf (&sums)[R][1][2]) {
  const Panel<W> panels[] = {panel};
  if constexpr (!IS_GROUPED<W>) {
    const Panel<float> numbers[] = {Panel<float>(expanded)};
    multiply(x, stride, numbers, steps, prefetch, sums);
  } else {
    for (int64_t g = 0; g < steps / GROUP; g++, x += GROUP, expanded += 2 * GROUP) {
      const Panel<float> numbers[] = {Panel<float>(expanded)};
      vf products[R][1][2];
      zero(products);
      multiply(x, stride, numbers, GROUP, prefetch, products);
      prefetch.from += prefetch.lines * GROUP / STRIDE_STEPS * 64;
      add_scaled(panels, g, products, sums);
    }
  }
}

template <int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<int4x32> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  multiply_groups(x, stride, panels, steps, prefetch, sums);
}
template <int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<mxfp4x32> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  multiply_groups(x, stride, panels, steps, prefetch, sums);
}

#endif
