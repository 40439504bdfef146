// Prints the results of every operation at the base level, for inputs that are the same on every machine.
#include "../../../backend/native/kernels.cpp"

#include <cstdio>
#include <vector>

template <class T>
T number(int64_t i) {
  const float value = float((i * 7919 + 13) % 257 - 128) / 97.0f;
  if constexpr (sizeof(T) == 2) return T{to_bf16(value)};
  else if constexpr (sizeof(T) == 1) return T((i * 31 + 7) % 255 - 127);
  else return T(value);
}
template <class T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> made;
  for (int64_t i = 0; i < count; i++) made.push_back(number<T>(i));
  return made;
}

template <class T>
void run(const char* name, Op op, const std::vector<T>& out) {
  warmpath_run(&op, 1);
  std::printf("%s", name);
  for (const T& value : out) {
    if constexpr (sizeof(T) == 2) std::printf(" %.9g", to_float(value));
    else std::printf(" %.9g", double(value));
  }
  std::printf("\n");
}

template <class T>
void all_operations(Dtype dtype) {
  constexpr int64_t T_ROWS = 3, K = 96, N = 37;
  const auto x = numbers<T>(T_ROWS * K), w = numbers<T>(N * K), bias = numbers<T>(N);
  const auto w8 = numbers<int8_t>(N * K);
  const auto scales = numbers<float>(N);
  const auto scales4 = numbers<bf16>(N * K / 32);
  std::vector<T> out(T_ROWS * N);
  Op op{LINEAR, 2, {}};
  op.linear = {x.data(), w.data(), nullptr, bias.data(), out.data(), T_ROWS, N, K, K, dtype, PLAIN};
  run("linear", op, out);
  op.linear = {x.data(), w8.data(), scales.data(), nullptr, out.data(), T_ROWS, N, K, K, dtype, INT8};
  run("int8", op, out);
  op.linear = {x.data(), w8.data(), scales4.data(), nullptr, out.data(), T_ROWS, N, K, K, dtype, INT4};
  run("int4", op, out);
  op.linear.format = MXFP4;
  run("mxfp4", op, out);
  const float ends[] = {-8, -7.5, 7, 8};
  std::vector<uint8_t> in_four_bits(N * K / 2);
  std::vector<bf16> found(N * K / 32);
  op.code = TO_INT4;
  op.to_int4 = {w.data(), ends, in_four_bits.data(), found.data(), N, K, 4, dtype};
  run("to_int4", op, found);
  std::vector<T> rows(T_ROWS * K), sums(T_ROWS * K);
  op.code = RMS_NORM;
  op.rms_norm = {x.data(), x.data(), w.data(), rows.data(), sums.data(), T_ROWS, K, 1, K, dtype, dtype, 1e-6};
  run("norm", op, rows);
  const auto angles = numbers<float>(T_ROWS * 12);
  op.code = ROPE;
  op.rope = {x.data(), angles.data(), angles.data(), rows.data(), T_ROWS, K, 4, 24, 24, dtype};
  run("rope", op, rows);
  op.rope.rotary_dim = 10;
  run("part_of_a_rope", op, rows);
  std::vector<T> half(T_ROWS * K / 2);
  op.code = GATED;
  for (Activation activation : {SILU, GELU, SWIGLU_OAI}) {
    op.gated = {x.data(), half.data(), T_ROWS, K / 2, dtype, activation};
    run("gated", op, half);
  }
  op.code = ADD;
  op.add = {x.data(), w.data(), rows.data(), T_ROWS, K, dtype};
  run("sums", op, rows);
  const auto cache = numbers<T>(8 * 4 * 2 * 24), query = numbers<T>(T_ROWS * 4 * 24);
  const int32_t tables[] = {3, 1, 5, 0, 2, 0}, starts[] = {0, 1, 3}, seq_lens[] = {9, 6};
  std::vector<T> seen(T_ROWS * 4 * 24);
  op.code = ATTEND;
  op.attend = {query.data(), cache.data(), cache.data(), seen.data(), tables, starts, seq_lens, nullptr,
               2, 3, 4, 4, 2, 24, dtype, UNQUANTISED, 5, 0.2, 3.0};
  run("attend", op, seen);
  op.attend.sinks = scales.data();
  run("sinks", op, seen);
  auto keys = numbers<T>(8 * 4 * 2 * 24), values = keys;
  const int64_t slots[] = {7, 0, 30};
  op.code = NORM_ROPE_STORE;
  op.norm_rope_store = {x.data(), w.data(), bias.data(), angles.data(), angles.data(), seen.data(), keys.data(),
                        values.data(), slots, 2, K, 0, 2, 24, 20, dtype, dtype, UNQUANTISED, 1e-6};
  run("norm_rope_store", op, keys);
  for (KvFormat kv_format : {SCALED_INT8, SCALED_E4M3}) {
    std::vector<int8_t> bytes(8 * 4 * 2 * (24 + SCALE_BYTES)), more = bytes;
    op.code = NORM_ROPE_STORE;
    op.norm_rope_store = {x.data(), w.data(), bias.data(), angles.data(), angles.data(), seen.data(), bytes.data(),
                          more.data(), slots, 2, K, 0, 2, 24, 20, dtype, dtype, kv_format, 1e-6};
    run("norm_rope_store_bytes", op, bytes);
    op.code = ATTEND;
    op.attend = {query.data(), bytes.data(), more.data(), seen.data(), tables, starts, seq_lens, nullptr,
                 2, 3, 4, 4, 2, 24, dtype, kv_format, 5, 0.2, 3.0};
    run("attend_bytes", op, seen);
  }
  std::vector<int64_t> chosen(T_ROWS);
  op.code = ARGMAX;
  op.argmax = {x.data(), chosen.data(), T_ROWS, K, dtype};
  run("argmax", op, chosen);
  std::vector<float> logits(T_ROWS * K);
  op.code = LOGITS;
  op.logits = {x.data(), logits.data(), T_ROWS, K, dtype, 0.5, 3.0};
  run("logits", op, logits);
}

template <class T>
void mixtures(Dtype dtype) {
  constexpr int64_t T_ROWS = 5, E = 7, CHOSEN = 3, D = 40, I = 24;
  const auto x = numbers<T>(T_ROWS * D), scores = numbers<T>(T_ROWS * E), w = numbers<T>(2 * I * D);
  std::vector<float> shares(T_ROWS * CHOSEN);
  std::vector<int64_t> chosen(T_ROWS * CHOSEN);
  Op op{ROUTE, 2, {}};
  for (int64_t is_normalised : {0, 1}) {
    op.route = {scores.data(), shares.data(), chosen.data(), T_ROWS, E, CHOSEN, dtype, is_normalised};
    run("route", op, shares);
  }
  std::vector<T> out(T_ROWS * D);
  for (int64_t is_packed = 0; is_packed <= (dtype == BFLOAT16); is_packed++) {
    const Activation fused = is_packed ? SWIGLU_OAI : NONE, apart = is_packed ? NONE : SWIGLU_OAI;
    std::vector<Op> products;
    for (int64_t e = 0; e < E; e++) {  // all have the same weights, but different inputs
      Op first{LINEAR, 1, {}}, second{LINEAR, 1, {}};
      first.linear = {nullptr, w.data(), nullptr, nullptr, nullptr, 0, 2 * I, D, 0, dtype, PLAIN, is_packed, fused};
      second.linear = {nullptr, w.data(), nullptr, nullptr, nullptr, 0, D, I, 0, dtype, PLAIN, is_packed, NONE};
      products.push_back(first), products.push_back(second);
    }
    op.code = EXPERTS;
    op.experts = {x.data(), chosen.data(), shares.data(), products.data(), out.data(),
                  T_ROWS, D, I, E, CHOSEN, dtype, apart};
    run("experts", op, out);
  }
}

void drawn_tokens() {
  constexpr int64_t T_ROWS = 4, SIZE = 301;
  auto logits = numbers<float>(T_ROWS * SIZE);
  const int64_t rows[] = {0, 1, 2, 3}, top_k[] = {5, SIZE, 200, SIZE}, tokens[] = {7, 300, 20, 0};
  const float temperature[] = {0.5, 1, 2, 3}, top_p[] = {1, 0.3, 0.9, 1}, min_p[] = {0, 0.01, 0, 0.5};
  const double share[] = {0.1, 0.9, 0.5, 0.3};
  std::vector<int64_t> chosen(T_ROWS);
  Op op{DRAW, 2, {}};
  op.draw = {logits.data(), rows, temperature, share, nullptr, nullptr, nullptr, chosen.data(), T_ROWS, SIZE};
  run("draw", op, chosen);
  op.draw = {logits.data(), rows, temperature, share, top_k, top_p, min_p, chosen.data(), T_ROWS, SIZE};
  run("filtered", op, chosen);
  std::vector<int64_t> ranks(T_ROWS), top(T_ROWS * 7);
  std::vector<float> own(T_ROWS), likeliest(T_ROWS * 7);
  op.code = LOGPROBS;
  op.logprobs = {logits.data(), rows, tokens, own.data(), ranks.data(), top.data(), likeliest.data(), T_ROWS, SIZE, 7};
  run("logprobs", op, own);
  run("ranks", op, ranks);
  run("likeliest", op, top);
  run("likeliest_logprobs", op, likeliest);
  op.code = PENALISE;
  op.penalise = {logits.data(), rows, tokens, temperature, top_p, min_p, temperature, T_ROWS, SIZE};
  run("penalties", op, logits);
  op.code = ADD_BIAS;
  op.add_bias = {logits.data(), rows, tokens, temperature, T_ROWS, SIZE};
  run("bias", op, logits);
  const std::vector<uint32_t> allowed(T_ROWS * 10, 0xa0f1c3b5);
  op.code = FORBID;
  op.forbid = {logits.data(), rows, allowed.data(), T_ROWS, SIZE, 10};
  run("forbidden", op, logits);
}

// Block types of GGUF files: any bytes are codes, and the factors are set.
void block_types() {
  constexpr int64_t T_ROWS = 3, K = 256, N = 16;
  struct {
    Format format;
    int64_t bytes, factor, minimum;  // of a row of one or eight blocks; where a block has its factors
  } const types[] = {{Q8_0, 34, 0, -1}, {IQ4_NL, 18, 0, -1}, {IQ4_XS, 136, 0, -1},
                     {Q4_K, 144, 0, 2},  {Q5_K, 176, 0, 2},   {Q6_K, 210, 208, -1}};
  const auto x = numbers<bf16>(T_ROWS * K);
  std::vector<bf16> out(T_ROWS * N);
  for (const auto& type : types) {
    const int64_t blocks = N * (type.bytes < 100 ? K / 32 : 1);
    std::vector<uint8_t> w(blocks * type.bytes);
    for (size_t i = 0; i < w.size(); i++) w[i] = i * 37 % 251;
    const uint16_t factor = 0x2000;  // 2^-7
    for (int64_t i = 0; i < blocks; i++) {
      __builtin_memcpy(&w[i * type.bytes + type.factor], &factor, 2);
      if (type.minimum >= 0) __builtin_memcpy(&w[i * type.bytes + type.minimum], &factor, 2);
    }
    std::vector<char> panels(N * K * 2);
    Op op{PACK_BLOCKS, 1, {}};
    op.pack_blocks = {w.data(), nullptr, panels.data(), N, K, type.format};
    warmpath_run(&op, 1);
    op = {LINEAR, 1, {}};
    op.linear = {x.data(), panels.data(), nullptr, nullptr, out.data(), T_ROWS, N, K, K,
                 BFLOAT16, type.format, 1, NONE, N};
    run("blocks", op, out);
  }
}

// What exists for bfloat16 only: packed weights, and attention of prompts. Panels have eight outputs at this level.
void packed_operations() {
  constexpr int64_t T_ROWS = 13, K = 70, N = 40, DIM = 16, LENGTH = 20;
  const auto x = numbers<bf16>(T_ROWS * K), w = numbers<bf16>(N * K);
  const auto w8 = numbers<int8_t>(N * K);
  const auto scales = numbers<float>(N);
  std::vector<bf16> out(T_ROWS * N), gated(T_ROWS * N / 2), rows(2 * K);
  Op op{LINEAR, 2, {}};
  for (int64_t count : {int64_t(1), int64_t(2), int64_t(3), T_ROWS}) {
    op.linear = {x.data(), w.data(), nullptr, nullptr, out.data(), count, N, K, K, BFLOAT16, PLAIN, 1, NONE};
    run("packed", op, out);
    op.linear = {x.data(), w8.data(), scales.data(), nullptr, out.data(), count, N, K, K, BFLOAT16, INT8, 1, NONE};
    run("packed_int8", op, out);
    op.linear = {x.data(), w.data(), nullptr, nullptr, out.data(), count, N, 64, K, BFLOAT16, INT4, 1, NONE};
    run("packed_int4", op, out);
    op.linear.format = MXFP4;
    run("packed_mxfp4", op, out);
  }
  op.linear = {x.data(), w.data(), nullptr, w.data(), gated.data(), T_ROWS, N, K, K, BFLOAT16, PLAIN, 1, SILU};
  run("packed_gate", op, gated);
  const int64_t ids[] = {39, 2};
  op.code = EMBED;
  op.embed = {w.data(), ids, rows.data(), 2, K};
  run("packed_rows", op, rows);
  block_types();
  const auto cache = numbers<bf16>(8 * 4 * 2 * DIM), query = numbers<bf16>(T_ROWS * 4 * DIM);
  const int32_t tables[] = {3, 1, 5, 0, 2}, starts[] = {0, T_ROWS}, seq_lens[] = {LENGTH};
  std::vector<bf16> seen(T_ROWS * 4 * DIM);
  op.code = ATTEND;
  op.attend = {query.data(), cache.data(), cache.data(), seen.data(), tables, starts, seq_lens, nullptr,
               1, 5, 4, 4, 2, DIM, BFLOAT16, UNQUANTISED, 7, 0.2, 3.0};
  run("tiles", op, seen);
  op.attend.sinks = scales.data();
  run("tiles_with_sinks", op, seen);
  std::vector<int8_t> bytes(8 * 4 * 2 * (DIM + SCALE_BYTES));
  const int64_t slots[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 22};
  Op store{NORM_ROPE_STORE, 1, {}};
  const auto angles = numbers<float>(T_ROWS * DIM / 2);
  store.norm_rope_store = {query.data(), nullptr, nullptr, angles.data(), angles.data(), nullptr, bytes.data(),
                           bytes.data(), slots, T_ROWS, 4 * DIM, 0, 2, DIM, DIM, BFLOAT16, BFLOAT16, SCALED_INT8, 1e-6};
  run("norm_rope_store_bytes", store, bytes);
  op.attend.keys = op.attend.values = bytes.data(), op.attend.kv_format = SCALED_INT8;
  run("tiles_of_bytes", op, seen);
}

int main() {
  all_operations<float>(FLOAT32);
  all_operations<bf16>(BFLOAT16);
  mixtures<float>(FLOAT32);
  mixtures<bf16>(BFLOAT16);
  packed_operations();
  drawn_tokens();
}
