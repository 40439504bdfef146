// Tile configuration, and packing into the layout of tiles.

using avx512::vf;

constexpr int64_t TILE = 16;        // rows of a tile, and sums in one
constexpr int64_t DEPTH = 32;       // products per step of a sum
constexpr int64_t AHEAD = 3;        // steps that operands are prefetched ahead
constexpr int64_t STEP_KEYS = 256;  // positions between two rescalings of the online softmax

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};
const TileConfig CONFIG;

void begin() { _tile_loadconfig(&CONFIG); }
void end() { _tile_release(); }

// To be called before a tile is loaded: compilers do not know what the instruction reads, and would omit stores.
inline void compiler_barrier() { __asm__ volatile("" ::: "memory"); }

inline void transpose(__m512i (&r)[TILE]) {  // 16 rows of 16 words
  __m512i t[TILE];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < TILE; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) {  // quarter q of r[i + j] is now column 4 q + j of rows i to i + 3
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// Packs up to 16 rows of pairs as the right operand of a product: packed[pair][row]. Missing rows are zero.
void pack_pairs(const uint32_t* const* rows, int64_t num_rows, int64_t num_pairs, uint32_t* packed) {
  for (int64_t i = 0; i < num_pairs; i += TILE) {
    __m512i r[TILE];
    for (int64_t j = 0; j < TILE; j++) r[j] = j < num_rows ? _mm512_loadu_si512(rows[j] + i) : _mm512_setzero_si512();
    transpose(r);
    for (int64_t j = 0; j < TILE; j++) _mm512_store_si512(packed + (i + j) * TILE, r[j]);
  }
  compiler_barrier();
}
