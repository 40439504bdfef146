// The tile instructions of AMX in software, for a CPU that has AVX-512 but not AMX. Included before the kernels, so that
// their intrinsics are the functions below. Use that a processor would reject is recorded in `complaint`.
//
// They follow Intel's Software Developer's Manual. A bfloat16 product adds, for each sum, the even products with fused
// multiply-adds from zero, the odd ones likewise, then these two, and the result to the sum; subnormal inputs and results
// are flushed to zero. An int8 product is exact and wraps around.

#pragma once

#include <immintrin.h>
#include <atomic>
#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) emulated::add_bf16(sum, a, b)
#define _tile_dpbssd(sum, a, b) emulated::add_int8(sum, a, b)

namespace emulated {

constexpr int TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

struct Tile {
  alignas(64) uint8_t row[MOST_ROWS][MOST_BYTES];
};
struct State {  // of one thread
  bool is_configured = false;
  int rows[TILES] = {}, bytes[TILES] = {};  // of a row
  Tile tiles[TILES];
};
inline State& state() {
  thread_local State own;
  return own;
}

inline std::atomic<const char*> complaint{nullptr};  // the first one since it was last read

inline bool expect(bool is_so, const char* what) {
  const char* none = nullptr;
  if (!is_so) complaint.compare_exchange_strong(none, what);
  return is_so;
}

inline State& configured(int tile) {
  State& own = state();
  expect(own.is_configured && own.rows[tile], "tiles are configured on the thread that uses them");
  return own;
}

inline void load_config(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof config);
  State& own = state();
  own.is_configured = expect(config[0] == 1, "the palette is 1");
  for (int i = 2; i < 16; i++) expect(config[i] == 0, "what is reserved is zero");
  for (int i = 0; i < 16; i++) {
    const int bytes = config[16 + 2 * i] | config[17 + 2 * i] << 8, rows = config[48 + i];
    const bool is_possible = bytes <= (i < TILES) * MOST_BYTES && rows <= MOST_ROWS && !bytes == !rows;
    expect(is_possible, "a tile has 16 rows of 64 bytes at most, and no rows if they have no bytes");
    if (i < TILES) own.rows[i] = is_possible * rows, own.bytes[i] = is_possible * bytes;
  }
  std::memset(own.tiles, 0, sizeof own.tiles);
}

inline void release() { state().is_configured = false; }

inline void zero(int tile) { std::memset(&configured(tile).tiles[tile], 0, sizeof(Tile)); }

inline void load(int tile, const void* base, int64_t stride) {
  State& own = configured(tile);
  const auto mask = ~uint64_t(0) >> (MOST_BYTES - own.bytes[tile]);
  for (int i = 0; i < MOST_ROWS; i++) {
    const char* row = static_cast<const char*>(base) + i * stride;
    const __m512i bytes = i < own.rows[tile] ? _mm512_maskz_loadu_epi8(mask, row) : _mm512_setzero_si512();
    _mm512_store_si512(own.tiles[tile].row[i], bytes);
  }
}

inline void store(int tile, void* base, int64_t stride) {
  const State& own = configured(tile);
  const auto mask = ~uint64_t(0) >> (MOST_BYTES - own.bytes[tile]);
  for (int i = 0; i < own.rows[tile]; i++)
    _mm512_mask_storeu_epi8(static_cast<char*>(base) + i * stride, mask, _mm512_load_si512(own.tiles[tile].row[i]));
}

inline State& multipliable(int sum, int a, int b) {
  State& own = (configured(sum), configured(a), configured(b));
  expect(sum != a && sum != b && a != b, "a product is of three tiles");
  expect(own.rows[sum] == own.rows[a] && own.bytes[sum] == own.bytes[b] && own.bytes[a] == 4 * own.rows[b] &&
             own.bytes[b] % 4 == 0,
         "tiles are as large as their product needs them");
  return own;
}

inline __attribute__((noinline)) void add_bf16_so_rounded(State& own, int sum, int a, int b) {
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  for (int m = 0; m < own.rows[a]; m++) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < own.rows[b]; k++) {
      int32_t word;
      std::memcpy(&word, own.tiles[a].row[m] + 4 * k, sizeof word);
      const __m512i x = _mm512_set1_epi32(word), y = _mm512_load_si512(own.tiles[b].row[k]);
      even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), even);
      odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(y, high), odd);
    }
    float* to = reinterpret_cast<float*>(own.tiles[sum].row[m]);
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(even, odd)));
  }
}

inline void add_bf16(int sum, int a, int b) {
  State& own = multipliable(sum, a, b);
  constexpr unsigned NO_EXCEPTIONS = 0x1f80, TINY_IS_ZERO = 0x8040;  // flushes subnormal inputs and results
  const unsigned before = _mm_getcsr();
  _mm_setcsr(NO_EXCEPTIONS | TINY_IS_ZERO);
  add_bf16_so_rounded(own, sum, a, b);  // not inlined, so that no part of it is computed in another rounding mode
  _mm_setcsr(before);
}

inline void add_int8(int sum, int a, int b) {
  State& own = multipliable(sum, a, b);
  const auto even = [](__m512i bytes) { return _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8); };
  const auto odd = [](__m512i bytes) { return _mm512_srai_epi16(bytes, 8); };
  for (int m = 0; m < own.rows[a]; m++) {
    __m512i total = _mm512_load_si512(own.tiles[sum].row[m]);
    for (int k = 0; k < own.rows[b]; k++) {
      int32_t word;
      std::memcpy(&word, own.tiles[a].row[m] + 4 * k, sizeof word);
      const __m512i x = _mm512_set1_epi32(word), y = _mm512_load_si512(own.tiles[b].row[k]);
      total = _mm512_add_epi32(total, _mm512_madd_epi16(even(x), even(y)));
      total = _mm512_add_epi32(total, _mm512_madd_epi16(odd(x), odd(y)));
    }
    _mm512_store_si512(own.tiles[sum].row[m], total);
  }
}

}  // namespace emulated
