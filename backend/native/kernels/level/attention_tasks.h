// How attention's rows are divided among the threads: in parts of a few rows, and if there are few rows, as in a decode
// step of one long sequence, in slices of the positions as well.

// Tasks with only some of the heads read memory in small pieces, at half the speed. So heads are only separated if
// there would be fewer tasks than this otherwise.
constexpr int64_t MIN_TASKS_PER_THREAD = 2;

// How the rows of all sequences for which `skips` is false are divided. Reading keys and values takes most of the time,
// so rows that share them are only separated if a thread would have nothing to do otherwise.
struct RowTasks {
  const Attend& a;
  bool (*const skips)(const Attend&, int64_t);
  int64_t together;               // rows in a part, at most
  int64_t parts = 0, slices = 0;  // of all sequences; slices of all parts
  bool by_slices;                 // whether a task is a slice of a part, or the whole part
  int64_t heads;                  // key/value heads of a task

  RowTasks(const Attend& a, bool (*skips)(const Attend&, int64_t), int64_t num_threads) : a(a), skips(skips) {
    int64_t row_slices = 0;
    for (int64_t seq = 0; seq < a.num_seqs; seq++)
      if (rows_of(seq)) row_slices += rows_of(seq) * RowPart(a, seq, 0, rows_of(seq)).slices();
    together = max_of(1, min_of(PART_ROWS, row_slices * a.num_kv_heads / num_threads));
    for (int64_t seq = 0; seq < a.num_seqs; seq++)
      for (int64_t i = 0; i < parts_of(seq); i++) parts++, slices += part(seq, i).slices();
    by_slices = parts < num_threads * TASKS_PER_THREAD && slices > parts;
    const int64_t tasks = num_threads * MIN_TASKS_PER_THREAD;
    heads = max_of(1, min_of(a.num_kv_heads, (by_slices ? slices : parts) * a.num_kv_heads / tasks));
  }
  int64_t rows_of(int64_t seq) const {
    return skips(a, seq) ? 0 : (a.starts[seq + 1] - a.starts[seq]) * (a.num_heads / a.num_kv_heads);
  }
  int64_t parts_of(int64_t seq) const { return ceil_div(rows_of(seq), together); }
  RowPart part(int64_t seq, int64_t i) const {
    const int64_t from = i * rows_of(seq) / parts_of(seq), until = (i + 1) * rows_of(seq) / parts_of(seq);
    return RowPart(a, seq, from, until - from);
  }
  RowPart part(int64_t i) const {  // the i-th of all sequences
    int64_t seq = 0;
    for (; i >= parts_of(seq); seq++) i -= parts_of(seq);
    return part(seq, i);
  }
  // The sums of the slices if `by_slices`: [slices][Hkv][together][floats_of_row], of a bounded number of parts.
  int64_t floats_of_slice() const { return a.num_kv_heads * together * floats_of_row(a.head_dim); }
  size_t bytes() const { return by_slices ? slices * floats_of_slice() * sizeof(float) : 0; }
};

template <class T, class C, int64_t DIM>
void attend_in(const Attend& a, bool (*skips)(const Attend&, int64_t), float* shared) {
  const RowTasks tasks(a, skips, call_settings.num_threads);
  const int64_t head_parts = ceil_div(a.num_kv_heads, tasks.heads), row_floats = floats_of_row(a.head_dim);
  const auto first_head = [&](int64_t i) { return i % head_parts * tasks.heads; };
  const auto num_heads = [&](int64_t i) { return min_of(tasks.heads, a.num_kv_heads - first_head(i)); };
  if (!tasks.by_slices)
    return parallel_for(tasks.parts * head_parts, 1, [&](int64_t i) {
      Rows<T, C, DIM>(a, tasks.part(i / head_parts), first_head(i), num_heads(i)).run();
    });
  parallel_for(tasks.slices * head_parts, 1, [&](int64_t i) {
    int64_t slice = i / head_parts, index = 0;
    for (; slice >= tasks.part(index).slices(); index++) slice -= tasks.part(index).slices();
    const RowPart part = tasks.part(index);
    float* const to = shared + i / head_parts * tasks.floats_of_slice();
    Rows<T, C, DIM>(a, part, first_head(i), num_heads(i))
        .run_slice(slice, to + first_head(i) * part.count * row_floats);
  });
  parallel_for(tasks.parts * a.num_kv_heads, 0, [&](int64_t i) {
    const int64_t index = i / a.num_kv_heads, head = i % a.num_kv_heads;
    const RowPart part = tasks.part(index);
    const float* more = shared + head * part.count * row_floats;
    for (int64_t before = 0; before < index; before++) more += tasks.part(before).slices() * tasks.floats_of_slice();
    Rows<T, C, DIM> rows(a, part, head, 1);
    for (int64_t r = 0; r < part.count; r++) {
      rows.begin_sums(0, r, rows.sums);
      for (int64_t slice = 0; slice < part.slices(); slice++)
        add_slice(rows.sums, more + slice * tasks.floats_of_slice() + r * row_floats, rows.sum_dim);
      rows.finish(0, r, rows.sums);
    }
  });
}
// With the usual sizes of heads as constants, the usual format of AVX-512 takes a tenth less time.
template <class T, class C>
void attend_as(const Attend& a, bool (*skips)(const Attend&, int64_t), float* shared) {
  if constexpr (WIDTH == 64 && std::is_same<C, bf16>::value) switch (a.head_dim) {
      case 64: return attend_in<T, C, 64>(a, skips, shared);
      case 128: return attend_in<T, C, 128>(a, skips, shared);
    }
  attend_in<T, C, 0>(a, skips, shared);
}
template <class T>
void attend(const Attend& a, bool (*skips)(const Attend&, int64_t), float* shared) {
  switch (a.kv_format) {
    case SCALED_INT8: return attend_as<T, int8_t>(a, skips, shared);
    case SCALED_E4M3: return attend_as<T, e4m3>(a, skips, shared);
    default: return attend_as<T, T>(a, skips, shared);
  }
}
// shared: memory of as many bytes as RowTasks says.
inline void attend(const Attend& a, bool (*skips)(const Attend&, int64_t), float* shared) {
  a.dtype == FLOAT32 ? attend<float>(a, skips, shared) : attend<bf16>(a, skips, shared);
}
