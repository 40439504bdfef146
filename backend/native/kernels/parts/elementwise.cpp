#include "../level.h"
#include "../parts.h"

namespace {

template <class T>
void run_elementwise(const Op& op) {
  using namespace LEVEL;
  switch (op.code) {
    case RMS_NORM:
      return op.rms_norm.weight_dtype == FLOAT32 ? rms_norm<T, float>(op.rms_norm) : rms_norm<T, bf16>(op.rms_norm);
    case NORM_ROPE_STORE:
      return op.norm_rope_store.weight_dtype == FLOAT32 ? norm_rope_store<T, float>(op.norm_rope_store)
                                                        : norm_rope_store<T, bf16>(op.norm_rope_store);
    case ROPE: return rope<T>(op.rope);
    case GATED: return gated<T>(op.gated);
    case SCALE: return scale<T>(op.scale);
    case ADD: return add<T>(op.add);
  }
}

int64_t dtype_of(const Op& op) {
  switch (op.code) {
    case RMS_NORM: return op.rms_norm.dtype;
    case NORM_ROPE_STORE: return op.norm_rope_store.dtype;
    case ROPE: return op.rope.dtype;
    case GATED: return op.gated.dtype;
    case SCALE: return op.scale.dtype;
    default: return op.add.dtype;
  }
}

}  // namespace

void parts::elementwise(const Op& op) {
  if (op.code == EMBED) return LEVEL::embed(op.embed);
  if (op.code == STORE_KV) return LEVEL::store_kv(op.store_kv);
  if (op.code == GATHER) return LEVEL::gather(op.gather);
  dtype_of(op) == FLOAT32 ? run_elementwise<float>(op) : run_elementwise<bf16>(op);
}
