// Weights in the types of GGUF files: how a block is read, and how blocks are interleaved in panels.
//
// A type stores UNIT inputs of one output together (`decode` reads them). A panel has units of UNIT inputs of its 2 *
// LANES outputs; a unit has groups of 32 inputs, each codes and then scales, and after all groups its own scales:
//   codes of 8 bits:      [8][2][LANES][4]: a word has four inputs of one output
//   codes of 4 bits:      [8][LANES][4]: the panel's first half of outputs in the low bits, the second in the high
//   codes of 5 or 6 bits: as of 4 bits; then the other bits of several words together, [2][LANES][4] or [4][LANES][4]
//   scales, UNIT 32:      float16 [2][LANES]
//   scales of others:     group: int8 [PARTS][2][LANES] and, if the type has minima, [2][LANES];
//                         unit: float16 [2][LANES] factors of the scales, and of the minima
// So a panel takes as many bytes as its blocks in the file, except that scales of six bits take eight.

// BITS: of a code. PARTS: scales per group. OFFSET: what codes exceed their numbers by. BYTES: of a block in the file.
template <int64_t BITS_, int64_t UNIT_, int64_t PARTS_, int64_t OFFSET_, bool HAS_MINIMA_, int64_t BYTES_>
struct BlockType {
  static constexpr int64_t BITS = BITS_, UNIT = UNIT_, PARTS = PARTS_, OFFSET = OFFSET_;
  static constexpr bool HAS_MINIMA = HAS_MINIMA_, IS_TABLE = false;
  static constexpr int64_t GROUPS = UNIT / GROUP;
  static constexpr int64_t CODE_BYTES = GROUP * 2 * LANES * BITS / 8;
  static constexpr int64_t SCALE_SIZE = GROUPS == 1 ? 2 : PARTS + HAS_MINIMA;  // per output and group
  static constexpr int64_t GROUP_BYTES = CODE_BYTES + 2 * LANES * SCALE_SIZE;
  static constexpr int64_t UNIT_BYTES = GROUPS * GROUP_BYTES + (GROUPS == 1 ? 0 : 2 * LANES * 2 * (1 + HAS_MINIMA));
  uint8_t bytes[BYTES_];  // as in the file

  uint16_t half(int64_t at) const {
    uint16_t value;
    __builtin_memcpy(&value, bytes + at, 2);
    return value;
  }
};

template <int64_t UNIT, int64_t PARTS = 1>
struct Decoded {  // one block; if UNIT is 32, the factor is the scale
  uint8_t codes[UNIT], minima[UNIT / GROUP];
  int8_t scales[UNIT / GROUP * PARTS];
  uint16_t factor, factor_of_minima;
};

// A block of 32 numbers in four bits: the first 16 in the low halves of the bytes.
inline void split_halves(const uint8_t* __restrict from, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < 16; i++) codes[i] = from[i] & 15;
  for (int64_t i = 0; i < 16; i++) codes[i + 16] = from[i] >> 4;
}
// Scales and minima of Q4_K and Q5_K: eight each of six bits in twelve bytes.
template <class D>
inline void split_scales(const uint8_t* from, D& d) {
  for (int64_t i = 0; i < 4; i++) {
    d.scales[i] = from[i] & 63, d.minima[i] = from[i + 4] & 63;
    d.scales[i + 4] = (from[i + 8] & 15) | (from[i] >> 6 << 4);
    d.minima[i + 4] = from[i + 8] >> 4 | from[i + 4] >> 6 << 4;
  }
}
// 256 numbers in four bits: two groups of 32 share their bytes.
inline void split_pairs_of_groups(const uint8_t* __restrict from, uint8_t* __restrict codes) {
  for (int64_t pair = 0; pair < 4; pair++, from += 32, codes += 64)
    for (int64_t i = 0; i < 32; i++) codes[i] = from[i] & 15, codes[32 + i] = from[i] >> 4;
}

struct q8_0 : BlockType<8, 32, 1, 128, false, 34> {
  void decode(Decoded<32>& d) const {
    d.factor = half(0);
    for (int64_t i = 0; i < 32; i++) d.codes[i] = bytes[2 + i] ^ 128;
  }
};
struct q4_0 : BlockType<4, 32, 1, 8, false, 18> {
  void decode(Decoded<32>& d) const {
    d.factor = half(0);
    split_halves(bytes + 2, d.codes);
  }
};
struct iq4_nl : BlockType<4, 32, 1, 128, false, 18> {
  static constexpr bool IS_TABLE = true;
  void decode(Decoded<32>& d) const {
    d.factor = half(0);
    split_halves(bytes + 2, d.codes);
  }
};
struct iq4_xs : BlockType<4, 256, 1, 128, false, 136> {
  static constexpr bool IS_TABLE = true;
  void decode(Decoded<256>& d) const {
    d.factor = half(0);
    for (int64_t g = 0; g < 8; g++) {
      d.scales[g] = ((bytes[4 + g / 2] >> (g % 2 * 4) & 15) | (half(2) >> (2 * g) & 3) << 4) - 32;
      split_halves(bytes + 8 + 16 * g, d.codes + 32 * g);
    }
  }
};
struct q4_k : BlockType<4, 256, 1, 0, true, 144> {
  void decode(Decoded<256>& d) const {
    d.factor = half(0), d.factor_of_minima = half(2);
    split_scales(bytes + 4, d);
    split_pairs_of_groups(bytes + 16, d.codes);
  }
};
struct q5_k : BlockType<5, 256, 1, 0, true, 176> {
  void decode(Decoded<256>& d) const {
    d.factor = half(0), d.factor_of_minima = half(2);
    split_scales(bytes + 4, d);
    split_pairs_of_groups(bytes + 48, d.codes);
    for (int64_t g = 0; g < 8; g++)
      for (int64_t i = 0; i < 32; i++) d.codes[32 * g + i] |= (bytes[16 + i] >> g & 1) << 4;
  }
};
struct q6_k : BlockType<6, 256, 2, 32, false, 210> {
  void decode(Decoded<256, 2>& d) const {
    d.factor = half(208);
    for (int64_t i = 0; i < 16; i++) d.scales[i] = int8_t(bytes[192 + i]);
    for (int64_t g = 0; g < 8; g++) {
      const uint8_t* const low = bytes + g / 4 * 64 + g % 2 * 32;
      const uint8_t* const high = bytes + 128 + g / 4 * 32;
      uint8_t* const codes = d.codes + 32 * g;
      for (int64_t i = 0; i < 32; i++) {
        const uint8_t low_bits = low[i] >> (g % 4 / 2 * 4) & 15, high_bits = high[i] >> (g % 4 * 2) & 3;
        codes[i] = low_bits | high_bits << 4;
      }
    }
  }
};

// Calls f with a value of the block's type.
template <class F>
inline auto with_block_type(int64_t format, F f) {
  switch (format) {
    case Q4_0: return f(q4_0{});
    case IQ4_NL: return f(iq4_nl{});
    case IQ4_XS: return f(iq4_xs{});
    case Q4_K: return f(q4_k{});
    case Q5_K: return f(q5_k{});
    case Q6_K: return f(q6_k{});
    default: return f(q8_0{});
  }
}

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Where a code is: its byte, and how many bits are below it. half: of the panel; k: of the group.
struct CodePlace {
  int64_t byte, shift;
};
inline CodePlace low_place(int64_t bits, int64_t half, int64_t lane, int64_t k) {
  const int64_t word = bits == 8 ? k / 4 * 2 + half : k / 4;
  return {(word * LANES + lane) * 4 + k % 4, bits == 8 ? 0 : half * 4};
}
inline CodePlace high_place(int64_t bits, int64_t half, int64_t lane, int64_t k) {  // of the bits above the fourth
  const int64_t more = bits - 4, together = 4 / more, word = 8 + k / 4 / together;
  return {(word * LANES + lane) * 4 + k % 4, half * 4 + k / 4 % together * more};
}

inline float half_to_float(uint16_t bits) {  // zeros, subnormal and normal numbers; scales are no others
  float value;
  const uint32_t size = uint32_t(bits & 0x7fff) << 13;
  __builtin_memcpy(&value, &size, 4);
  return (bits >> 15 ? -value : value) * 0x1p112f;
}

// Stores the codes of a group of two outputs, one of each half of a panel. Words of four codes are moved together.
template <class W>
inline void pack_codes(const uint8_t* first, const uint8_t* second, char* group, int64_t lane) {
  constexpr int64_t MORE = W::BITS - 4, TOGETHER = MORE > 0 ? 4 / MORE : 1;
  constexpr uint32_t LOW = 0x0f0f0f0fu, HIGH = ((1u << MORE) - 1) * 0x10101010u;
  const auto put = [&](int64_t word, uint32_t value) {
    __builtin_memcpy(group + (word * LANES + lane) * 4, &value, 4);
  };
  uint32_t high = 0;
  for (int64_t j = 0; j < GROUP / 4; j++) {
    const uint32_t a = read<uint32_t>(first + 4 * j), b = read<uint32_t>(second + 4 * j);
    if constexpr (W::BITS == 8) {
      put(2 * j, a), put(2 * j + 1, b);
    } else {
      put(j, (a & LOW) | (b & LOW) << 4);
      if constexpr (MORE > 0) {
        high |= ((a & HIGH) >> 4 | (b & HIGH)) << (j % TOGETHER * MORE);
        if (j % TOGETHER == TOGETHER - 1) put(8 + j / TOGETHER, high), high = 0;
      }
    }
  }
}

// Stores the scales of one output's block.
template <class W>
inline void pack_scales(const Decoded<W::UNIT, W::PARTS>& d, char* unit, int64_t out) {
  char* const factors = unit + (W::GROUPS == 1 ? W::CODE_BYTES : W::GROUPS * W::GROUP_BYTES);
  __builtin_memcpy(factors + out * 2, &d.factor, 2);
  if constexpr (W::HAS_MINIMA) __builtin_memcpy(factors + (2 * LANES + out) * 2, &d.factor_of_minima, 2);
  if constexpr (W::GROUPS > 1)
    for (int64_t g = 0; g < W::GROUPS; g++) {
      char* const scales = unit + g * W::GROUP_BYTES + W::CODE_BYTES;
      for (int64_t i = 0; i < W::PARTS; i++) scales[i * 2 * LANES + out] = d.scales[g * W::PARTS + i];
      if constexpr (W::HAS_MINIMA) scales[W::PARTS * 2 * LANES + out] = d.minima[g];
    }
}

// One number of a panel, from its layout: slow, and what the vector code is tested against.
template <class W>
inline float number_at(const char* panel, int64_t out, int64_t k) {
  const uint8_t* const unit = reinterpret_cast<const uint8_t*>(panel) + k / W::UNIT * W::UNIT_BYTES;
  const uint8_t* const group = unit + k % W::UNIT / GROUP * W::GROUP_BYTES;
  const CodePlace low = low_place(W::BITS, out / LANES, out % LANES, k % GROUP);
  int code = W::BITS == 8 ? group[low.byte] : group[low.byte] >> low.shift & 15;
  if constexpr (W::BITS == 5 || W::BITS == 6) {
    const CodePlace high = high_place(W::BITS, out / LANES, out % LANES, k % GROUP);
    code |= (group[high.byte] >> high.shift & ((1 << (W::BITS - 4)) - 1)) << 4;
  }
  const int number = W::IS_TABLE ? IQ4_VALUES[code & 15] : code - int(W::OFFSET);
  const uint8_t* const factors = W::GROUPS == 1 ? group + W::CODE_BYTES : unit + W::GROUPS * W::GROUP_BYTES;
  uint16_t factor, factor_of_minima;
  __builtin_memcpy(&factor, factors + out * 2, 2);
  float value = half_to_float(factor) * number;
  if constexpr (W::GROUPS > 1)
    value =
        half_to_float(factor) * int8_t(group[W::CODE_BYTES + k % GROUP * W::PARTS / GROUP * 2 * LANES + out]) * number;
  if constexpr (W::HAS_MINIMA) {
    __builtin_memcpy(&factor_of_minima, factors + (2 * LANES + out) * 2, 2);
    value -= half_to_float(factor_of_minima) * group[W::CODE_BYTES + W::PARTS * 2 * LANES + out];
  }
  return value;
}

// Interleaves a weight that is stored as in the file, [N][K / UNIT] blocks. With a gate, the first half of a panel is
// gates, which are the first half of the outputs.
template <class W>
void pack_blocks(const PackBlocks& a) {
  const int64_t panels = a.outs / (2 * LANES), units = a.ins / W::UNIT;
  parallel_for(panels, 1, [&](int64_t p) {
    char* const panel = static_cast<char*>(a.out) + p * units * W::UNIT_BYTES;
    const W* const first = static_cast<const W*>(a.w) + p * (a.gated ? LANES : 2 * LANES) * units;
    const W* const second = a.gated ? static_cast<const W*>(a.gated) + p * LANES * units : first + LANES * units;
    for (int64_t i = 0; i < units; i++) {  // a unit stays in the L1 cache while all of its outputs are stored
      char* const unit = panel + i * W::UNIT_BYTES;
      for (int64_t lane = 0; lane < LANES; lane++) {
        Decoded<W::UNIT, W::PARTS> one, other;
        first[lane * units + i].decode(one), second[lane * units + i].decode(other);
        for (int64_t g = 0; g < W::GROUPS; g++)
          pack_codes<W>(one.codes + g * GROUP, other.codes + g * GROUP, unit + g * W::GROUP_BYTES, lane);
        pack_scales<W>(one, unit, lane), pack_scales<W>(other, unit, LANES + lane);
      }
    }
  });
}

// Rows of a packed weight without a gate.
template <class W>
void embed_blocks(const Embed& a) {
  const int64_t panel_bytes = a.ins / W::UNIT * W::UNIT_BYTES;
  parallel_for(a.rows, 0, [&](int64_t t) {
    const char* const panel = static_cast<const char*>(a.w) + a.ids[t] / (2 * LANES) * panel_bytes;
    for (int64_t k = 0; k < a.ins; k++)
      static_cast<bf16*>(a.out)[t * a.ins + k].bits = to_bf16(number_at<W>(panel, a.ids[t] % (2 * LANES), k));
  });
}
