// Operations between the products: norms, rotary embeddings, gates, and storing keys and values.

template <class T, class W>
void rms_norm(const RmsNorm& a) {
  parallel_for(a.rows * a.inner, 0, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i / a.inner * a.x_stride + i % a.inner * a.dim;
    if (a.residual) {  // the sum is rounded before the norm, because the rounded sum is the next residual
      const T* residual = static_cast<const T*>(a.residual) + i * a.dim;
      T* total = static_cast<T*>(a.sum) + i * a.dim;
      for (int64_t k = 0; k < a.dim; k += LANES)
        store(total + k, load(x + k, a.dim - k) + load(residual + k, a.dim - k), a.dim - k);
      x = total;
    }
    vf squares = {};
    for (int64_t k = 0; k < a.dim; k += LANES) {
      const vf v = load(x + k, a.dim - k);
      squares += v * v;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(a.dim) + float(a.eps));
    T* out = static_cast<T*>(a.out) + i * a.dim;
    for (int64_t k = 0; k < a.dim; k += LANES)
      store(out + k, load(x + k, a.dim - k) * factor * load(static_cast<const W*>(a.weight) + k, a.dim - k), a.dim - k);
  });
}

// Rotates the first `turned` dimensions of a head, after multiplying by factor and weight if there is a weight. cos,
// sin: of the head's token.
template <class T, class W>
inline void rotate_head(const T* x, const W* weight, float factor, const float* cos, const float* sin, int64_t turned,
                        int64_t dim, T* out) {
  const int64_t half = turned / 2;
  const auto normed = [&](int64_t k, int64_t left) {
    return weight ? load(x + k, left) * factor * load(weight + k, left) : load(x + k, left);
  };
  for (int64_t k = 0; k < half; k += LANES) {
    const int64_t left = half - k;
    const vf first = normed(k, left), second = normed(half + k, left);
    const vf c = load(cos + k, left), s = load(sin + k, left);
    store(out + k, first * c - second * s, left);
    store(out + half + k, second * c + first * s, left);
  }
  for (int64_t k = turned; k < dim; k += LANES) store(out + k, normed(k, dim - k), dim - k);
}

template <class T>
void rope(const Rope& a) {
  const int64_t half = a.rotary_dim / 2;
  parallel_for(a.rows * a.heads, 0, [&](int64_t i) {
    const int64_t t = i / a.heads;
    rotate_head(static_cast<const T*>(a.x) + t * a.x_stride + i % a.heads * a.dim, static_cast<const T*>(nullptr), 1,
                a.cos + t * half, a.sin + t * half, a.rotary_dim, a.dim, static_cast<T*>(a.out) + i * a.dim);
  });
}

template <class T>
void gated(const Gated& a) {
  parallel_for(a.rows, 0, [&](int64_t t) {
    const T *gate = static_cast<const T*>(a.x) + t * 2 * a.inner, *up = gate + a.inner;
    T* out = static_cast<T*>(a.out) + t * a.inner;
    for (int64_t k = 0; k < a.inner; k += LANES) {
      const int64_t left = a.inner - k;
      store(out + k, gated(a.activation, load(gate + k, left), load(up + k, left)), left);
    }
  });
}

// Norms one head, if there is a weight, and rotates it.
template <class T, class W>
inline void norm_rope_head(const NormRopeStore& a, const T* x, const W* weight, int64_t t, T* out) {
  const int64_t half = a.rotary_dim / 2;
  float factor = 1;
  if (weight) {
    vf squares = {};
    for (int64_t k = 0; k < a.dim; k += LANES) {
      const vf v = load(x + k, a.dim - k);
      squares += v * v;
    }
    factor = 1.0f / __builtin_sqrtf(sum(squares) / float(a.dim) + float(a.eps));
  }
  rotate_head(x, weight, factor, a.cos + t * half, a.sin + t * half, a.rotary_dim, a.dim, out);
}

template <class T, class W, class C>
void norm_rope_store_as(const NormRopeStore& a) {
  const int64_t size = row_size<C>(a.dim);
  parallel_for(a.rows, 0, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.qkv) + t * a.stride;
    C *keys = static_cast<C*>(a.keys) + a.slots[t] * a.kv_heads * size,
      *values = static_cast<C*>(a.values) + a.slots[t] * a.kv_heads * size;
    T* query = static_cast<T*>(a.query);
    for (int64_t h = 0; h < a.heads; h++, x += a.dim)
      norm_rope_head(a, x, static_cast<const W*>(a.query_weight), t, query + (t * a.heads + h) * a.dim);
    if constexpr (IS_SCALED<C>) {
      T* const turned = static_cast<T*>(thread_scratch.get(a.dim * sizeof(T)));
      for (int64_t h = 0; h < a.kv_heads; h++, x += a.dim) {
        norm_rope_head(a, x, static_cast<const W*>(a.key_weight), t, turned);
        quantise_row(turned, a.dim, keys + h * size);
      }
      for (int64_t h = 0; h < a.kv_heads; h++, x += a.dim) quantise_row(x, a.dim, values + h * size);
    } else {
      for (int64_t h = 0; h < a.kv_heads; h++, x += a.dim)
        norm_rope_head(a, x, static_cast<const W*>(a.key_weight), t, keys + h * size);
      __builtin_memcpy(values, x, a.kv_heads * a.dim * sizeof(T));
    }
  });
}
template <class T, class W>
void norm_rope_store(const NormRopeStore& a) {
  switch (a.kv_format) {
    case SCALED_INT8: return norm_rope_store_as<T, W, int8_t>(a);
    case SCALED_E4M3: return norm_rope_store_as<T, W, e4m3>(a);
    default: return norm_rope_store_as<T, W, T>(a);
  }
}

inline void store_kv(const StoreKv& a) {
  parallel_for(a.rows, 0, [&](int64_t t) {
    __builtin_memcpy(a.key_cache + a.slots[t] * a.row_bytes, a.key + t * a.key_stride, a.row_bytes);
    __builtin_memcpy(a.value_cache + a.slots[t] * a.row_bytes, a.value + t * a.value_stride, a.row_bytes);
  });
}

inline void gather(const Gather& a) {
  parallel_for(a.rows, 0, [&](int64_t t) {
    __builtin_memcpy(a.out + t * a.row_bytes, a.table + a.ids[t] * a.row_bytes, a.row_bytes);
  });
}

template <class T>
void scale(const Scale& a) {
  const float factor = a.factor;
  parallel_for(a.rows, 0, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.x) + t * a.dim;
    T* out = static_cast<T*>(a.out) + t * a.dim;
    for (int64_t k = 0; k < a.dim; k += LANES) store(out + k, load(x + k, a.dim - k) * factor, a.dim - k);
  });
}

template <class T>
void add(const Add& a) {
  parallel_for(a.rows, a.rows * a.dim < MIN_SHARED_ITEMS ? a.rows : 0, [&](int64_t t) {
    const T *x = static_cast<const T*>(a.x) + t * a.dim, *y = static_cast<const T*>(a.y) + t * a.dim;
    T* out = static_cast<T*>(a.out) + t * a.dim;
    for (int64_t k = 0; k < a.dim; k += LANES)
      store(out + k, load(x + k, a.dim - k) + load(y + k, a.dim - k), a.dim - k);
  });
}
