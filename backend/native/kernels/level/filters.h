// The sampling filters top-k, top-p and min-p. Tokens are ranked by their weights (weights.h). Each filter keeps a
// prefix of the tokens in falling order, so all filters together keep the shortest prefix, and it is enough to know the
// least weight in it. Equal weights are kept or dropped together.

struct Filters {
  int64_t top_k;
  float top_p, min_p;
  bool has_top_k, has_top_p, has_min_p;
  Filters(const Draw& a, int64_t t)
      : top_k(a.top_k ? a.top_k[t] : a.size),
        top_p(a.top_p ? a.top_p[t] : 1),
        min_p(a.min_p ? a.min_p[t] : 0),
        has_top_k(top_k < a.size),
        has_top_p(top_p < 1),
        has_min_p(min_p > 0) {}
};

// A weight that at least `top_k` tokens reach, by the highest weights of chunks or of their columns. 0 if these are too
// few.
template <class T>
float bound_of_top_k(const LogitsRow<T>& row, const Room& room, int64_t top_k) {
  const auto is_kept = [top_k](int64_t above, double) { return above < top_k; };
  if (top_k <= row.chunks) return end_of_prefix(row.peaks, row.chunks, room.few, is_kept).weight;
  if (top_k > row.chunks * COLUMNS) return 0;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    row.with(chunk, [&](auto* from) {
      for (int64_t column = 0; column < COLUMNS; column += LANES) {
        vf highest = all(-__builtin_inff());
        for (int64_t i = column; i < CHUNK_SIZE; i += COLUMNS) highest = max(load(from + i), highest);
        store(room.some + chunk * COLUMNS + column, row.weight(highest));
      }
    });
  }
  return end_of_prefix(room.some, row.chunks * COLUMNS, room.few, is_kept).weight;
}

// Sums the weights of each chunk that are at least `least`. Returns the sum of all.
template <class T>
double sum_chunks(const LogitsRow<T>& row, const Room& room, float least) {
  float weights[CHUNK_SIZE];
  double total = 0;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    room.sums[chunk] = 0;
    if (!row.reaches(chunk, least)) continue;
    row.weigh(chunk, weights);
    const auto kept = [least](vf weight) { return weight >= least ? weight : vf{}; };
    total += room.sums[chunk] = least > 0 ? sum_of(weights, kept) : sum_of(weights);
  }
  return total;
}

// A weight such that all smaller ones sum to less than half of `dropped`, whatever the rounding. Knows the sums of
// chunks, and of the others only that they have CHUNK_SIZE weights below the bound at most.
template <class T>
float bound_of_mass(const LogitsRow<T>& row, const Room& room, double dropped) {
  const float least = dropped / (2 * row.chunks * CHUNK_SIZE);  // is such a weight
  for (float bound = dropped / (2 * CHUNK_SIZE); bound > least; bound /= 4) {
    double below = 0;
    int64_t others = 0;
    for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
      const bool is_other = row.reaches(chunk, bound);
      others += is_other;
      below += is_other ? 0 : room.sums[chunk];
    }
    if (below + double(bound) * others * CHUNK_SIZE < dropped / 2) return bound;
  }
  return least;
}

// Copies the weights of at least `bound` to `some`, chunk after chunk, and returns how many there are.
template <class T>
int64_t collect(const LogitsRow<T>& row, const Room& room, float bound) {
  float weights[CHUNK_SIZE];
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    if (row.reaches(chunk, bound)) {
      row.weigh(chunk, weights);
      count += copy_range(weights, CHUNK_SIZE, bound, __builtin_inff(), room.some + count);
    }
    room.ends[chunk] = count;
  }
  return count;
}

// Adds those weights of each chunk that were copied and are at least `least`. Returns the sum of all chunks.
inline double sum_copied(const Room& room, int64_t chunks, float least) {
  vf place[COLUMNS / LANES];
  for (int64_t i = 0; i < COLUMNS; i++) place[i / LANES][i % LANES] = i;
  double total = 0;
  for (int64_t chunk = 0, begin = 0; chunk < chunks; begin = room.ends[chunk++]) {
    const int64_t count = room.ends[chunk] - begin;
    vf columns[COLUMNS / LANES] = {};
    for (int64_t i = 0; i < count; i += COLUMNS) {
      unroll<COLUMNS / LANES>([&](auto part) __attribute__((always_inline)) {
        const vf weight = load(room.some + begin + i + part * LANES);
        columns[part] += (weight >= least & place[part] < float(count - i)) ? weight : vf{};
      });
    }
    if (count) room.sums[chunk] += sum_of_columns(columns);
    total += room.sums[chunk];
  }
  return total;
}

// The weight of the last token that all filters keep, which include top-k or top-p. `total`: with top-p alone, the sum
// of all weights, after `sum_chunks`. Copies all weights kept, and some more, to `some`.
//
// `top_p` refers to the sum of what the other filters keep. If weights at the end of top-k are equal, that sum includes
// only as many as top-k says.
template <class T>
float least_kept(const LogitsRow<T>& row, const Room& room, const Filters& wanted, double total) {
  const int64_t top_k = wanted.top_k;
  float bound = wanted.min_p;  // weights that are certainly dropped need not be counted
  if (wanted.has_top_k) {
    const float reached = LogitsRow<T>::lowered(bound_of_top_k(row, room, top_k));
    bound = reached > bound ? reached : bound;
  } else if (!wanted.has_min_p) {
    bound = bound_of_mass(row, room, (1 - double(wanted.top_p)) * total);
  }
  const int64_t count = collect(row, room, bound);
  const bool is_cut = wanted.has_top_k && top_k < count;
  if (!is_cut && !wanted.has_top_p) return bound;
  if (!is_cut) {
    if (wanted.has_top_k || wanted.has_min_p) total = sum_above(room.some, count, -1);
    return end_of_mass(room.some, count, room.few, total, wanted.top_p * total);
  }
  const auto is_kept = [top_k](int64_t above, double) { return above < top_k; };
  const End end = end_of_prefix(room.some, count, room.few, is_kept);
  if (!wanted.has_top_p) return end.weight;
  total = end.mass + double(top_k - end.above) * end.weight;
  const int64_t kept = copy_range(room.some, count, end.weight, __builtin_inff(), room.few);
  return end_of_mass(room.few, kept, room.fewer, total, wanted.top_p * total);
}

// Applies top-p alone in one pass over the row, if a sample of the weights tells a range in which it ends: sums larger
// weights, and copies those in the range. Sets `least` to the least weight kept, and `total` to the sum of what is
// kept. False if the sample does not tell, or if the range turns out to be wrong.
template <class T>
bool keep_top_p(const LogitsRow<T>& row, const Room& room, float top_p, float& least, double& total) {
  if (row.chunks * CHUNK_SIZE < MANY) return false;
  for (int64_t i = 0; i < SAMPLE; i += COLUMNS) {  // a block of a chunk, each time at another place
    row.with(row.chunks * i / SAMPLE, [&](auto* from) {
      for (int64_t j = 0; j < COLUMNS; j += LANES)
        store(room.few + i + j, row.weight(load(from + i * 7 % CHUNK_SIZE + j)));
    });
  }
  Range range;
  if (!range_of_share(room.few, top_p, range)) return false;
  float weights[CHUNK_SIZE];
  double mass = 0, above = 0;
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    room.sums[chunk] = 0;
    if (row.peaks[chunk] > 0) {
      row.weigh(chunk, weights);
      mass += sum_of(weights);
      above += room.sums[chunk] = sum_of(weights, [&](vf weight) { return weight > range.high ? weight : vf{}; });
      count += copy_range(weights, CHUNK_SIZE, range.low, range.high, room.some + count);
    }
    room.ends[chunk] = count;
  }
  const double wanted = top_p * mass, between = sum_above(room.some, count, -1);
  if (above >= wanted || above + between < wanted) return false;
  least = end_of_mass(room.some, count, room.few, between, wanted, above);
  total = sum_copied(room, row.chunks, least);
  return true;
}

// Decides which weights of a row are kept: sets `least` to the least one, and `sums` to the sum of each chunk. Returns
// the sum of all.
template <class T>
double keep(const LogitsRow<T>& row, const Room& room, const Filters& wanted, float& least) {
  double total = 0;
  least = wanted.min_p;
  if (!wanted.has_top_k && !wanted.has_top_p) return sum_chunks(row, room, least);
  if (!wanted.has_top_k && !wanted.has_min_p) {
    if (keep_top_p(row, room, wanted.top_p, least, total)) return total;
    total = sum_chunks(row, room, 0);
  }
  least = least_kept(row, room, wanted, total);
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) room.sums[chunk] = 0;
  return sum_copied(room, row.chunks, least);
}
