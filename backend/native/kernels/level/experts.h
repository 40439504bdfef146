// A mixture of experts: the router's choice, and the weighted sum of the chosen experts. An assignment is one (token,
// chosen expert) pair.

// The index of the largest score that is not taken; of equals the first. NaN counts as larger than all numbers.
inline int64_t largest_left(const float* score, const uint8_t* is_taken, int64_t size) {
  int64_t best = -1;
  for (int64_t i = 0; i < size; i++)
    if (!is_taken[i] && (best < 0 || (score[best] == score[best] && !(score[i] <= score[best])))) best = i;
  return best;
}

template <class T>
void route(const Route& a) {
  const int64_t padded = ceil_div(a.num_experts, LANES) * LANES;
  parallel_for(a.rows, a.rows * a.num_experts < MIN_SHARED_ITEMS ? a.rows : 0, [&](int64_t t) {
    float* const score = static_cast<float*>(thread_scratch.get(padded * (sizeof(float) + 1)));
    uint8_t* const is_taken = reinterpret_cast<uint8_t*>(score + padded);
    for (int64_t i = 0; i < a.num_experts; i++)
      score[i] = load(static_cast<const T*>(a.x) + t * a.num_experts + i, 1)[0];
    for (int64_t i = a.num_experts; i < padded; i++) score[i] = -__builtin_inff();
    __builtin_memset(is_taken, 0, padded);
    int64_t* const chosen = a.chosen + t * a.num_chosen;
    float* const weights = a.weights + t * a.num_chosen;
    for (int64_t i = 0; i < a.num_chosen; i++) {
      chosen[i] = largest_left(score, is_taken, a.num_experts);
      is_taken[chosen[i]] = 1;
    }
    const float top = score[chosen[0]];
    float total = top == top ? 0 : top;
    for (int64_t i = 0; i < a.num_chosen; i++) {
      weights[i] = exp(all(score[chosen[i]] - top))[0];
      total += weights[i];
    }
    if (!a.is_normalised) {
      vf sums = {};
      for (int64_t i = 0; i < padded; i += LANES) sums += exp(load(score + i) - top);
      total = top == top ? sum(sums) : top;
    }
    for (int64_t i = 0; i < a.num_chosen; i++) weights[i] /= total;
  });
}

// The assignments of all tokens, sorted by expert. `places` are indexes in this order.
struct Assignments {
  int64_t *starts, *tokens,
      *places;     // [E + 1]: each expert's first place; [T K]: each place's token; [T, K]: each token's places
  float* weights;  // [T K]: each place's weight

  static size_t bytes(const Experts& a) {
    return (a.num_experts + 1 + a.rows * (2 * a.num_chosen + 1)) * sizeof(int64_t) +
           a.rows * a.num_chosen * sizeof(float);
  }
  Assignments(const Experts& a, void* memory) {
    const int64_t assignments = a.rows * a.num_chosen;
    starts = static_cast<int64_t*>(memory), tokens = starts + a.num_experts + 1, places = tokens + assignments;
    int64_t* const so_far = places + assignments;  // [T]
    weights = reinterpret_cast<float*>(so_far + a.rows);
    __builtin_memset(starts, 0, (a.num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < assignments; i++) starts[a.chosen[i] + 1]++;
    for (int64_t e = 0; e < a.num_experts; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < assignments; i++) {
      const int64_t place = starts[a.chosen[i]]++;  // afterwards, starts[e] is the start of the next expert
      tokens[place] = i / a.num_chosen, weights[place] = a.weights[i];
    }
    for (int64_t e = a.num_experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
    __builtin_memset(so_far, 0, a.rows * sizeof *so_far);
    for (int64_t place = 0; place < assignments; place++) {
      const int64_t t = tokens[place];
      places[t * a.num_chosen + so_far[t]++] = place;
    }
  }
};

// The layout of the memory of `experts`: sizes in bytes, each part starting at a cache line.
struct ExpertsMemory {
  int64_t stride, assignments, rows, wide, inner, results;
  explicit ExpertsMemory(const Experts& a) {
    const int64_t size = a.dtype == FLOAT32 ? sizeof(float) : sizeof(bf16);
    stride = whole_lines(a.hidden * size);
    assignments = whole_lines(Assignments::bytes(a));
    rows = a.rows * stride;  // at most as many as choose one expert
    wide = a.activation == NONE ? 0 : whole_lines(a.rows * 2 * a.inner * size);
    inner = whole_lines(a.rows * a.inner * size);
    results = whole_lines(a.rows * a.num_chosen * a.hidden * size);
  }
  int64_t all() const { return assignments + rows + wide + inner + results; }
};

template <class T, class Run>
void experts_in(const Experts& a, void* memory, Run run) {
  const ExpertsMemory sizes(a);
  const Assignments assignments(a, memory);
  char* const rows = static_cast<char*>(memory) + sizes.assignments;
  char* const wide = rows + sizes.rows;
  char* const inner = wide + sizes.wide;
  T* const results = reinterpret_cast<T*>(inner + sizes.inner);
  void* const rest = inner + sizes.inner + sizes.results;
  const T* const x = static_cast<const T*>(a.x);
  for (int64_t e = 0; e < a.num_experts; e++) {
    const int64_t begin = assignments.starts[e], count = assignments.starts[e + 1] - begin;
    if (count == 0) continue;
    Op up = a.products[2 * e], down = a.products[2 * e + 1];
    up.linear.rows = down.linear.rows = count;
    up.linear.dtype = down.linear.dtype = a.dtype;
    if (count == 1) {  // read in place
      up.linear.x = x + assignments.tokens[begin] * a.hidden, up.linear.x_stride = a.hidden;
    } else {
      parallel_for(count, count * a.hidden < MIN_SHARED_ITEMS ? count : 0, [&](int64_t i) {
        __builtin_memcpy(rows + i * sizes.stride, x + assignments.tokens[begin + i] * a.hidden, a.hidden * sizeof(T));
      });
      up.linear.x = rows, up.linear.x_stride = sizes.stride / int64_t(sizeof(T));
    }
    up.linear.out = a.activation == NONE ? inner : wide;
    run(up, rest);
    if (a.activation != NONE) gated<T>(Gated{wide, inner, count, a.inner, a.dtype, a.activation});
    down.linear.x = inner, down.linear.x_stride = a.inner;
    down.linear.out = results + begin * a.hidden;
    run(down, rest);
  }
  parallel_for(a.rows, a.rows * a.num_chosen * a.hidden < MIN_SHARED_ITEMS ? a.rows : 0, [&](int64_t t) {
    for (int64_t k = 0; k < a.hidden; k += LANES) {
      vf total = {};
      for (int64_t i = 0; i < a.num_chosen; i++) {
        const int64_t place = assignments.places[t * a.num_chosen + i];
        total += load(results + place * a.hidden + k, a.hidden - k) * assignments.weights[place];
      }
      store(static_cast<T*>(a.out) + t * a.hidden + k, total, a.hidden - k);
    }
  });
}

// run, shared_bytes: functions of the running level, which may be higher than this one.
template <class Run>
void experts(const Experts& a, void* memory, Run run) {
  a.dtype == FLOAT32 ? experts_in<float>(a, memory, run) : experts_in<bf16>(a, memory, run);
}
template <class SharedBytes>
size_t experts_bytes(const Experts& a, SharedBytes shared_bytes) {
  size_t most_bytes = 0;
  for (int64_t i = 0; i < 2; i++) {  // the products of all experts have the same shapes
    Op product = a.products[i];
    product.linear.rows = a.rows, product.linear.dtype = a.dtype;
    most_bytes = max_of(most_bytes, shared_bytes(product));
  }
  return ExpertsMemory(a).all() + most_bytes;
}
