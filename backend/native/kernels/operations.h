// The operations, as Python packs them (backend/native/library.py), and what all levels need to read them.

#pragma once

#include <cstddef>
#include <cstdint>

namespace {

struct bf16 {
  uint16_t bits;
};
struct e4m3 {  // four bits of exponent, three of mantissa
  uint8_t bits;
};
struct int4x32 {  // a group of 32 weights, each held as 8 more than it is: the first 16 in the bytes' low halves
  uint8_t bytes[16];
};
struct mxfp4x32 {  // the same of weights that are held as a sign, two bits of exponent and one of mantissa
  uint8_t bytes[16];
};
constexpr int64_t GROUP = 32;

enum Dtype : int64_t { FLOAT32, BFLOAT16 };
enum Format : int64_t { PLAIN, INT8, INT4, MXFP4 };  // how a weight is held; PLAIN: in the dtype of the input
// How keys and values are kept. Of SCALED ones a row is the head's D bytes, and then a float to multiply them with.
enum KvForm : int64_t { AS_COMPUTED, SCALED_INT8, SCALED_E4M3 };
constexpr int64_t SCALE_BYTES = 4;
enum Activation : int64_t { NONE, SILU, GELU, SWIGLU_OAI };

// The operations, as Python packs them: eight bytes per field. Strides count elements. T rows, one per token.

struct Linear {  // out[T, N] = x[T, K] w[N, K]^T + bias[N]
  const void *x, *w, *scales,
      *bias;  // scales: of INT8 float32 [N], of the others bfloat16 [N, K / 32]; bias may be null
  void* out;
  int64_t rows, outs, ins, x_stride, dtype, format;
  int64_t is_packed, activation;  // how the weight lies; if it is packed, out[T, N / 2] where its first half are gates
};
struct Expand {  // out[N, K]: a weight that is not PLAIN, in dtype
  const void *w, *scales;
  void* out;
  int64_t outs, ins, dtype, format;
};
struct ToInt4 {   // a weight held as INT4, [N, K / 32] groups: by the best of some scales
  const void* w;  // [N, K]
  const float* ends;
  uint8_t* numbers;
  bf16* scales;
  int64_t outs, ins, num_ends, dtype;  // ends: where a group's largest weight may come to lie
};
struct RmsNorm {  // sum = x + residual, out = norm(sum) * weight; without a residual, that of x
  const void *x, *residual, *weight;
  void *out, *sum;
  int64_t rows, x_stride, inner, dim, dtype, weight_dtype;  // each row is `inner` vectors of `dim`
  double eps;
};
struct Rope {  // out[T, H, D]: x with the pairs (i, i + R / 2) of its first R dimensions turned
  const void* x;
  const float *cos, *sin;  // [T, R / 2]
  void* out;
  int64_t rows, x_stride, heads, dim, turned_dim, dtype;
};
struct Gated {  // out[T, I]: of x[T, :I], the gates, and of x[T, I:]
  const void* x;
  void* out;
  int64_t rows, inner, dtype, activation;
};
struct StoreKv {  // strides and sizes in bytes
  const char *key, *value;
  char *key_cache, *value_cache;
  const int64_t* slots;
  int64_t rows, key_stride, value_stride, row_bytes;
};
struct Enter {  // of one product, queries and keys are normed, if there are weights, and turned, keys and values stored
  const void *qkv, *query_weight, *key_weight;  // [T, (H + 2 Hkv) D]; the weights may be null
  const float *cos, *sin;                       // [T, R / 2]
  void *query, *keys, *values;                  // [T, H, D]; caches
  const int64_t* slots;
  int64_t rows, stride, heads, kv_heads, dim, turned_dim, dtype, weight_dtype, form;
  double eps;
};
struct Embed {  // out[T, K]: rows of a packed weight of bfloat16
  const void* w;
  const int64_t* ids;
  void* out;
  int64_t rows, ins;
};
struct Gather {  // out[T, row_bytes]: rows of a table
  const char* table;
  const int64_t* ids;
  char* out;
  int64_t rows, row_bytes;
};
struct Add {  // out[T, K] = x + y
  const void *x, *y;
  void* out;
  int64_t rows, dim, dtype;
};
struct Scale {  // out[T, K] = x * factor
  const void* x;
  void* out;
  int64_t rows, dim, dtype;
  double factor;
};
struct Route {    // of each row the experts of its largest scores, and their shares of the softmax
  const void* x;  // [T, E]
  float* shares;
  int64_t* chosen;                                              // [T, K]
  int64_t rows, num_experts, num_chosen, dtype, is_normalised;  // whether the shares of a row add up to one
};
struct Op;
struct Experts {  // out[T, D]: of each row the sum of what the chosen experts make of it, times their shares
  const void* x;
  const int64_t* chosen;
  const float* shares;  // [T, C]
  const Op* products;   // [E, 2]: LINEAR, with neither rows nor what is read and written
  void* out;
  int64_t rows, hidden, inner, num_experts, num_chosen, dtype, activation;  // NONE where the first product has it
};
struct Attend {
  const void *query, *keys, *values;          // [T, Hq, D]; caches: [num_blocks, block_size, Hkv, D]
  void* out;                                  // [T, Hq, D]
  const int32_t *tables, *starts, *seq_lens;  // [S, table_width]; [S + 1]: where queries begin; [S]
  const float* sinks;                         // [Hq]: a score of each head that has no value; may be null
  int64_t num_seqs, table_width, block_size, num_heads, num_kv_heads, head_dim, dtype, form, window;  // window 0: none
  double scale, softcap;                                                                              // softcap 0: none
};

struct Logits {  // out[T, V]: x in float32, times a factor, and capped
  const void* x;
  float* out;
  int64_t rows, size, dtype;
  double factor, softcap;  // softcap 0: none
};
struct Argmax {  // chosen[T]: of each row the first of its largest numbers, or the first that is no number
  const void* x;
  int64_t* chosen;
  int64_t rows, size, dtype;
};
struct Draw {  // chosen[T]: the first up to which exp(x[row] / temperature) sums to more than `share` of its whole sum
  const float* x;
  const int64_t* row;
  const float* temperature;
  const double* share;
  const int64_t* top_k;  // what is summed (filters.h); the three are null where it is all
  const float *top_p, *min_p;
  int64_t* chosen;
  int64_t rows, size;
};
struct Penalise {  // x[row, token], for each of the entries
  float* x;
  const int64_t *row, *token;
  const float *count, *presence, *frequency, *repetition;
  int64_t entries, size;
};
struct AddBias {
  float* x;
  const int64_t *row, *token;
  const float* value;
  int64_t entries, size;
};
struct Forbid {  // x[row] is -inf where a bit of allowed[T, words] is 0
  float* x;
  const int64_t* row;
  const uint32_t* allowed;
  int64_t rows, size, words;
};
struct Logprobs {  // log(softmax(x[row])) of a token, how many have a larger logit, plus 1, and of the `top` likeliest
  const float* x;
  const int64_t *row, *token;  // [T]; row: null where they are all, in order
  float* logprob;
  int64_t *rank, *top_token;  // [T]; [T, top]: of equals the first
  float* top_logprob;         // [T, top]
  int64_t rows, size, top;    // at most size
};

enum Code : int64_t {
  LINEAR,
  EXPAND,
  RMS_NORM,
  ROPE,
  GATED,
  STORE_KV,
  ATTEND,
  ENTER,
  EMBED,
  ARGMAX,
  DRAW,
  GATHER,
  SCALE,
  PENALISE,
  ADD_BIAS,
  FORBID,
  ROUTE,
  EXPERTS,
  LOGPROBS,
  ADD,
  LOGITS,
  TO_INT4
};

struct Op {
  int32_t code, num_threads;  // at most so many
  union {
    int64_t fields[19];
    Linear linear;
    Expand expand;
    ToInt4 to_int4;
    RmsNorm rms_norm;
    Rope rope;
    Gated gated;
    StoreKv store_kv;
    Attend attend;
    Enter enter;
    Embed embed;
    Gather gather;
    Scale scale;
    Add add;
    Logits logits;
    Argmax argmax;
    Draw draw;
    Penalise penalise;
    AddBias add_bias;
    Forbid forbid;
    Route route;
    Experts experts;
    Logprobs logprobs;
  };
};
static_assert(sizeof(Op) == 160, "as library.py packs it");

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t longest(const Attend& a) {  // of the sequences
  int64_t length = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) length = most(length, a.seq_lens[seq]);
  return length;
}

inline uint16_t to_bf16(float value) {  // to the nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float to_float(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

}  // namespace
