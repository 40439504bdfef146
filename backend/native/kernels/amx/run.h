// Runs one operation.

size_t shared_bytes(const Op& op) {
  if (op.code == LINEAR && op.linear.is_packed) return packed_bytes(op.linear);
  if (op.code == LINEAR && fits_tiles(op.linear))
    return ceil_div(op.linear.rows, TILE) * TILE * (op.linear.ins * 2 + sizeof(float));
  if (op.code == ATTEND) {
    const Attend& a = op.attend;
    if (a.kv_format != UNQUANTISED) return avx512::shared_bytes(op);
    for (int64_t seq = 0; seq < a.num_seqs; seq++)
      if (fits_tiles(a, seq)) return a.num_kv_heads * a.head_dim * (longest_sequence(a) + 2 * DEPTH) * sizeof(bf16);
  }
  if (op.code == EXPERTS) return avx512::experts_bytes(op.experts, shared_bytes);
  return 0;
}

void run(const Op& op, void* shared) {
  if (op.code == LINEAR && fits_tiles(op.linear)) {
    const Linear& a = op.linear;
    if (a.is_packed) return linear_packed(a, shared);
    return avx512::with_weight_type<bf16>(a.format,
                                          [&](auto w) { linear<decltype(w)>(a, static_cast<uint32_t*>(shared)); });
  }
  if (op.code == EMBED) return embed(op.embed);
  if (op.code == EXPERTS) return avx512::experts(op.experts, shared, run);
  if (op.code != ATTEND || op.attend.kv_format != UNQUANTISED) return avx512::run(op, shared);
  for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
    if (fits_tiles(op.attend, seq)) attend_sequence(op.attend, seq, static_cast<uint16_t*>(shared));
  avx512::attend(op.attend, fits_tiles);
}
