#include "../level.h"
#include "../parts.h"

namespace {

template <class T>
void run_products(const Op& op) {
  using namespace LEVEL;
  switch (op.code) {
    case LINEAR:
      return with_weight_type<T>(op.linear.format,
                                 [&](auto w) { linear_columns<T, decltype(w)>(op.linear, 0, op.linear.outs); });
    case EXPAND: return with_weight_type<T>(op.expand.format, [&](auto w) { expand<T, decltype(w)>(op.expand); });
    case TO_INT4: return to_int4<T>(op.to_int4);
  }
}

}  // namespace

void parts::products(const Op& op) {
  const int64_t dtype = op.code == LINEAR ? op.linear.dtype : op.code == EXPAND ? op.expand.dtype : op.to_int4.dtype;
  dtype == FLOAT32 ? run_products<float>(op) : run_products<bf16>(op);
}
