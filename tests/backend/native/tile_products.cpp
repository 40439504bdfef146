// A single product of tiles, emulated or the CPU's own: sums[rows, 16] += a[rows, 16 words] b[16 words, 16], where a word
// is a pair of bfloat16 or four int8.
#include <immintrin.h>
#include <cstdint>

extern "C" void multiply_tiles(int is_int8, int rows, void* sums, const void* a, const void* b) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64};
    uint8_t rows[16] = {0, 0, 16};
  } config;
  config.rows[0] = config.rows[1] = uint8_t(rows);
  __asm__ volatile("" ::: "memory");  // all stores are complete before the loads
  _tile_loadconfig(&config);
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  if (is_int8) _tile_dpbssd(0, 1, 2);
  else _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, sums, 64);
  _tile_release();
}
