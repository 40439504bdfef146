// A mixture of experts: whom a token visits, and what those say.

// The largest of the scores, the first of those that are equal. One that is no number is larger than all that are.
inline int64_t largest_left(const float* score, const uint8_t* is_taken, int64_t size) {
  int64_t best = -1;
  for (int64_t i = 0; i < size; i++)
    if (!is_taken[i] && (best < 0 || (score[best] == score[best] && !(score[i] <= score[best])))) best = i;
  return best;
}

template <class T>
void route(const Route& a) {
  const int64_t padded = ceil_div(a.num_experts, LANES) * LANES;
  share(a.rows, a.rows * a.num_experts < FEW ? a.rows : 0, [&](int64_t t) {
    float* const score = static_cast<float*>(own_scratch.get(padded * (sizeof(float) + 1)));
    uint8_t* const is_taken = reinterpret_cast<uint8_t*>(score + padded);
    for (int64_t i = 0; i < a.num_experts; i++)
      score[i] = load(static_cast<const T*>(a.x) + t * a.num_experts + i, 1)[0];
    for (int64_t i = a.num_experts; i < padded; i++) score[i] = -__builtin_inff();
    __builtin_memset(is_taken, 0, padded);
    int64_t* const chosen = a.chosen + t * a.num_chosen;
    float* const shares = a.shares + t * a.num_chosen;
    for (int64_t i = 0; i < a.num_chosen; i++) {
      chosen[i] = largest_left(score, is_taken, a.num_experts);
      is_taken[chosen[i]] = 1;
    }
    const float top = score[chosen[0]];
    float total = top == top ? 0 : top;
    for (int64_t i = 0; i < a.num_chosen; i++) {
      shares[i] = exp(all(score[chosen[i]] - top))[0];
      total += shares[i];
    }
    if (!a.is_normalised) {
      vf sums = {};
      for (int64_t i = 0; i < padded; i += LANES) sums += exp(load(score + i) - top);
      total = top == top ? sum(sums) : top;
    }
    for (int64_t i = 0; i < a.num_chosen; i++) shares[i] /= total;
  });
}

// A place is one visit of a token. Places stand in the order of the experts' numbers.
struct Visits {
  int64_t *starts, *tokens, *places;  // [E + 1]: of each expert's places; [T K]: of each place; [T, K]: of each token
  float* shares;                      // [T K]: of each place

  static size_t bytes(const Experts& a) {
    return (a.num_experts + 1 + a.rows * (2 * a.num_chosen + 1)) * sizeof(int64_t) +
           a.rows * a.num_chosen * sizeof(float);
  }
  Visits(const Experts& a, void* memory) {
    const int64_t visits = a.rows * a.num_chosen;
    starts = static_cast<int64_t*>(memory), tokens = starts + a.num_experts + 1, places = tokens + visits;
    int64_t* const so_far = places + visits;  // [T]
    shares = reinterpret_cast<float*>(so_far + a.rows);
    __builtin_memset(starts, 0, (a.num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < visits; i++) starts[a.chosen[i] + 1]++;
    for (int64_t e = 0; e < a.num_experts; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < visits; i++) {
      const int64_t place = starts[a.chosen[i]]++;  // which so comes to where the next expert's begin
      tokens[place] = i / a.num_chosen, shares[place] = a.shares[i];
    }
    for (int64_t e = a.num_experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
    __builtin_memset(so_far, 0, a.rows * sizeof *so_far);
    for (int64_t place = 0; place < visits; place++) {
      const int64_t t = tokens[place];
      places[t * a.num_chosen + so_far[t]++] = place;
    }
  }
};

// How the memory of `experts` is divided: sizes are in bytes, and all parts begin with a cache line.
struct ExpertsMemory {
  int64_t stride, visits, rows, wide, inner, results;
  explicit ExpertsMemory(const Experts& a) {
    const int64_t size = a.dtype == FLOAT32 ? sizeof(float) : sizeof(bf16);
    stride = whole_lines(a.hidden * size);
    visits = whole_lines(Visits::bytes(a));
    rows = a.rows * stride;  // as many as visit one expert at most
    wide = a.activation == NONE ? 0 : whole_lines(a.rows * 2 * a.inner * size);
    inner = whole_lines(a.rows * a.inner * size);
    results = whole_lines(a.rows * a.num_chosen * a.hidden * size);
  }
  int64_t all() const { return visits + rows + wide + inner + results; }
};

template <class T, class Run>
void experts_in(const Experts& a, void* memory, Run run) {
  const ExpertsMemory sizes(a);
  const Visits visits(a, memory);
  char* const rows = static_cast<char*>(memory) + sizes.visits;
  char* const wide = rows + sizes.rows;
  char* const inner = wide + sizes.wide;
  T* const results = reinterpret_cast<T*>(inner + sizes.inner);
  void* const rest = inner + sizes.inner + sizes.results;
  const T* const x = static_cast<const T*>(a.x);
  for (int64_t e = 0; e < a.num_experts; e++) {
    const int64_t begin = visits.starts[e], count = visits.starts[e + 1] - begin;
    if (count == 0) continue;
    Op up = a.products[2 * e], down = a.products[2 * e + 1];
    up.linear.rows = down.linear.rows = count;
    up.linear.dtype = down.linear.dtype = a.dtype;
    if (count == 1) {  // lies where it is
      up.linear.x = x + visits.tokens[begin] * a.hidden, up.linear.x_stride = a.hidden;
    } else {
      share(count, count * a.hidden < FEW ? count : 0, [&](int64_t i) {
        __builtin_memcpy(rows + i * sizes.stride, x + visits.tokens[begin + i] * a.hidden, a.hidden * sizeof(T));
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
  share(a.rows, a.rows * a.num_chosen * a.hidden < FEW ? a.rows : 0, [&](int64_t t) {
    for (int64_t k = 0; k < a.hidden; k += LANES) {
      vf total = {};
      for (int64_t i = 0; i < a.num_chosen; i++) {
        const int64_t place = visits.places[t * a.num_chosen + i];
        total += load(results + place * a.hidden + k, a.hidden - k) * visits.shares[place];
      }
      store(static_cast<T*>(a.out) + t * a.hidden + k, total, a.hidden - k);
    }
  });
}

// run, shared_bytes: a level's, which may be above this one.
template <class Run>
void experts(const Experts& a, void* memory, Run run) {
  a.dtype == FLOAT32 ? experts_in<float>(a, memory, run) : experts_in<bf16>(a, memory, run);
}
template <class SharedBytes>
size_t experts_bytes(const Experts& a, SharedBytes shared_bytes) {
  size_t most_bytes = 0;
  for (int64_t i = 0; i < 2; i++) {  // all experts' products are alike
    Op product = a.products[i];
    product.linear.rows = a.rows, product.linear.dtype = a.dtype;
    most_bytes = most(most_bytes, shared_bytes(product));
  }
  return ExpertsMemory(a).all() + most_bytes;
}
