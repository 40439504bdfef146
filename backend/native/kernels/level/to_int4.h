// Quantises weights to int4: for each group, the scale with the smallest squared error of several.

struct Group32 {
  static constexpr int VECTORS = GROUP / LANES;
  vf numbers[VECTORS];

  // The group divided by scale, rounded to the nearest integers from -8 to 7, ties to even.
  Group32 over(float scale) const {
    const float inverse = scale == 0 ? 0 : 1 / scale;
    Group32 out;
    for (int i = 0; i < VECTORS; i++) {
      vf n = numbers[i] * inverse;
      n = n > 7 ? all(7) : n < -8 ? all(-8) : n;
      out.numbers[i] = n + 12582912.0f - 12582912.0f;
    }
    return out;
  }
  float error_of(const Group32& whole, float scale) const {
    vf errors = {};
    for (int i = 0; i < VECTORS; i++) {
      const vf error = whole.numbers[i] * scale - numbers[i];
      errors += error * error;
    }
    return sum(errors);
  }
  void put(float* to) const {
    for (int i = 0; i < VECTORS; i++) store(to + i * LANES, numbers[i]);
  }
};

inline float largest_of(const float (&numbers)[GROUP]) {  // by magnitude, with its sign; of equals the first
  float found = 0;
  for (float value : numbers)
    if (__builtin_fabsf(value) > __builtin_fabsf(found)) found = value;
  return found;
}

template <class T>
void to_int4(const ToInt4& a) {
  const int64_t groups = a.ins / GROUP;
  parallel_for(a.outs, 0, [&](int64_t n) {
    for (int64_t g = 0; g < groups; g++) {
      const T* from = static_cast<const T*>(a.w) + n * a.ins + g * GROUP;
      Group32 group;
      for (int i = 0; i < Group32::VECTORS; i++) group.numbers[i] = load(from + i * LANES);
      float each[GROUP];
      group.put(each);
      const float largest = largest_of(each);
      float best_error = __builtin_inff(), best_scale = 0;
      for (int64_t i = 0; i < a.num_ends; i++) {
        const float scale = to_float(bf16{to_bf16(largest / a.ends[i])});
        const float error = group.error_of(group.over(scale), scale);
        if (error < best_error) best_error = error, best_scale = scale;
      }
      group.over(best_scale).put(each);
      uint8_t* to = a.numbers + (n * groups + g) * (GROUP / 2);
      for (int i = 0; i < GROUP / 2; i++)
        to[i] = uint8_t(int(each[i]) + 8) | uint8_t(int(each[GROUP / 2 + i]) + 8) << 4;
      a.scales[n * groups + g].bits = to_bf16(best_scale);
    }
  });
}
