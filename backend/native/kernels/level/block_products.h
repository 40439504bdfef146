// Products of int8 by the panels of blocks.h.
//
// Rows of x are quantised to int8, 32 inputs with one scale, as llama.cpp does. The products of a group are summed as
// integers, and then multiplied by the scales of both. Codes are multiplied without subtracting their offset: the sums
// begin with what they will be too large by. Minima are multiplied by the sum of the inputs.

// One word of codes for each output, four inputs each. With AVX-512, tables yield numbers 128 too large, because its
// instruction needs unsigned ones. At other levels, codes of eight bits and tables yield signed numbers.
template <class W>
constexpr bool IS_SIGNED = WIDTH < 64 && W::OFFSET == 128;

inline vu looked_up(vu codes) {
#if WIDTH == 64
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, int8_t(129), int8_t(141), int8_t(153),
                                           int8_t(166), int8_t(181), int8_t(197), int8_t(217), int8_t(241)));
  return (vu)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif WIDTH == 32
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(read<__m128i>(IQ4_VALUES)), (__m256i)codes);
#else
  uint8_t bytes[WIDTH];
  __builtin_memcpy(bytes, &codes, WIDTH);
  for (int64_t i = 0; i < WIDTH; i++) bytes[i] = IQ4_VALUES[bytes[i]];
  return read<vu>(bytes);
#endif
}

// Adds to each lane the products of its four numbers with four inputs. Unsigned codes are below 64.
#if WIDTH == 64
template <bool IS_SIGNED>
inline __attribute__((always_inline)) vi add_products(vi sum, vu w, const int8_t* x) {
  return (vi)add_fours((__m512i)sum, (__m512i)w, x);
}
#elif WIDTH == 32
template <bool IS_SIGNED>
inline __attribute__((always_inline)) vi add_products(vi sum, vu w, const int8_t* x) {
  const __m256i inputs = _mm256_set1_epi32(read<int32_t>(x));
  // The instruction needs one unsigned factor. If both are signed, the sign of a weight, which may be -128, is moved to
  // the input.
  const __m256i pairs = IS_SIGNED
                            ? _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8(inputs, (__m256i)w))
                            : _mm256_maddubs_epi16((__m256i)w, inputs);
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__aarch64__)
template <bool IS_SIGNED>
inline __attribute__((always_inline)) vi add_products(vi sum, vu w, const int8_t* x) {
  const int8x16_t numbers = vreinterpretq_s8_u32((uint32x4_t)w);
  const int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(read<int32_t>(x)));
#if defined(__ARM_FEATURE_DOTPROD)
  return (vi)vdotq_s32((int32x4_t)sum, numbers, inputs);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(numbers), vget_low_s8(inputs));
  const int16x8_t high = vmull_high_s8(numbers, inputs);
  return (vi)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}
#else
template <bool IS_SIGNED>
inline __attribute__((always_inline)) vi add_products(vi sum, vu w, const int8_t* x) {
  for (int i = 0; i < 4; i++) {
    const vu byte = w << (24 - 8 * i);
    sum += (IS_SIGNED ? (vi)byte >> 24 : (vi)(byte >> 24)) * int32_t(x[i]);
  }
  return sum;
}
#endif

// Rows of x: for every 32 inputs a record of so many int8, their scale and what their products are corrected by: for
// each scale of the weight, the excess as an integer; for minima, the sum of the inputs.
template <class W>
struct BlockInputs {
  typedef int8_t T;
  static constexpr int64_t MOST_ROWS = WIDTH == 64 ? 6 : 4;
  static constexpr int64_t STRAIGHT_ROWS = 0;
  static constexpr int64_t NEAR_STEPS = 512;
  static constexpr int64_t UNIT = W::UNIT;
  static constexpr int64_t RECORD = GROUP + sizeof(float) * (1 + W::PARTS);
  static int64_t stride(int64_t ins) { return whole_lines(ins / GROUP * RECORD); }
  static bool is_usable_in_place(int64_t) { return false; }
  static const int8_t* at(const int8_t* row, int64_t k) { return row + k / GROUP * RECORD; }
  static float factor(const int8_t*, int64_t) { return 1; }
  static void keep(const bf16* from, int64_t ins, int8_t* to) {
    for (int64_t k = 0; k < ins; k += GROUP, to += RECORD) {
      vf largest = {};
      for (int64_t i = 0; i < GROUP; i += LANES) {
        const vf value = load(from + k + i);
        largest = max(largest, max(value, -value));
      }
      float top = 0;
      for (int64_t i = 0; i < LANES; i++) top = top > largest[i] ? top : largest[i];
      const float scale = top / 127, inverse = top > 0 ? 127 / top : 0;
      __builtin_memcpy(to + GROUP, &scale, sizeof scale);
      int32_t totals[W::PARTS] = {};
      for (int64_t i = 0; i < GROUP; i += LANES) {
        const vf shifted = load(from + k + i) * inverse + ROUNDER;  // the low bits are the nearest integer
        const vi numbers = (vi)shifted - (vi)all(ROUNDER);
        for (int64_t j = 0; j < LANES; j++) {
          to[i + j] = int8_t(numbers[j]);
          totals[(i + j) * W::PARTS / GROUP] += numbers[j];
        }
      }
      for (int64_t i = 0; i < W::PARTS; i++) {
        const float total = scale * totals[i];
        const int32_t excess = IS_SIGNED<W> ? 0 : -int32_t(W::OFFSET) * totals[i];
        __builtin_memcpy(to + GROUP + sizeof(float) * (1 + i), W::HAS_MINIMA ? (const void*)&total : &excess, 4);
      }
    }
  }

 private:
  static constexpr float ROUNDER = 0x1.8p23f;
};

template <class W>
struct BlockPanel {
  const char* from;
  BlockPanel() = default;
  explicit BlockPanel(const void* w, int64_t k = 0) : from(static_cast<const char*>(w) + bytes(k)) {}
  static int64_t bytes(int64_t steps) { return steps * W::UNIT_BYTES / W::UNIT; }
};

#define FOR_BLOCK_TYPE(W)                    \
  template <>                                \
  struct InputLayout<W> : BlockInputs<W> {}; \
  template <>                                \
  struct Panel<W> : BlockPanel<W> {          \
    using BlockPanel<W>::BlockPanel;         \
  };
FOR_BLOCK_TYPE(q8_0)
FOR_BLOCK_TYPE(q4_0)
FOR_BLOCK_TYPE(iq4_nl)
FOR_BLOCK_TYPE(iq4_xs)
FOR_BLOCK_TYPE(q4_k)
FOR_BLOCK_TYPE(q5_k)
FOR_BLOCK_TYPE(q6_k)
#undef FOR_BLOCK_TYPE

// Word j of a group for both halves of the panel.
template <class W, int j>
inline __attribute__((always_inline)) void words_of(const char* group, vu (&w)[2]) {
  if constexpr (W::BITS == 8) {
    w[0] = read<vu>(group + 2 * j * WIDTH), w[1] = read<vu>(group + (2 * j + 1) * WIDTH);
    if constexpr (IS_SIGNED<W>) w[0] ^= 0x80808080u, w[1] ^= 0x80808080u;
  } else {
    const vu both = read<vu>(group + j * WIDTH);
    w[0] = both & 0x0f0f0f0fu, w[1] = both >> 4 & 0x0f0f0f0fu;
    if constexpr (W::BITS > 4) {
      constexpr int more = W::BITS - 4, together = 4 / more;
      constexpr uint32_t mask = ((1 << more) - 1) * 0x10101010u;
      const vu high = read<vu>(group + (8 + j / together) * WIDTH) >> (j % together * more);
      w[0] |= high << 4 & mask, w[1] |= high & mask;
    }
    if constexpr (W::IS_TABLE) w[0] = looked_up(w[0]), w[1] = looked_up(w[1]);
  }
}

inline vf load_halves(const char* from) {
#if WIDTH == 64
  return (vf)_mm512_cvtph_ps(read<__m256i>(from));
#else
  uint16_t halves[LANES];
  __builtin_memcpy(halves, from, sizeof halves);
  const vu bits = widened(halves);
  return (vf)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
#endif
}

// The scales of a part of a group, and its minima.
template <class W>
inline __attribute__((always_inline)) vf scales_of(const char* unit, const char* group, int part, int half) {
  if constexpr (W::GROUPS == 1) return load_halves(group + W::CODE_BYTES + half * LANES * 2);
  const char* const factors = unit + W::GROUPS * W::GROUP_BYTES + half * LANES * 2;
  return load((const int8_t*)group + W::CODE_BYTES + (2 * part + half) * LANES) * load_halves(factors);
}
template <class W>
inline __attribute__((always_inline)) vf minima_of(const char* unit, const char* group, int half) {
  const char* const factors = unit + W::GROUPS * W::GROUP_BYTES + (2 + half) * LANES * 2;
  return load((const int8_t*)group + W::CODE_BYTES + (2 + half) * LANES) * load_halves(factors);
}

inline float float_at(const int8_t* from) { return read<float>(from); }

template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply_group(const int8_t* const (&rows)[R], const char* const (&units)[P],
                                                          int64_t at, vf (&sums)[R][P][2]) {
  constexpr int WORDS = 8 / W::PARTS;
  unroll<W::PARTS>([&](auto part) __attribute__((always_inline)) {
    constexpr int64_t CORRECTION = GROUP + sizeof(float) * (1 + part);
    vi own[R][P][2];
    unroll<R * P * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / 2 / P;
      own[r][i / 2 % P][i % 2] = W::HAS_MINIMA || IS_SIGNED<W> ? vi{} : vi{} + read<int32_t>(rows[r] + CORRECTION);
    });
    unroll<WORDS * P>([&](auto i) __attribute__((always_inline)) {
      constexpr int j = part * WORDS + i / P, p = i % P;
      vu w[2];
      words_of<W, j>(units[p] + at, w);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        own[r][p][0] = add_products<IS_SIGNED<W>>(own[r][p][0], w[0], rows[r] + 4 * j);
        own[r][p][1] = add_products<IS_SIGNED<W>>(own[r][p][1], w[1], rows[r] + 4 * j);
      });
    });
    unroll<P * 2>([&](auto i) __attribute__((always_inline)) {
      constexpr int p = i / 2, half = i % 2;
      const vf scales = scales_of<W>(units[p], units[p] + at, part, half);
      vf minima = {};
      if constexpr (W::HAS_MINIMA) minima = minima_of<W>(units[p], units[p] + at, half);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        sums[r][p][half] += as_floats(own[r][p][half]) * (scales * float_at(rows[r] + GROUP));
        if constexpr (W::HAS_MINIMA) sums[r][p][half] -= minima * float_at(rows[r] + CORRECTION);
      });
    });
  });
}

// Multiplies R rows of x, `stride` apart, by P panels and adds the products to sums.
template <class W, int R, int P, int64_t BITS = W::BITS>
inline __attribute__((always_inline)) void multiply(const int8_t* x, int64_t stride, const Panel<W> (&panels)[P],
                                                    int64_t steps, Prefetch prefetch, vf (&sums)[R][P][2]) {
  const char* units[P];
  const int8_t* rows[R];  // each in a register, so that all other addresses are constant distances from it
  unroll<R>([&](auto r) __attribute__((always_inline)) { rows[r] = x + r * stride; });
  unroll<P>([&](auto p) __attribute__((always_inline)) { units[p] = panels[p].from; });
  for (int64_t unit = 0; unit < steps / W::UNIT; unit++) {
    for (int64_t g = 0; g < W::GROUPS; g++) {
      for (int64_t i = 0; i < prefetch.lines * GROUP / STRIDE_STEPS; i++, prefetch.from += 64)
        __builtin_prefetch(prefetch.from, 0, 2);
      multiply_group<W>(rows, units, g * W::GROUP_BYTES, sums);
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        rows[r] += InputLayout<W>::RECORD;
        force_reload(rows[r]);
      });
    }
    unroll<P>([&](auto p) __attribute__((always_inline)) { units[p] += W::UNIT_BYTES; });
  }
}
