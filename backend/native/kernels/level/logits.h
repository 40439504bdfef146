// Operations on logits before sampling.

template <class T>
void logits(const Logits& a) {
  const int64_t parts = ceil_div(a.size, MIN_SHARED_ITEMS);
  const float factor = a.factor, softcap = a.softcap;
  parallel_for(a.rows * parts, 1, [&](int64_t i) {
    const int64_t begin = i % parts * MIN_SHARED_ITEMS, end = min_of(begin + MIN_SHARED_ITEMS, a.size);
    const T* x = static_cast<const T*>(a.x) + i / parts * a.size;
    float* out = a.out + i / parts * a.size;
    for (int64_t k = begin; k < end; k += LANES) {
      vf v = load(x + k, end - k) * factor;
      if (softcap) v = capped(v, softcap);
      store(out + k, v, end - k);
    }
  });
}

// A product that is rounded before it is added, as in torch, and not fused into a multiply-add.
inline float product(float a, float b) {
  const volatile float rounded = a * b;
  return rounded;
}

inline float penalised(float x, float count, float presence, float frequency, float repetition) {
  float value = x > 0 ? x / repetition : product(x, repetition);
  value -= product(frequency, count);
  return value - (count > 0 ? presence : 0);
}

inline void penalise(const Penalise& a) {
  parallel_for(a.entries, 0, [&](int64_t i) {
    float& x = a.x[a.row[i] * a.size + a.token[i]];
    x = penalised(x, a.count[i], a.presence[i], a.frequency[i], a.repetition[i]);
  });
}

inline void add_bias(const AddBias& a) {
  for (int64_t i = 0; i < a.entries; i++) a.x[a.row[i] * a.size + a.token[i]] += a.value[i];
}

inline void forbid(const Forbid& a) {
  vu bit;  // the lane's bit of a word
  for (int64_t lane = 0; lane < LANES; lane++) bit[lane] = 1u << lane;
  parallel_for(a.rows, 1, [&](int64_t t) {
    float* x = a.x + a.row[t] * a.size;
    for (int64_t i = 0; i < a.size; i += LANES) {
      const uint32_t allowed = a.allowed[t * a.words + i / 32] >> i % 32;
      const vi is_allowed = (bit & allowed) != 0;
      store(x + i, is_allowed ? load(x + i, a.size - i) : all(-__builtin_inff()), a.size - i);
    }
  });
}
