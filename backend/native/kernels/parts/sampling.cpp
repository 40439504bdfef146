#include "../level.h"
#include "../parts.h"

namespace {

template <class T>
void run_sampling(const Op& op) {
  using namespace LEVEL;
  switch (op.code) {
    case ARGMAX: return argmax<T>(op.argmax);
    case LOGITS: return logits<T>(op.logits);
    case ROUTE: return route<T>(op.route);
    case DRAW: return draw<T>(op.draw);
  }
}

}  // namespace

void parts::sampling(const Op& op) {
  switch (op.code) {
    case PENALISE: return LEVEL::penalise(op.penalise);
    case ADD_BIAS: return LEVEL::add_bias(op.add_bias);
    case FORBID: return LEVEL::forbid(op.forbid);
    case LOGPROBS: return LEVEL::logprobs(op.logprobs);
  }
  const int64_t dtype = op.code == ARGMAX   ? op.argmax.dtype
                        : op.code == LOGITS ? op.logits.dtype
                        : op.code == DRAW   ? op.draw.dtype
                                            : op.route.dtype;
  dtype == FLOAT32 ? run_sampling<float>(op) : run_sampling<bf16>(op);
}
