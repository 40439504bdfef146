// The operations as Python packs them (backend/native/library.py, ops/native.py, attention/native.py), and helpers that
// all levels use to read them.

#pragma once

#include <cstddef>
#include <cstdint>

namespace warmpath {

struct bf16 {
  uint16_t bits;
};
struct e4m3 {  // four bits of exponent, three of mantissa
  uint8_t bits;
};
struct int4x32 {  // a group of 32 weights plus 8 each: the first 16 in the low halves of the bytes, the others in the
                  // high
  uint8_t bytes[16];
};
struct mxfp4x32 {  // the same for four-bit floats: a sign, two bits of exponent and one of mantissa
  uint8_t bytes[16];
};
constexpr int64_t GROUP = 32;

enum Dtype : int64_t { FLOAT32, BFLOAT16 };
// Of a weight. PLAIN: the dtype of the input. From Q8_0 on: types of GGUF files, always packed (level/blocks.h).
enum Format : int64_t { PLAIN, INT8, INT4, MXFP4, Q8_0, Q4_0, IQ4_NL, IQ4_XS, Q4_K, Q5_K, Q6_K };
// How keys and values are stored. In the SCALED formats, a row is D bytes followed by a float, their scale.
enum KvFormat : int64_t { UNQUANTISED, SCALED_INT8, SCALED_E4M3 };
constexpr int64_t SCALE_BYTES = 4;
enum Activation : int64_t { NONE, SILU, GELU, SWIGLU_OAI };

// Every field has eight bytes. Strides count elements. T is the number of rows, one per token.

struct Linear {  // out[T, N] = x[T, K] w[N, K]^T + bias[N]
  const void *x, *w, *scales,
      *bias;  // scales: float32 [N] for INT8, bfloat16 [N, K / 32] for INT4 and MXFP4; bias may be null
  void* out;
  int64_t rows, outs, ins, x_stride, dtype, format;
  int64_t is_packed, activation;  // with an activation, a packed weight's first half of outputs are gates, and the
                                  // result is out[T, N / 2]
  int64_t out_stride;             // of block types; others write adjacent rows
};
struct Expand {  // out[N, K]: a quantised weight in dtype
  const void *w, *scales;
  void* out;
  int64_t outs, ins, dtype, format;
};
struct ToInt4 {   // quantises a weight to INT4, [N, K / 32] groups, with the best of several scales each
  const void* w;  // [N, K]
  const float* ends;
  uint8_t* numbers;
  bf16* scales;
  int64_t outs, ins, num_ends, dtype;  // ends: the values that a group's largest weight may be mapped to
};
struct RmsNorm {  // sum = x + residual, out = norm(sum) * weight; without a residual, out = norm(x) * weight
  const void *x, *residual, *weight;
  void *out, *sum;
  int64_t rows, x_stride, inner, dim, dtype, weight_dtype;  // a row has `inner` vectors of `dim`
  double eps;
};
struct Rope {  // out[T, H, D]: x with the pairs (i, i + R / 2) of its first R dimensions rotated
  const void* x;
  const float *cos, *sin;  // [T, R / 2]
  void* out;
  int64_t rows, x_stride, heads, dim, rotary_dim, dtype;
};
struct Gated {  // out[T, I] = activation(x[T, :I]) * x[T, I:]
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
// Norms (if there are weights) and rotates queries and keys; stores keys and values; writes queries.
struct NormRopeStore {
  const void *qkv, *query_weight, *key_weight;  // [T, (H + 2 Hkv) D]; the weights may be null
  const float *cos, *sin;                       // [T, R / 2]
  void *query, *keys, *values;                  // [T, H, D]; caches
  const int64_t* slots;
  int64_t rows, stride, heads, kv_heads, dim, rotary_dim, dtype, weight_dtype, kv_format;
  double eps;
};
struct Embed {  // out[T, K]: rows of a packed weight, in bfloat16; its format is PLAIN or a block type
  const void* w;
  const int64_t* ids;
  void* out;
  int64_t rows, ins, format;
};
struct PackBlocks {       // out: a weight of a block type, [N][K / UNIT] blocks as in a file, as panels
  const void *w, *gated;  // gated: the second half of the outputs, if the first half are gates; or null
  void* out;
  int64_t outs, ins, format;
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
struct Route {    // the top-k experts of each row, and their weights
  const void* x;  // [T, E]
  float* weights;
  int64_t* chosen;                                              // [T, K]
  int64_t rows, num_experts, num_chosen, dtype, is_normalised;  // whether a row's weights add up to 1
};
struct Op;
struct Experts {  // out[T, D]: the sum of each row's chosen experts, times their weights
  const void* x;
  const int64_t* chosen;
  const float* weights;  // [T, C]
  const Op* products;    // [E, 2]: LINEAR, without rows, input and output
  void* out;
  int64_t rows, hidden, inner, num_experts, num_chosen, dtype, activation;  // NONE if the first product applies it
};
struct Attend {
  const void *query, *keys, *values;          // [T, Hq, D]; caches: [num_blocks, block_size, Hkv, D]
  void* out;                                  // [T, Hq, D]
  const int32_t *tables, *starts, *seq_lens;  // [S, table_width]; [S + 1]: where each sequence's queries begin; [S]
  const float* sinks;                         // [Hq]: an additional score per head, without a value; may be null
  int64_t num_seqs, table_width, block_size, num_heads, num_kv_heads, head_dim, dtype, kv_format,
      window;             // window 0: none
  double scale, softcap;  // softcap 0: none
};

struct Logits {  // out[T, V]: x in float32, times the factor, capped
  const void* x;
  float* out;
  int64_t rows, size, dtype;
  double factor, softcap;  // softcap 0: none
};
struct Argmax {  // chosen[T]: the index of each row's largest number (of equals the first), or of its first NaN
  const void* x;
  int64_t* chosen;
  int64_t rows, size, dtype;
};
struct Draw {  // chosen[T]: the first index up to which exp(x[row] / temperature) sums to more than `share` of its
               // total; with a temperature of 0, the argmax
  const void* x;
  const int64_t* row;
  const float* temperature;
  const double* share;
  const int64_t* top_k;  // filters (filters.h); all three are null if there are none
  const float *top_p, *min_p;
  int64_t* chosen;
  int64_t rows, size, dtype;
  const int64_t* occurrences;  // [3, T]: addresses of each row's penalised tokens (int64) and of their counts in the
                               // output (float32), and how many tokens; null: no row has penalties
  const float* penalties;      // [3, T]: presence, frequency and repetition penalty of each row
};
struct Penalise {  // changes x[row, token] for each entry
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
struct Forbid {  // sets x[row] to -inf wherever the bit of allowed[T, words] is 0
  float* x;
  const int64_t* row;
  const uint32_t* allowed;
  int64_t rows, size, words;
};
struct Logprobs {  // log(softmax(x[row])) of a token and of the `top` most likely ones, and the token's rank
  const float* x;
  const int64_t *row, *token;  // [T]; row: null for all rows in order
  float* logprob;
  int64_t *rank, *top_token;  // [T]; [T, top]: of equals the lowest first
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
  NORM_ROPE_STORE,
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
  TO_INT4,
  PACK_BLOCKS
};

struct Op {
  int32_t code, num_threads;  // num_threads: at most
  union {
    int64_t fields[19];
    Linear linear;
    Expand expand;
    ToInt4 to_int4;
    PackBlocks pack_blocks;
    RmsNorm rms_norm;
    Rope rope;
    Gated gated;
    StoreKv store_kv;
    Attend attend;
    NormRopeStore norm_rope_store;
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
static_assert(sizeof(Op) == 160, "library.py packs operations of this size");

inline bool is_block_type(int64_t format) { return format >= Q8_0; }

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t longest_sequence(const Attend& a) {
  int64_t length = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) length = max_of(length, a.seq_lens[seq]);
  return length;
}

inline uint16_t to_bf16(float value) {  // rounds to nearest, ties to even
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

}  // namespace warmpath
using namespace warmpath;
