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
