// Runs one operation.

// Calls f with a value of the weight's element type; T for PLAIN.
template <class T, class F>
inline auto with_weight_type(int64_t format, F f) {
  switch (format) {
    case INT8: return f(int8_t{});
    case INT4: return f(int4x32{});
    case MXFP4: return f(mxfp4x32{});
    default: return f(T{});
  }
}

template <class T>
void run_with(const Op& op) {
  switch (op.code) {
    case LINEAR:
      return with_weight_type<T>(op.linear.format,
                                 [&](auto w) { linear_columns<T, decltype(w)>(op.linear, 0, op.linear.outs); });
    case EXPAND: return with_weight_type<T>(op.expand.format, [&](auto w) { expand<T, decltype(w)>(op.expand); });
    case TO_INT4: return to_int4<T>(op.to_int4);
    case RMS_NORM:
      return op.rms_norm.weight_dtype == FLOAT32 ? rms_norm<T, float>(op.rms_norm) : rms_norm<T, bf16>(op.rms_norm);
    case NORM_ROPE_STORE:
      return op.norm_rope_store.weight_dtype == FLOAT32 ? norm_rope_store<T, float>(op.norm_rope_store)
                                                        : norm_rope_store<T, bf16>(op.norm_rope_store);
    case ROPE: return rope<T>(op.rope);
    case GATED: return gated<T>(op.gated);
    case ARGMAX: return argmax<T>(op.argmax);
    case SCALE: return scale<T>(op.scale);
    case ADD: return add<T>(op.add);
    case LOGITS: return logits<T>(op.logits);
    case ROUTE: return route<T>(op.route);
  }
}

inline size_t shared_bytes(const Op& op) {
  if (op.code == LINEAR && op.linear.is_packed) {
    return with_weight_type<bf16>(op.linear.format, [&](auto w) { return input_bytes<decltype(w)>(op.linear); });
  }
  if (op.code == ATTEND) {
    for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
      if (fits_tiles(op.attend, seq)) return heads_together(op.attend) * packed_head_bytes(op.attend);
  }
  if (op.code == EXPERTS) return experts_bytes(op.experts, shared_bytes);
  return 0;
}

inline int64_t dtype_of(const Op& op) {
  switch (op.code) {
    case LINEAR: return op.linear.dtype;
    case EXPAND: return op.expand.dtype;
    case TO_INT4: return op.to_int4.dtype;
    case RMS_NORM: return op.rms_norm.dtype;
    case ROPE: return op.rope.dtype;
    case GATED: return op.gated.dtype;
    case NORM_ROPE_STORE: return op.norm_rope_store.dtype;
    case ARGMAX: return op.argmax.dtype;
    case SCALE: return op.scale.dtype;
    case ADD: return op.add.dtype;
    case LOGITS: return op.logits.dtype;
    case ROUTE: return op.route.dtype;
    default: return FLOAT32;
  }
}

void run(const Op& op, void* shared) {
  if (op.code == LINEAR && op.linear.is_packed) {
    return with_weight_type<bf16>(op.linear.format, [&](auto w) { linear_packed<decltype(w)>(op.linear, shared); });
  }
  if (op.code == EMBED) return embed(op.embed);
  if (op.code == ATTEND) {
    for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
      if (fits_tiles(op.attend, seq)) attend_tiles(op.attend, seq, shared);
    return attend(op.attend, fits_tiles);
  }
  if (op.code == EXPERTS) return experts(op.experts, shared, run);
  if (op.code == STORE_KV) return store_kv(op.store_kv);
  if (op.code == GATHER) return gather(op.gather);
  if (op.code == DRAW) return draw(op.draw);
  if (op.code == PENALISE) return penalise(op.penalise);
  if (op.code == ADD_BIAS) return add_bias(op.add_bias);
  if (op.code == FORBID) return forbid(op.forbid);
  if (op.code == LOGPROBS) return logprobs(op.logprobs);
  dtype_of(op) == FLOAT32 ? run_with<float>(op) : run_with<bf16>(op);
}
