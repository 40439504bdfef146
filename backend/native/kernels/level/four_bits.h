// The values of four-bit codes. Those of MXFP4 are doubled, so that all are integers; its scales are halved.

inline vf numbers_of(const int4x32*, vu codes) { return as_floats((vi)codes - 8); }

inline vf numbers_of(const mxfp4x32*, vu codes) {
#if WIDTH == 64
  const vf table = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
  return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
#if WIDTH == 32
  const vf table = {0, 1, 2, 3, 4, 6, 8, 12};
  const vu size = (vu)_mm256_permutevar8x32_ps((__m256)table, (__m256i)codes);  // uses the low three bits only
#else
  const vi low = (vi)(codes & 7);
  const vu size = (vu)as_floats(low + (low > 4 ? low - 4 : 0) + (low > 6 ? 2 * (low - 6) : 0));
#endif
  return (vf)(size | (codes & 8) << 28);
#endif
}

#if WIDTH == 64
// The values of all 16 codes, and codes as unsigned bytes that are TOO_LARGE_BY larger than their values.
inline vf every_number(const int4x32*) { return vf{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}; }
inline vf every_number(const mxfp4x32*) { return vf{0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12}; }
template <class W>
constexpr int64_t TOO_LARGE_BY = 0;
template <>
constexpr int64_t TOO_LARGE_BY<int4x32> = 8;
template <>
constexpr int64_t TOO_LARGE_BY<mxfp4x32> = 12;
inline __m512i unsigned_of(const int4x32*, __m512i codes) { return codes; }
inline __m512i unsigned_of(const mxfp4x32*, __m512i codes) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
#endif
