// The engine's arithmetic on a CPU. backend/native/library.py compiles this file on first use.
//
// The kernels are written once, over vectors of floats, and compiled for several levels of instruction sets: the file
// includes itself once per level, each time with another width and other target attributes. Which level runs is an
// argument of `warmpath_run`. On ARM the base level is NEON. What only some CPUs can do stands apart: pairs of bfloat16
// with AVX-512 (`Row::pairs`), and the matrix tiles of AMX (namespace `amx`).
//
// An operation shares its work out by `share`, which returns when all of it is done. Every element of a result is summed
// by one thread, in an order that depends on nothing outside its row: float32 results are bitwise independent of their
// neighbours, and all results of the number of threads.

#ifndef LEVEL  // ==== the file as compiled: what all levels share, the levels, the interface ==========================

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};
struct int4x32 {  // a group of 32 weights, each held as 8 more than it is: the first 16 in the bytes' low halves
  uint8_t bytes[16];
};
constexpr int64_t GROUP = 32;

enum Dtype : int64_t { FLOAT32, BFLOAT16 };
enum Format : int64_t { PLAIN, INT8, INT4 };  // how a weight is held; PLAIN: in the dtype of the input
enum Activation : int64_t { NONE, SILU, GELU };

// The operations, as Python packs them: eight bytes per field. Strides count elements. T rows, one per token.

struct Linear {  // out[T, N] = x[T, K] w[N, K]^T + bias[N]
  const void *x, *w, *scales, *bias;  // scales: of INT8 float32 [N], of INT4 bfloat16 [N, K / 32]; bias may be null
  void* out;
  int64_t rows, outs, ins, x_stride, dtype, format;
  int64_t is_packed, activation;  // with AMX only: how the weight lies; out[T, N / 2] where its first half are gates
};
struct Expand {  // out[N, K]: a weight held as INT8 or INT4, in dtype
  const void *w, *scales;
  void* out;
  int64_t outs, ins, dtype, format;
};
struct RmsNorm {  // sum = x + residual, out = norm(sum) * weight; without a residual, that of x
  const void *x, *residual, *weight;
  void *out, *sum;
  int64_t rows, x_stride, inner, dim, dtype, weight_dtype;  // each row is `inner` vectors of `dim`
  double eps;
};
struct Rope {  // out[T, H, D]: x with its pairs (i, i + D / 2) turned
  const void* x;
  const float *cos, *sin;  // [T, D / 2]
  void* out;
  int64_t rows, x_stride, heads, dim, dtype;
};
struct Gated {  // out[T, I] = activation(x[T, :I]) * x[T, I:]
  const void* x;
  void* out;
  int64_t rows, inner, dtype, is_gelu;
};
struct StoreKv {  // strides and sizes in bytes
  const char *key, *value;
  char *key_cache, *value_cache;
  const int64_t* slots;
  int64_t rows, key_stride, value_stride, row_bytes;
};
struct Enter {  // of one product, queries and keys are normed, if there are weights, and turned, keys and values stored
  const void *qkv, *query_weight, *key_weight;  // [T, (H + 2 Hkv) D]; the weights may be null
  const float *cos, *sin;                       // [T, D / 2]
  void *query, *keys, *values;                  // [T, H, D]; caches
  const int64_t* slots;
  int64_t rows, stride, heads, kv_heads, dim, dtype, weight_dtype;
  double eps;
};
struct Embed {  // out[T, K]: rows of a packed weight of bfloat16
  const void* w;
  const int64_t* ids;
  void* out;
  int64_t rows, ins;
};
struct Attend {
  const void *query, *keys, *values;  // [T, Hq, D]; caches: [num_blocks, block_size, Hkv, D]
  void* out;                          // [T, Hq, D]
  const int32_t *tables, *starts, *seq_lens;  // [S, table_width]; [S + 1]: where queries begin; [S]
  int64_t num_seqs, table_width, block_size, num_heads, num_kv_heads, head_dim, dtype, window;  // window 0: none
  double scale, softcap;  // softcap 0: none
};

struct Argmax {  // chosen[T]: of each row the first of its largest numbers, or the first that is no number
  const void* x;
  int64_t* chosen;
  int64_t rows, size, dtype;
};
struct Draw {  // chosen[T]: the first up to which exp(x / temperature) sums to more than `share` of its sum over all
  const float *x, *temperature;
  const double* share;
  int64_t* chosen;
  int64_t rows, size;
};

enum Code : int64_t { LINEAR, EXPAND, RMS_NORM, ROPE, GATED, STORE_KV, ATTEND, ENTER, EMBED, ARGMAX, DRAW };

struct Op {
  int32_t code, num_threads;  // at most so many
  union {
    int64_t fields[19];
    Linear linear;
    Expand expand;
    RmsNorm rms_norm;
    Rope rope;
    Gated gated;
    StoreKv store_kv;
    Attend attend;
    Enter enter;
    Embed embed;
    Argmax argmax;
    Draw draw;
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

struct Scratch {  // memory of one thread: it grows to what was asked for, and stays
  void* data = nullptr;
  size_t size = 0;
  void* get(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, size);
      if (!data) abort();  // rather than go on with wrong numbers
    }
    return data;
  }
  ~Scratch() { free(data); }
};
thread_local Scratch own_scratch;   // for what a thread does alone
thread_local Scratch team_scratch;  // of the thread that calls: what its team shares

// ---- threads --------------------------------------------------------------------------------------------------------
//
// One team for the process. Who calls does the work, and helpers take from it what they can get: a helper that the
// system runs late, since its core is shared with others, finds the work done and keeps nobody waiting, as it would at
// the barrier of an OpenMP team.

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Team {
 public:
  // Calls work(context, i) for each i below count, on at most num_threads threads, between begin and end on each.
  void run(int64_t num_threads, int64_t count, void (*work)(void*, int64_t), void* context, void (*begin)(),
           void (*end)()) {
    std::unique_lock<std::mutex> turn(turns_, std::defer_lock);
    if (num_threads <= 1 || count <= 1 || !turn.try_lock()) {  // another caller has the helpers
      for (int64_t i = 0; i < count; i++) work(context, i);
      return;
    }
    while (num_helpers_ < num_threads - 1) std::thread(&Team::help, this, num_helpers_++).detach();
    work_ = work, context_ = context, count_ = count, begin_ = begin, end_ = end, wanted_ = num_threads - 1;
    next_.store(0, std::memory_order_relaxed);
    open_.store(open_.load() + 1);  // odd: there is work
    if (sleepers_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    take();
    open_.store(open_.load() + 1);  // even: there is none, and nobody may begin
    for (int spins = 0; inside_.load(); spins++) spins < SPINS ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int SPINS = 4000;  // of a helper without work, before it sleeps: some 100 microseconds

  void take() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) work_(context_, i);
  }

  void help(int64_t index) {
    uint64_t done = 0;  // the last work that this helper has taken part in, or let go by
    while (true) {
      uint64_t now = open_.load();
      for (int spins = 0; now == done || now % 2 == 0; now = open_.load()) {
        if (++spins < SPINS) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return open_.load() % 2 && open_.load() != done; });
        sleepers_.fetch_sub(1);
        spins = 0;
      }
      done = now;
      inside_.fetch_add(1);
      // Only while it is still the same work: from here on, nobody changes it until this helper has left.
      if (open_.load() == now && index < wanted_) {
        begin_();
        take();
        end_();
      }
      inside_.fetch_sub(1);
    }
  }

  std::mutex turns_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> open_{0};
  std::atomic<int64_t> next_{0}, inside_{0}, sleepers_{0};
  int64_t num_helpers_ = 0, wanted_ = 0, count_ = 0;
  void (*work_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  void (*begin_)() = nullptr;
  void (*end_)() = nullptr;
};
Team& team() {
  static Team* const made = new Team;  // never deleted: helpers sleep in it until the process ends
  return *made;
}

struct Calling {  // how the caller of `warmpath_run` wants its work to be done
  int64_t num_threads = 1;
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};
thread_local Calling calling;

constexpr int64_t SHARES_PER_THREAD = 4;
constexpr int64_t FEW = 1 << 14;  // numbers to pass over, below which waking the others costs more than they take over

// f(i) for each i below count, `grain` neighbours at a time to one thread; grain 0: at least SHARES_PER_THREAD shares for
// each, if there are so many, since of five shares for two threads one would do three.
template <class F>
void share(int64_t count, int64_t grain, F f) {
  if (grain == 0) grain = most(1, count / (calling.num_threads * SHARES_PER_THREAD));
  struct Context {
    F& f;
    int64_t count, grain;
  } context{f, count, grain};
  const auto work = [](void* pointer, int64_t i) {
    const Context& c = *static_cast<Context*>(pointer);
    for (int64_t j = i * c.grain; j < least(c.count, (i + 1) * c.grain); j++) c.f(j);
  };
  team().run(calling.num_threads, ceil_div(count, grain), work, &context, calling.begin, calling.end);
}

}  // namespace

#define LEVEL base
#define WIDTH 16
#include __FILE__
#undef LEVEL
#undef WIDTH

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define LEVEL avx2
#define WIDTH 32
#include __FILE__
#undef LEVEL
#undef WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define LEVEL avx512
#define WIDTH 64
#include __FILE__
#undef LEVEL
#undef WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8")
#endif

// ---- AMX: products in tiles of 16 x 16 sums over 32 products each -------------------------------------------------
//
// A weight that was packed when it was loaded is the right operand; see below. One that was not is the left operand, so
// that its tiles are read where they lie; the few rows of x are the right one then, packed once per product: 16 rows of
// x as [K / 2][16] pairs. Attention is arranged alike: scores^T = K q^T reads
// the keys in their blocks, and leaves sixteen queries side by side in a vector, so that maxima and sums of a softmax
// take no step across lanes. Values are packed once per sequence, transposed, since they are the left operand then.

namespace {
namespace amx {

using avx512::vf;

constexpr int64_t TILE = 16;       // rows of a tile, and sums in one
constexpr int64_t DEPTH = 32;      // products behind one step of a sum
constexpr int64_t AHEAD = 3;        // steps that operands are fetched ahead
constexpr int64_t STEP_KEYS = 256;  // positions between two corrections of a running softmax

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};
const TileConfig CONFIG;

void begin() { _tile_loadconfig(&CONFIG); }
void end() { _tile_release(); }

// Before a tile is loaded: compilers do not know what the instruction reads, and would leave stores out.
inline void written() { __asm__ volatile("" ::: "memory"); }

inline void transpose(__m512i (&r)[TILE]) {  // sixteen rows of sixteen words
  __m512i t[TILE];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < TILE; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) {  // quarter q of r[i + j] is now column 4 q + j of rows i to i + 3
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// Sixteen rows of pairs, as the right operand of a product: packed[pair][row]. Rows that are not there are zero.
void pack_pairs(const uint32_t* const* rows, int64_t num_rows, int64_t num_pairs, uint32_t* packed) {
  for (int64_t i = 0; i < num_pairs; i += TILE) {
    __m512i r[TILE];
    for (int64_t j = 0; j < TILE; j++) r[j] = j < num_rows ? _mm512_loadu_si512(rows[j] + i) : _mm512_setzero_si512();
    transpose(r);
    for (int64_t j = 0; j < TILE; j++) _mm512_store_si512(packed + (i + j) * TILE, r[j]);
  }
  written();
}

// A cache line each of the two panels after the next: thirty-two rows at once, and short ones, are more than what the
// hardware's own prefetching follows.
inline void fetch_next(const void* row, int64_t row_bytes) {
  for (int64_t i = 2 * TILE; i < 4 * TILE; i++)
    _mm_prefetch(static_cast<const char*>(row) + i * row_bytes, _MM_HINT_T1);
}

template <class W>
struct Panel {  // sixteen rows of a weight; what is not bfloat16 is made so, 32 columns at a time
  avx512::Row<W> rows[TILE];
  alignas(64) uint16_t expanded[TILE][DEPTH];
  Panel(const Linear& a, int64_t n) {
    for (int64_t i = 0; i < TILE; i++) rows[i] = avx512::Row<W>(a, n + i);
  }
  const void* tile(int64_t k) {
    for (int64_t i = 0; i < TILE; i++) _mm512_store_si512(expanded[i], rows[i].pairs(k, DEPTH));
    written();
    return expanded;
  }
  void fetch_next(int64_t) const {}
  int64_t stride() const { return sizeof expanded[0]; }
};
template <>
struct Panel<bf16> {
  const bf16* rows;
  int64_t ins;
  Panel(const Linear& a, int64_t n) : rows(static_cast<const bf16*>(a.w) + n * a.ins), ins(a.ins) {}
  const void* tile(int64_t k) const { return rows + k; }
  void fetch_next(int64_t k) const { amx::fetch_next(rows + k, stride()); }
  int64_t stride() const { return ins * sizeof(bf16); }
};

void put(const Linear& a, const float* sums, int64_t n, int64_t t) {  // sums: [16 outs][16 rows]
  __m512i r[TILE];
  for (int64_t i = 0; i < TILE; i++) r[i] = _mm512_load_si512(sums + i * TILE);
  transpose(r);
  const vf scales = a.format == INT8 ? avx512::load(static_cast<const float*>(a.scales) + n) : avx512::all(1);
  const vf bias = a.bias ? avx512::load(static_cast<const bf16*>(a.bias) + n) : avx512::all(0);
  bf16* out = static_cast<bf16*>(a.out) + t * a.outs + n;
  for (int64_t i = 0; i < least(TILE, a.rows - t); i++) avx512::store(out + i * a.outs, (vf)r[i] * scales + bias);
}

template <class W>
void two_panels(const Linear& a, const uint32_t* packed, int64_t n) {
  Panel<W> first(a, n), second(a, n + TILE);
  alignas(64) float sums[2][TILE * TILE];
  const int64_t steps = a.ins / DEPTH, stride = first.stride();
  for (int64_t t = 0; t < a.rows; t += 2 * TILE) {
    const uint32_t *x0 = packed + t * a.ins / 2, *x1 = x0 + TILE * a.ins / 2;
    const bool both = t + TILE < a.rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
      if (t == 0) first.fetch_next(k * DEPTH);
      for (int64_t i = 0; i < TILE; i++) {  // tiles of x, before their turn
        _mm_prefetch(x0 + ((k + AHEAD) * TILE + i) * TILE, _MM_HINT_T0);
        if (both) _mm_prefetch(x1 + ((k + AHEAD) * TILE + i) * TILE, _MM_HINT_T0);
      }
      _tile_loadd(4, first.tile(k * DEPTH), stride);
      _tile_loadd(6, x0 + k * TILE * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second.tile(k * DEPTH), stride);
      _tile_dpbf16ps(1, 5, 6);
      if (both) {
        _tile_loadd(7, x1 + k * TILE * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    put(a, sums[0], n, t);
    put(a, sums[1], n + TILE, t);
    if (!both) continue;
    _tile_stored(2, sums[0], 64);
    _tile_stored(3, sums[1], 64);
    put(a, sums[0], n, t + TILE);
    put(a, sums[1], n + TILE, t + TILE);
  }
}

// ---- Weights that were packed when they were loaded. They are the right operand, so that what comes out are rows as
// they are kept, and lie as they are read: panels of 32 outs, in each [steps][2][16 words][16 outs], a word being what
// one row of x has beside each other: two of bfloat16, four of int8. A step of two tiles has the same bytes for both.
//
// Inputs of a weight in int8 become whole numbers of sixteen bits, in two halves that are multiplied each for itself: so
// nothing is lost that bfloat16 had beside the row's largest value, and no weight is made bfloat16 first, which takes
// longer than to read it.

constexpr int64_t PANEL = 2 * TILE;
constexpr int64_t STEP_BYTES = 2 * TILE * 64;
constexpr int64_t FETCH_AHEAD = 8;           // steps of a weight that one pass over it is ahead of its products
constexpr int64_t NEAR_BYTES = 1 << 20;      // of x that stay in a core's cache while panels go by
constexpr int64_t BYTES = 64;                // products behind one step of a sum of int8
constexpr float MOST_HALVES = 127 * 256.0f;  // the largest number whose high half is an int8

int64_t steps_of(const Linear& a) { return a.ins / (a.format == INT8 ? BYTES : DEPTH); }

// Rows of x as tiles, one after the other, and with int8 their scales behind all of them. Of the last tile, rows that
// are not there hold anything: they take part in no other row's sums.
struct PackedRows {
  char* tiles;
  float* scales;
  int64_t tile_bytes;  // of all steps of sixteen rows: two tiles each for int8, the high halves before the low ones
  PackedRows(const Linear& a, void* memory)
      : tiles(static_cast<char*>(memory)), tile_bytes(steps_of(a) * TILE * 64 * (a.format == INT8 ? 2 : 1)) {
    scales = reinterpret_cast<float*>(tiles + ceil_div(a.rows, TILE) * tile_bytes);
  }
  char* tile(int64_t row) const { return tiles + row / TILE * tile_bytes; }
};

void pack_row(const Linear& a, int64_t row, const PackedRows& to) {
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  char* own = to.tile(row) + row % TILE * 64;
  for (int64_t k = 0; k < steps_of(a); k++)
    _mm512_store_si512(own + k * TILE * 64, _mm512_loadu_si512(x + k * DEPTH));
}

void pack_row_in_halves(const Linear& a, int64_t row, const PackedRows& to) {
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  char *high = to.tile(row) + row % TILE * 64, *low = high + to.tile_bytes / 2;
  __m512 largest = _mm512_setzero_ps();
  for (int64_t k = 0; k < a.ins; k += TILE) largest = _mm512_max_ps(largest, _mm512_abs_ps((__m512)avx512::load(x + k)));
  const float most_of_row = _mm512_reduce_max_ps(largest);
  const float factor = most_of_row > 0 ? MOST_HALVES / most_of_row : 0;
  to.scales[row] = most_of_row / MOST_HALVES;
  for (int64_t k = 0; k < a.ins; k += TILE) {
    const int64_t at = k / BYTES * TILE * BYTES + k % BYTES;
    const __m512i number = _mm512_cvtps_epi32((__m512)(avx512::load(x + k) * factor));
    const __m512i half = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
    _mm_store_si128((__m128i*)(high + at), _mm512_cvtepi32_epi8(half));
    _mm_store_si128((__m128i*)(low + at), _mm512_cvtepi32_epi8(number));  // what is left is the low byte, as it stands
  }
}

// A macro, since the names of tiles must be numbers for the compiler even where it does not optimise.
#define ADD_PRODUCT(sum, x, w) \
  if constexpr (IS_INT8) _tile_dpbssd(sum, x, w); \
  else _tile_dpbf16ps(sum, x, w)

struct Fetch {  // what is brought near beside the products, so many cache lines at each step
  const char* from;
  int64_t lines;
};

// Two tiles of x by a panel, added to sums[2 i + j], of tile i of x and outs 16 j and on, unless these are the first.
// Without `BOTH` there is one tile of x.
template <bool IS_INT8, bool BOTH>
inline void multiply_panel(const char* x0, const char* x1, const char* panel, int64_t steps, Fetch fetch, bool is_first,
                           float (*sums)[TILE * TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (!is_first) {
    _tile_loadd(0, sums[0], 64);
    _tile_loadd(1, sums[1], 64);
    if constexpr (BOTH) {
      _tile_loadd(2, sums[2], 64);
      _tile_loadd(3, sums[3], 64);
    }
  }
  for (int64_t k = 0; k < steps; k++) {
    const char* w = panel + k * STEP_BYTES;
    for (int64_t i = 0; i < fetch.lines; i++) _mm_prefetch(fetch.from + (k * fetch.lines + i) * 64, _MM_HINT_T1);
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x0 + k * TILE * 64, 64);
    ADD_PRODUCT(0, 6, 4);
    _tile_loadd(5, w + TILE * 64, 64);
    ADD_PRODUCT(1, 6, 5);
    if constexpr (BOTH) {
      _tile_loadd(7, x1 + k * TILE * 64, 64);
      ADD_PRODUCT(2, 7, 4);
      ADD_PRODUCT(3, 7, 5);
    }
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (BOTH) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
}
#undef ADD_PRODUCT

void finish_rows(const Linear& a, int64_t t, int64_t n, const float (*sums)[TILE * TILE]) {
  for (int64_t i = 0; i < least(2 * TILE, a.rows - t); i++) {
    const float* own = sums[i / TILE * 2] + i % TILE * TILE;
    avx512::finish<bf16>(a, t + i, n, avx512::load(own), avx512::load(own + TILE * TILE));
  }
}

// The sums are whole numbers, of the high halves and then of the low ones.
void finish_rows_int8(const Linear& a, int64_t t, int64_t n, const float* row_scales,
                      const float (*sums)[TILE * TILE]) {
  const float* scales = static_cast<const float*>(a.scales);
  const vf first = avx512::load(scales + avx512::first_of(a, n)), second = avx512::load(scales + avx512::second_of(a, n));
  const auto whole = [&](int64_t i, int64_t j) {
    const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums[j] + i * TILE));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 + j] + i * TILE));
    return (vf)_mm512_fmadd_ps(high, _mm512_set1_ps(256), low);
  };
  for (int64_t i = 0; i < least(TILE, a.rows - t); i++)
    avx512::finish<bf16>(a, t + i, n, whole(i, 0) * row_scales[t + i] * first, whole(i, 1) * row_scales[t + i] * second);
}

// Steps [from, from + count) of all products, a panel by all rows and then the next one, which is fetched meanwhile.
// Where these are not all steps, sums wait in `kept` for the others.
void multiply_packed(const Linear& a, const PackedRows& x, int64_t from, int64_t count, float (*kept)[TILE * TILE]) {
  const bool is_int8 = a.format == INT8, is_first = from == 0, is_last = from + count == steps_of(a);
  const int64_t panels = a.outs / PANEL, rows_at_once = is_int8 ? TILE : 2 * TILE;
  const int64_t passes = ceil_div(a.rows, rows_at_once), panel_bytes = steps_of(a) * STEP_BYTES;
  const int64_t lines = ceil_div(STEP_BYTES / 64, passes);
  const auto panel_by_rows = [&](int64_t i) {
    const char* panel = static_cast<const char*>(a.w) + i * panel_bytes + from * STEP_BYTES;
    for (int64_t pass = 0; pass < passes; pass++) {
      const char* share_of_next = panel + panel_bytes + pass * count * lines * 64;
      const Fetch fetch{passes == 1 ? panel + FETCH_AHEAD * STEP_BYTES : share_of_next, lines};
      const int64_t t = pass * rows_at_once;
      const char *x0 = x.tile(t) + from * TILE * 64, *x1 = x0 + (is_int8 ? x.tile_bytes / 2 : x.tile_bytes);
      alignas(64) float own[4][TILE * TILE];
      float (*sums)[TILE * TILE] = is_first && is_last ? own : kept + (i * passes + pass) * 4;
      if (is_int8) multiply_panel<true, true>(x0, x1, panel, count, fetch, is_first, sums);
      else if (t + TILE < a.rows) multiply_panel<false, true>(x0, x1, panel, count, fetch, is_first, sums);
      else multiply_panel<false, false>(x0, nullptr, panel, count, fetch, is_first, sums);
      if (!is_last) continue;
      if (is_int8) finish_rows_int8(a, t, i * PANEL, x.scales, sums);
      else finish_rows(a, t, i * PANEL, sums);
    }
  };
  share(panels, most(1, panels / (calling.num_threads * 2 * SHARES_PER_THREAD)), panel_by_rows);
}

// How many steps are taken together: all, unless x is too large for a core's cache.
int64_t steps_together(const Linear& a) {
  return ceil_div(steps_of(a), ceil_div(a.rows * a.ins * int64_t(sizeof(bf16)), NEAR_BYTES));
}

size_t packed_rows_bytes(const Linear& a) {
  return ceil_div(ceil_div(a.rows, TILE) * TILE * (a.ins * sizeof(bf16) + sizeof(float)), 64) * 64;
}

size_t packed_bytes(const Linear& a) {  // of rows of x, and of sums that wait
  if (steps_together(a) == steps_of(a)) return packed_rows_bytes(a);
  const int64_t sums = ceil_div(a.rows, PANEL) * PANEL * a.outs * (a.format == INT8 ? 2 : 1);
  return packed_rows_bytes(a) + sums * sizeof(float);
}

void linear_packed(const Linear& a, void* memory) {
  const PackedRows x(a, memory);
  const bool is_int8 = a.format == INT8;
  share(a.rows, 0, [&](int64_t row) { is_int8 ? pack_row_in_halves(a, row, x) : pack_row(a, row, x); });
  written();
  float (*kept)[TILE * TILE] = reinterpret_cast<float (*)[TILE * TILE]>(x.tiles + packed_rows_bytes(a));
  const int64_t together = steps_together(a);
  for (int64_t from = 0; from < steps_of(a); from += together)
    multiply_packed(a, x, from, least(together, steps_of(a) - from), kept);
}

void embed(const Embed& a) {
  const int64_t steps = a.ins / DEPTH;
  const __m512i words = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi32(TILE));
  share(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const int64_t at = panel * steps * STEP_BYTES + out / TILE * TILE * 64 + out % TILE * 4;
    const char* w = static_cast<const char*>(a.w) + at;
    for (int64_t k = 0; k < steps; k++)
      _mm512_storeu_si512(static_cast<bf16*>(a.out) + t * a.ins + k * DEPTH,
                          _mm512_i32gather_epi32(words, w + k * STEP_BYTES, 4));
  });
}

bool suits(const Linear& a) { return a.dtype == BFLOAT16 && a.ins % DEPTH == 0; }

template <class W>
void linear(const Linear& a, uint32_t* packed) {
  const int64_t tiles = ceil_div(a.rows, TILE), steps = a.ins / DEPTH;
  share(tiles * steps, 0, [&](int64_t i) {
    const int64_t t = i / steps * TILE, k = i % steps;
    const uint32_t* rows[TILE] = {};
    const int64_t num_rows = least(TILE, a.rows - t);
    for (int64_t r = 0; r < num_rows; r++)
      rows[r] = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.x) + (t + r) * a.x_stride) + k * TILE;
    pack_pairs(rows, num_rows, TILE, packed + t * a.ins / 2 + k * TILE * TILE);
  });
  const int64_t panels = a.outs / (2 * TILE);
  share(panels, 4, [&](int64_t i) { two_panels<W>(a, packed, i * 2 * TILE); });
  avx512::linear_columns<bf16, W>(a, panels * 2 * TILE, a.outs);
}

// N tiles below each other, left(i, k), each by the same column of tiles, right(k): N at a time hide each one's latency.
template <int N, class Left>
inline void multiply(Left left, int64_t left_stride, const void* right, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(7, static_cast<const uint32_t*>(right) + k * TILE * TILE, 64);
    _tile_loadd(4, left(0, k), left_stride);
    _tile_dpbf16ps(0, 4, 7);
    if constexpr (N > 1) {
      _tile_loadd(5, left(1, k), left_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (N > 2) {
      _tile_loadd(6, left(2, k), left_stride);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(4, left(3, k), left_stride);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (N > 1) _tile_stored(1, sums + TILE * TILE, 64);
  if constexpr (N > 2) _tile_stored(2, sums + 2 * TILE * TILE, 64);
  if constexpr (N > 3) _tile_stored(3, sums + 3 * TILE * TILE, 64);
}
template <class Left>
inline void multiply(int64_t n, Left left, int64_t left_stride, const void* right, int64_t steps, float* sums) {
  switch (n) {
    case 1: return multiply<1>(left, left_stride, right, steps, sums);
    case 2: return multiply<2>(left, left_stride, right, steps, sums);
    case 3: return multiply<3>(left, left_stride, right, steps, sums);
    default: return multiply<4>(left, left_stride, right, steps, sums);
  }
}

// One tile of attention: sixteen rows, being the heads that share a key/value head, token after token.
struct QueryTile {
  const Attend& a;
  const int32_t* table;
  const uint16_t* values;  // [positions / 32][D / 16][16][32], from position `begin` on
  int64_t seq, head, row, begin, group, dim, query_len, num_rows;
  alignas(64) int32_t first_seen[TILE], last_seen[TILE];
  alignas(64) float scores[STEP_KEYS][TILE];
  alignas(64) uint32_t weights[STEP_KEYS / 2][TILE];
  alignas(64) float product[4 * TILE][TILE];

  QueryTile(const Attend& a, const uint16_t* values, int64_t seq, int64_t head, int64_t row, int64_t begin)
      : a(a), table(a.tables + seq * a.table_width), values(values), seq(seq), head(head), row(row), begin(begin),
        group(a.num_heads / a.num_kv_heads), dim(a.head_dim), query_len(a.starts[seq + 1] - a.starts[seq]),
        num_rows(least(TILE, query_len * group - row)) {}

  const bf16* query(int64_t lane) const {
    const int64_t r = row + lane;
    return static_cast<const bf16*>(a.query) +
           ((a.starts[seq] + r / group) * a.num_heads + head * group + r % group) * dim;
  }
  const bf16* key(int64_t position) const {
    const int64_t slot = int64_t(table[position / a.block_size]) * a.block_size + position % a.block_size;
    return static_cast<const bf16*>(a.keys) + (slot * a.num_kv_heads + head) * dim;
  }

  // memory: room for the packed queries, D / 2 x 16 words, and the weighted values, D x 16 floats
  void run(void* memory) {
    uint32_t* queries = static_cast<uint32_t*>(memory);
    float* output = reinterpret_cast<float*>(queries + dim / 2 * TILE);
    const uint32_t* rows[TILE] = {};
    for (int64_t i = 0; i < TILE; i++) {
      const int64_t lane = least(i, num_rows - 1);
      rows[i] = reinterpret_cast<const uint32_t*>(query(lane));
      last_seen[i] = a.seq_lens[seq] - query_len + (row + lane) / group;
      first_seen[i] = a.window ? most(0, last_seen[i] - a.window + 1) : 0;
    }
    pack_pairs(rows, num_rows, dim / 2, queries);
    __builtin_memset(output, 0, dim * TILE * sizeof(float));
    vf highest = avx512::all(-__builtin_inff()), total = avx512::all(0);
    const int64_t end = last_seen[num_rows - 1] + 1;
    for (int64_t p = first_seen[0] / DEPTH * DEPTH; p < end; p += STEP_KEYS) {
      const int64_t count = least(STEP_KEYS, end - p);
      score(queries, p, count);
      const vf correction = soften(p, count, highest, total);
      weigh(p, count, correction, output);
    }
    const vf inverse = avx512::all(1) / total;
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i r[TILE];
      for (int64_t i = 0; i < TILE; i++) r[i] = (__m512i)(avx512::load(output + (d + i) * TILE) * inverse);
      transpose(r);
      for (int64_t i = 0; i < num_rows; i++)
        avx512::store(static_cast<bf16*>(a.out) + (query(i) - static_cast<const bf16*>(a.query)) + d, (vf)r[i]);
    }
  }

  void score(const uint32_t* queries, int64_t p, int64_t count) {
    const int64_t stride = a.num_kv_heads * dim * sizeof(bf16), tiles = ceil_div(count, TILE);
    for (int64_t i = 0; i < tiles; i += 4) {
      const bf16* keys[4];
      for (int64_t j = 0; j < least(4, tiles - i); j++) keys[j] = key(p + (i + j) * TILE);
      const auto left = [&](int64_t j, int64_t k) { return keys[j] + k * DEPTH; };
      multiply(least(4, tiles - i), left, stride, queries, dim / DEPTH, scores[i * TILE]);
    }
  }

  // From scores to weights, in pairs of positions; the result is by what the weighted values so far are too large.
  vf soften(int64_t p, int64_t count, vf& highest, vf& total) {
    const __m512i first = _mm512_load_si512(first_seen), last = _mm512_load_si512(last_seen);
    const bool all_seen = p >= first_seen[TILE - 1] && p + count - 1 <= last_seen[0];
    const vf scale = avx512::all(float(a.scale)), hidden = avx512::all(-__builtin_inff());
    vf top = highest;
    for (int64_t i = 0; i < count; i++) {
      vf s = avx512::load(scores[i]) * scale;
      if (a.softcap) s = avx512::capped(s, float(a.softcap));
      if (!all_seen) {
        const __m512i position = _mm512_set1_epi32(int32_t(p + i));
        const __mmask16 seen = _mm512_cmple_epi32_mask(position, last) & _mm512_cmpge_epi32_mask(position, first);
        s = (vf)_mm512_mask_mov_ps((__m512)hidden, seen, (__m512)s);
      }
      avx512::store(scores[i], s);
      top = (vf)_mm512_max_ps((__m512)top, (__m512)s);
    }
    // A row that has seen nothing yet has no highest score: from zero, its weights are all exp(-inf).
    const vf base = (vf)_mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask((__m512)top, (__m512)hidden), (__m512)top);
    const vf correction = avx512::exp(highest - base);
    const int64_t padded = ceil_div(count, DEPTH) * DEPTH;
    for (int64_t i = count; i < padded; i++) avx512::store(scores[i], hidden);
    total *= correction;
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pairs = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
    for (int64_t i = 0; i < padded; i += 2) {
      const vf even = avx512::exp(avx512::load(scores[i]) - base), odd = avx512::exp(avx512::load(scores[i + 1]) - base);
      total += even + odd;
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);  // the sixteen even ones first
      _mm512_store_si512(weights[i / 2], _mm512_permutexvar_epi16(pairs, both));
    }
    written();
    highest = top;
    return correction;
  }

  void weigh(int64_t p, int64_t count, vf correction, float* output) {
    const int64_t d_tiles = dim / TILE;
    const uint16_t* packed = values + (p - begin) / DEPTH * dim * DEPTH;
    for (int64_t d = 0; d < d_tiles; d += 4) {
      const int64_t n = least(4, d_tiles - d);
      const auto left = [&](int64_t j, int64_t k) { return packed + (k * d_tiles + d + j) * TILE * DEPTH; };
      multiply(n, left, 64, weights, ceil_div(count, DEPTH), product[0]);
      for (int64_t i = 0; i < n * TILE; i++) {
        float* sum = output + (d * TILE + i) * TILE;
        avx512::store(sum, avx512::load(sum) * correction + avx512::load(product[i]));
      }
    }
  }
};

// Sequences with enough new rows for a tile; the rest is done as without AMX.
bool suits(const Attend& a, int64_t seq) {
  const int64_t rows = (a.starts[seq + 1] - a.starts[seq]) * (a.num_heads / a.num_kv_heads);
  return a.dtype == BFLOAT16 && a.head_dim % DEPTH == 0 && a.block_size % TILE == 0 && rows >= TILE;
}

inline __m512i words_at(const uint16_t* row, int64_t d) {
  return row ? (__m512i)avx512::widened(row + d) : _mm512_setzero_si512();
}

void attend_sequence(const Attend& a, int64_t seq, uint16_t* packed) {
  const int64_t heads = a.num_kv_heads, dim = a.head_dim, seq_len = a.seq_lens[seq];
  const int64_t query_len = a.starts[seq + 1] - a.starts[seq];
  const int64_t begin = a.window ? most(0, seq_len - query_len + 1 - a.window) / DEPTH * DEPTH : 0;
  const int64_t steps = ceil_div(seq_len - begin, DEPTH), tiles = ceil_div(query_len * a.num_heads / heads, TILE);
  const int32_t* table = a.tables + seq * a.table_width;
  share(heads * steps, 0, [&](int64_t i) {
    const int64_t head = i / steps, p = begin + i % steps * DEPTH;
    const uint16_t* from[DEPTH];  // whatever a block holds behind its sequence's end must not be multiplied
    for (int64_t j = 0; j < DEPTH; j++) {
      from[j] = nullptr;
      if (p + j >= seq_len) continue;
      const int64_t slot = int64_t(table[(p + j) / a.block_size]) * a.block_size + (p + j) % a.block_size;
      from[j] = static_cast<const uint16_t*>(a.values) + (slot * heads + head) * dim;
    }
    for (int64_t d = 0; d < dim; d += TILE) {
      __m512i r[TILE];  // of pairs of positions
      for (int64_t j = 0; j < TILE; j++) {
        const __m512i even = words_at(from[2 * j], d), odd = words_at(from[2 * j + 1], d);
        r[j] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      }
      transpose(r);
      for (int64_t j = 0; j < TILE; j++) _mm512_store_si512(packed + i * dim * DEPTH + (d + j) * DEPTH, r[j]);
    }
  });
  share(heads * tiles, 1, [&](int64_t i) {
    const int64_t head = i % heads, tile = tiles - 1 - i / heads;  // the last ones see most: the longest work first
    QueryTile query(a, packed + head * steps * dim * DEPTH, seq, head, tile * TILE, begin);
    query.run(own_scratch.get(dim * TILE * 6));
  });
}

size_t shared_bytes(const Op& op) {
  if (op.code == LINEAR && op.linear.is_packed) return packed_bytes(op.linear);
  if (op.code == LINEAR && suits(op.linear)) return ceil_div(op.linear.rows, TILE) * TILE * (op.linear.ins * 2 + sizeof(float));
  if (op.code == ATTEND) {
    const Attend& a = op.attend;
    for (int64_t seq = 0; seq < a.num_seqs; seq++)
      if (suits(a, seq)) return a.num_kv_heads * a.head_dim * (longest(a) + 2 * DEPTH) * sizeof(bf16);
  }
  return 0;
}

void run(const Op& op, void* shared) {
  if (op.code == LINEAR && suits(op.linear)) {
    const Linear& a = op.linear;
    if (a.is_packed) return linear_packed(a, shared);
    if (a.format == PLAIN) return linear<bf16>(a, static_cast<uint32_t*>(shared));
    if (a.format == INT8) return linear<int8_t>(a, static_cast<uint32_t*>(shared));
    return linear<int4x32>(a, static_cast<uint32_t*>(shared));
  }
  if (op.code == EMBED) return embed(op.embed);
  if (op.code != ATTEND) return avx512::run(op, shared);
  for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
    if (suits(op.attend, seq)) attend_sequence(op.attend, seq, static_cast<uint16_t*>(shared));
  avx512::attend(op.attend, suits);
}

}  // namespace amx
}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

namespace {

void nothing() {}
struct Level {
  const char* name;
  void (*run)(const Op&, void* shared);
  size_t (*shared_bytes)(const Op&);
  void (*begin)();
  void (*end)();
};
const Level LEVELS[] = {
    {"base", base::run, base::shared_bytes, nothing, nothing},
#if defined(__x86_64__)
    {"avx2", avx2::run, avx2::shared_bytes, nothing, nothing},
    {"avx512", avx512::run, avx512::shared_bytes, nothing, nothing},
    {"amx", amx::run, amx::shared_bytes, amx::begin, amx::end},
#endif
};

#if defined(__x86_64__)
bool has_amx() {  // and may use it: Linux gives the tiles' state to whoever asks
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, products = (d >> 22 & 1) && (d >> 25 & 1);  // of bfloat16 and of int8
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return tiles && products && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

extern "C" {

// The highest level that this CPU has. Levels count from 0, in the order of their widths.
int64_t warmpath_best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bf16"))
    return 1;
  return has_amx() ? 3 : 2;
#else
  return 0;
#endif
}

const char* warmpath_level_name(int64_t level) {
  return level >= 0 && level < int64_t(sizeof LEVELS / sizeof LEVELS[0]) ? LEVELS[level].name : nullptr;
}

// One operation after the other. How long sequences are is read before the first of them.
void warmpath_run(const Op* ops, int64_t count, int64_t level_index) {
  const Level& level = LEVELS[level_index];
  size_t bytes = 0;
  for (int64_t i = 0; i < count; i++) bytes = most(bytes, level.shared_bytes(ops[i]));
  void* shared = bytes ? team_scratch.get(bytes) : nullptr;
  calling = {1, level.begin, level.end};
  level.begin();
  for (int64_t i = 0; i < count; i++) {
    calling.num_threads = ops[i].num_threads;
    level.run(ops[i], shared);
  }
  level.end();
}

}  // extern "C"

#else  // ==== one level: vectors of WIDTH bytes =======================================================================

namespace {
namespace LEVEL {

constexpr int64_t LANES = WIDTH / 4;
typedef float vf __attribute__((vector_size(WIDTH)));
typedef int32_t vi __attribute__((vector_size(WIDTH)));
typedef uint32_t vu __attribute__((vector_size(WIDTH)));

template <class V>
inline V read(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
inline vf all(float value) { return value - vf{}; }

// Narrow numbers, widened. Compilers take the general form apart into single lanes, so that x86 has its own.
#if WIDTH == 64
inline vu widened(const uint16_t* from) { return (vu)_mm512_cvtepu16_epi32(read<__m256i>(from)); }
inline vi widened(const int8_t* from) { return (vi)_mm512_cvtepi8_epi32(read<__m128i>(from)); }
inline vu widened(const uint8_t* from) { return (vu)_mm512_cvtepu8_epi32(read<__m128i>(from)); }
inline vf as_floats(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
#elif WIDTH == 32
inline vu widened(const uint16_t* from) { return (vu)_mm256_cvtepu16_epi32(read<__m128i>(from)); }
inline vi widened(const int8_t* from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline vu widened(const uint8_t* from) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline vf as_floats(vi v) { return (vf)_mm256_cvtepi32_ps((__m256i)v); }
inline vi whole(vf v) { return (vi)_mm256_cvttps_epi32((__m256)v); }
#else
typedef uint16_t vh __attribute__((vector_size(WIDTH / 2)));
typedef int8_t vb __attribute__((vector_size(WIDTH / 4)));
typedef uint8_t vub __attribute__((vector_size(WIDTH / 4)));
inline vu widened(const uint16_t* from) { return __builtin_convertvector(read<vh>(from), vu); }
inline vi widened(const int8_t* from) { return __builtin_convertvector(read<vb>(from), vi); }
inline vu widened(const uint8_t* from) { return __builtin_convertvector(read<vub>(from), vu); }
inline vf as_floats(vi v) { return __builtin_convertvector(v, vf); }
inline vi whole(vf v) { return __builtin_convertvector(v, vi); }
#endif

inline vf load(const float* from) { return read<vf>(from); }
inline vf load(const bf16* from) { return (vf)(widened(&from->bits) << 16); }
inline vf load(const int8_t* from) { return as_floats(widened(from)); }
template <class T>
inline vf load(const T* from, int64_t left) {  // zeros behind the end
  if (left >= LANES) return load(from);
  T some[LANES] = {};
  __builtin_memcpy(some, from, left * sizeof(T));
  return load(some);
}

// In place of an initialiser, of which compilers make one slow instruction over memory.
template <int N>
inline void zero(vf (&v)[N]) {
  for (int i = 0; i < N; i++) v[i] = vf{};
}
template <int N, int M>
inline void zero(vf (&v)[N][M]) {
  for (int i = 0; i < N; i++) zero(v[i]);
}
template <int N, int M, int L>
inline void zero(vf (&v)[N][M][L]) {
  for (int i = 0; i < N; i++) zero(v[i]);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline void store(float* to, vf v) { __builtin_memcpy(to, &v, sizeof v); }
inline void store(bf16* to, vf v) {
#if WIDTH == 64
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
  const vu bits = (vu)(v != v ? all(__builtin_nanf("")) : v);
  const vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#if WIDTH == 32
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)rounded),
                                        _mm256_extracti128_si256((__m256i)rounded, 1));
#else
  const vh half = __builtin_convertvector(rounded, vh);
#endif
#endif
  __builtin_memcpy(to, &half, sizeof half);
}
template <class T>
inline void store(T* to, vf v, int64_t left) {
  if (left >= LANES) return store(to, v);
  T some[LANES];
  store(some, v);
  __builtin_memcpy(to, some, left * sizeof(T));
}

inline float sum(vf v) {  // halves onto halves
#if WIDTH == 64
  return _mm512_reduce_add_ps((__m512)v);
#elif WIDTH == 32
  const __m128 halves = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The same of N vectors, by the same additions.
template <int N>
inline void sums_of(const vf (&v)[N], float* to) {
#if WIDTH == 32
  if constexpr (N == 4) {
    __m128 halves[4];
    for (int i = 0; i < 4; i++)
      halves[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)v[i]), _mm256_extractf128_ps((__m256)v[i], 1));
    const __m128 first = _mm_add_ps(_mm_movelh_ps(halves[0], halves[1]), _mm_movehl_ps(halves[1], halves[0]));
    const __m128 second = _mm_add_ps(_mm_movelh_ps(halves[2], halves[3]), _mm_movehl_ps(halves[3], halves[2]));
    _mm_storeu_ps(to, _mm_add_ps(_mm_shuffle_ps(first, second, 0x88), _mm_shuffle_ps(first, second, 0xdd)));
    return;
  }
#endif
  for (int i = 0; i < N; i++) to[i] = sum(v[i]);
}

// Cephes' polynomial, within 2e-7 of the truth. Far below zero it is zero, and far above it stays finite.
inline vf exp(vf x) {
#if WIDTH == 64
  x = max(x, all(-110.0f));
  const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 8);
#else
  const vi vanishes = x < all(-87.0f);
  x = vanishes ? vf{} : (x > all(88.0f) ? all(88.0f) : x);
  const vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
#endif
  const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if WIDTH == 64
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return vanishes ? vf{} : p * (vf)((whole(n) + 127) << 23);
#endif
}
inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }
inline vf capped(vf x, float cap) { return tanh(x / cap) * cap; }
inline vf silu(vf x) { return x / (exp(-x) + 1.0f); }
inline vf gelu(vf x) { return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

// ---- products with weights ------------------------------------------------------------------------------------------

// One row of a weight. `floats` is LANES of it; `pairs`, where there are products of pairs, 32 of it as bfloat16.
template <class W>
struct Row {
  const W* from;
  Row() = default;
  template <class A>
  Row(const A& a, int64_t n) : from(static_cast<const W*>(a.w) + n * a.ins) {}
  vf floats(int64_t k, int64_t left) const { return load(from + k, left); }
#if WIDTH == 64
  __m512i pairs(int64_t k, int64_t left) const {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + k + 16, most(left - 16, 0)), (__m512)load(from + k, left));
  }
#endif
};

#if WIDTH == 64
template <>
inline __m512i Row<bf16>::pairs(int64_t k, int64_t left) const {
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, from + k);
}
#endif

template <>
struct Row<int4x32> {
  const int4x32* groups;
  const bf16* scales;
  Row() = default;
  template <class A>
  Row(const A& a, int64_t n)
      : groups(static_cast<const int4x32*>(a.w) + n * (a.ins / GROUP)),
        scales(static_cast<const bf16*>(a.scales) + n * (a.ins / GROUP)) {}
  vf floats(int64_t k, int64_t) const {
    const int64_t group = k / GROUP, at = k % GROUP;
    const vu bytes = widened(groups[group].bytes + at % 16);
    return as_floats((vi)(at < 16 ? bytes & 15 : bytes >> 4) - 8) * to_float(scales[group]);
  }
#if WIDTH == 64
  __m512i pairs(int64_t k, int64_t) const {  // by a table of the sixteen values that this group's weights can have
    const vf numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const __m256i values = (__m256i)_mm512_cvtneps_pbh((__m512)(numbers * to_float(scales[k / GROUP])));
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)groups[k / GROUP].bytes));
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15)), high = _mm256_srli_epi16(bytes, 4);
    return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1),
                                    _mm512_castsi256_si512(values));
  }
#endif
};

// What one step of a sum takes in: LANES products in general, 32 of bfloat16 where the CPU sums pairs.
template <class X>
struct Step {
  static constexpr int64_t SIZE = LANES;
  typedef vf V;
  typedef float Kept;  // as what x is kept that is read again and again
  static V of_x(const X* x, int64_t left) { return load(x, left); }
  static V of_kept(const float* x, int64_t) { return load(x); }
  template <class R>
  static V of_w(const R& row, int64_t k, int64_t left) { return row.floats(k, left); }
  static vf add(vf sum, V x, V w) { return sum + x * w; }
};
#if WIDTH == 64
template <>
struct Step<bf16> {
  static constexpr int64_t SIZE = 32;
  typedef __m512i V;
  typedef bf16 Kept;
  static V of_kept(const bf16* x, int64_t left) { return of_x(x, left); }
  static V of_x(const bf16* x, int64_t left) {
    return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, x);
  }
  template <class R>
  static V of_w(const R& row, int64_t k, int64_t left) { return row.pairs(k, left); }
  static vf add(vf sum, V x, V w) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w); }
};
#endif

// R rows of x by C rows of the weight, to columns n and on of rows t and on.
template <class X, class W, int R, int C>
inline void product(const Linear& a, int64_t t, int64_t n) {
  vf sums[R][C];
  zero(sums);
  const X* x[R];
  Row<W> w[C];
  for (int r = 0; r < R; r++) x[r] = static_cast<const X*>(a.x) + (t + r) * a.x_stride;
  for (int c = 0; c < C; c++) w[c] = Row<W>(a, n + c);
  const auto step = [&](int64_t k, int64_t left) __attribute__((always_inline)) {
    typename Step<X>::V xs[R];
    for (int r = 0; r < R; r++) xs[r] = Step<X>::of_x(x[r] + k, left);
    for (int c = 0; c < C; c++) {
      const auto ws = Step<X>::of_w(w[c], k, left);
      for (int r = 0; r < R; r++) sums[r][c] = Step<X>::add(sums[r][c], xs[r], ws);
    }
  };
  const int64_t whole = a.ins / Step<X>::SIZE * Step<X>::SIZE;
  for (int64_t k = 0; k < whole; k += Step<X>::SIZE) step(k, Step<X>::SIZE);
  if (whole < a.ins) step(whole, a.ins - whole);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float y = sum(sums[r][c]);
      if (a.format == INT8) y *= static_cast<const float*>(a.scales)[n + c];
      if constexpr (sizeof(X) == 4) {
        if (a.bias) y += static_cast<const float*>(a.bias)[n + c];
        static_cast<float*>(a.out)[(t + r) * a.outs + n + c] = y;
      } else {
        if (a.bias) y += to_float(static_cast<const bf16*>(a.bias)[n + c]);
        static_cast<bf16*>(a.out)[(t + r) * a.outs + n + c].bits = to_bf16(y);
      }
    }
}

template <class X, class W, int R>
inline void rows_of_x(const Linear& a, int64_t t, int64_t n, int64_t end) {
  constexpr int C = R == 1 ? 8 : WIDTH == 64 ? 4 : 2;  // as many sums as there are registers for
  for (; n + C <= end; n += C) product<X, W, R, C>(a, t, n);
  for (; n < end; n++) product<X, W, R, 1>(a, t, n);
}

template <class X, class W>
void linear_columns(const Linear& a, int64_t begin, int64_t end) {
  constexpr int64_t CHUNK = 32;  // columns at a time: their weights stay near while all rows of x go by
  share(ceil_div(end - begin, CHUNK), 1, [&](int64_t i) {
    const int64_t n = begin + i * CHUNK, until = least(n + CHUNK, end);
    int64_t t = 0;
    for (; t + 4 <= a.rows; t += 4) rows_of_x<X, W, 4>(a, t, n, until);
    if (t + 2 <= a.rows) rows_of_x<X, W, 2>(a, t, n, until), t += 2;
    if (t < a.rows) rows_of_x<X, W, 1>(a, t, n, until);
  });
}

template <class X, class W>
void expand(const Expand& a) {
  share(a.outs, 0, [&](int64_t n) {
    const Row<W> row(a, n);
    const float scale = a.format == INT8 ? static_cast<const float*>(a.scales)[n] : 1.0f;
    X* out = static_cast<X*>(a.out) + n * a.ins;
    for (int64_t k = 0; k < a.ins; k += LANES) store(out + k, row.floats(k, a.ins - k) * scale, a.ins - k);
  });
}

// ---- products with weights that were packed when they were loaded ---------------------------------------------------
//
// A panel is 2 * LANES outs that are summed together. With AMX it lies as tiles read it, see above. Elsewhere it is read
// in step with one input after the other: of bfloat16 [K][LANES][2], so that a word holds an out of the panel's first
// half below one of its second, and a shift and a mask make floats of both; of int8 [K][2][LANES]; of int4 in groups of 32
// inputs [K / 32][9][LANES] words, of which byte i of word j has input 4 j + i, an out of the first half in the low four bits
// and one of the second in the high ones, and the last word has the two scales.

constexpr int64_t PANEL = 2 * LANES;

// Which outs the two halves of a panel are: with an activation, gates and what they are gates of.
inline int64_t first_of(const Linear& a, int64_t n) { return a.activation == NONE ? n : n / 2; }
inline int64_t second_of(const Linear& a, int64_t n) { return a.activation == NONE ? n + LANES : (a.outs + n) / 2; }

// What is made of a panel's sums of one row.
template <class T>
inline void finish(const Linear& a, int64_t row, int64_t n, vf first, vf second) {
  if (a.bias) {
    first += load(static_cast<const T*>(a.bias) + first_of(a, n));
    second += load(static_cast<const T*>(a.bias) + second_of(a, n));
  }
  T* out = static_cast<T*>(a.out);
  if (a.activation == NONE) {
    out += row * a.outs + n;
    store(out, first);
    store(out + LANES, second);
  } else {
    first = a.activation == SILU ? silu(first) : gelu(first);
    store(out + row * (a.outs / 2) + n / 2, first * second);
  }
}

#if WIDTH < 64  // wider ones have products of bfloat16

constexpr int64_t MOST_ROWS = 6;      // that a panel is multiplied with at once: its sums fill twelve registers
constexpr int64_t NEAR_STEPS = 512;   // of a panel, and as many of the rows beside it, that stay in the nearest cache
constexpr int64_t NEAR_ROWS = 72;     // of x, for so many steps, that stay in the next one while panels go by
constexpr int64_t NEAR_PANELS = 8;    // that go by
constexpr int64_t ROWS_AT_ONCE = 288;  // that are made floats before they are multiplied

template <class W>
struct Panel;
template <>
struct Panel<bf16> {
  const uint32_t* words;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0) : words(static_cast<const uint32_t*>(from) + k * LANES) {}
  void at(int64_t k, vf& first, vf& second) const {
    const vu both = read<vu>(words + k * LANES);
    first = (vf)(both << 16);
    second = (vf)(both & 0xffff0000u);
  }
  static int64_t bytes(int64_t steps) { return steps * LANES * 4; }
};
template <>
struct Panel<int8_t> {
  const int8_t* numbers;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0) : numbers(static_cast<const int8_t*>(from) + k * PANEL) {}
  void at(int64_t k, vf& first, vf& second) const {
    first = load(numbers + k * PANEL);
    second = load(numbers + k * PANEL + LANES);
  }
  static int64_t bytes(int64_t steps) { return steps * PANEL; }
};

template <>
struct Panel<int4x32> {
  static constexpr int64_t GROUP_WORDS = 9 * LANES;
  const uint32_t* words;
  Panel() = default;
  explicit Panel(const void* from, int64_t k = 0)
      : words(static_cast<const uint32_t*>(from) + k / GROUP * GROUP_WORDS) {}
  static int64_t bytes(int64_t steps) { return steps * GROUP_WORDS * 4 / GROUP; }
};

// What is brought near beside the products: cache lines, so many with each STRIDE_STEPS steps, and not into the nearest
// cache, which is full.
struct Fetch {
  const char* from = nullptr;
  int64_t lines = 0;
};
constexpr int64_t STRIDE_STEPS = 8;

// R rows of x, `stride` floats apart, by P panels: added to sums.
template <class W, int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<W> (&panels)[P],
                                                    int64_t steps, Fetch fetch, vf (&sums)[R][P][2]) {
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    for (int p = 0; p < P; p++) {
      vf first, second;
      panels[p].at(k, first, second);
      for (int r = 0; r < R; r++) {
        const float value = x[r * stride + k];
        sums[r][p][0] += first * value;
        sums[r][p][1] += second * value;
      }
    }
  };
  int64_t k = 0;
  for (; k + STRIDE_STEPS <= steps; k += STRIDE_STEPS) {
    for (int64_t i = 0; i < fetch.lines; i++, fetch.from += 64) __builtin_prefetch(fetch.from, 0, 2);
    for (int64_t i = 0; i < STRIDE_STEPS; i++) step(k + i);
  }
  for (; k < steps; k++) step(k);
}

// The same, of whole groups: a group's numbers, as they are held, and what they are held too large by.
template <int R, int P>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t stride, const Panel<int4x32> (&panels)[P],
                                                    int64_t steps, Fetch fetch, vf (&sums)[R][P][2]) {
  for (int64_t g = 0; g < steps / GROUP; g++, x += GROUP) {
    for (int64_t i = 0; i < fetch.lines * GROUP / STRIDE_STEPS; i++, fetch.from += 64) __builtin_prefetch(fetch.from, 0, 2);
    vf products[R][P][2];
    zero(products);
    for (int64_t j = 0; j < 8; j++) {
      vu words[P];
      for (int p = 0; p < P; p++) words[p] = read<vu>(panels[p].words + g * Panel<int4x32>::GROUP_WORDS + j * LANES);
      const auto step = [&](auto index) __attribute__((always_inline)) {
        constexpr int I = sizeof index - 1;
        for (int p = 0; p < P; p++) {
          const vf first = as_floats((vi)(words[p] >> (8 * I) & 15)), second = as_floats((vi)(words[p] >> (8 * I + 4) & 15));
          for (int r = 0; r < R; r++) {
            const float value = x[r * stride + 4 * j + I];
            products[r][p][0] += first * value;
            products[r][p][1] += second * value;
          }
        }
      };
      struct First { char size[1]; };
      struct Second { char size[2]; };
      struct Third { char size[3]; };
      struct Fourth { char size[4]; };
      step(First{}), step(Second{}), step(Third{}), step(Fourth{});
    }
    for (int r = 0; r < R; r++) {
      vf all_of_group = {};
      for (int64_t k = 0; k < GROUP; k += LANES) all_of_group += load(x + r * stride + k);
      const float excess = 8 * sum(all_of_group);
      for (int p = 0; p < P; p++) {
        const vu scales = read<vu>(panels[p].words + g * Panel<int4x32>::GROUP_WORDS + 8 * LANES);
        sums[r][p][0] += (products[r][p][0] - excess) * (vf)(scales << 16);
        sums[r][p][1] += (products[r][p][1] - excess) * (vf)(scales & 0xffff0000u);
      }
    }
  }
}

// The rows of x that are multiplied together, as floats, `stride` apart.
struct FloatRows {
  float* at;
  int64_t first, count, stride;
  const float* row(int64_t t) const { return at + (t - first) * stride; }
};

template <class W>
inline void finish_panel(const Linear& a, int64_t row, int64_t n, vf first, vf second) {
  if constexpr (sizeof(W) == 1) {
    first *= load(static_cast<const float*>(a.scales) + first_of(a, n));
    second *= load(static_cast<const float*>(a.scales) + second_of(a, n));
  }
  finish<bf16>(a, row, n, first, second);
}

// Few rows: each panel is read once, several beside each other, so that no sum waits for the one before.
template <class W, int R, int P>
void few_rows(const Linear& a, const FloatRows& x, int64_t panel, int64_t end) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins);
  for (; panel + P <= end; panel += P) {
    vf sums[R][P][2];
    zero(sums);
    Panel<W> panels[P];
    for (int p = 0; p < P; p++) panels[p] = Panel<W>(w + (panel + p) * bytes);
    multiply(x.at, x.stride, panels, a.ins, Fetch{}, sums);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++)
        finish_panel<W>(a, x.first + r, (panel + p) * PANEL, sums[r][p][0], sums[r][p][1]);
  }
  if constexpr (P > 1) few_rows<W, R, 1>(a, x, panel, end);
}

template <class W, int R>
inline void add_tile(const float* x, int64_t stride, const Panel<W>& panel, int64_t steps, Fetch fetch, vf* kept) {
  vf sums[R][1][2];
  __builtin_memcpy(sums, kept, sizeof sums);
  const Panel<W> panels[] = {panel};
  multiply(x, stride, panels, steps, fetch, sums);
  __builtin_memcpy(kept, sums, sizeof sums);
}
template <class W>
inline void add_tile(int64_t rows, const float* x, int64_t stride, const Panel<W>& panel, int64_t steps, Fetch fetch,
                     vf* kept) {
  switch (rows) {
    case 1: return add_tile<W, 1>(x, stride, panel, steps, fetch, kept);
    case 2: return add_tile<W, 2>(x, stride, panel, steps, fetch, kept);
    case 3: return add_tile<W, 3>(x, stride, panel, steps, fetch, kept);
    case 4: return add_tile<W, 4>(x, stride, panel, steps, fetch, kept);
    case 5: return add_tile<W, 5>(x, stride, panel, steps, fetch, kept);
    default: return add_tile<W, 6>(x, stride, panel, steps, fetch, kept);
  }
}

// Many rows, at most NEAR_ROWS, by at most NEAR_PANELS panels: sums wait in a buffer while others go by.
template <class W>
void many_rows(const Linear& a, const FloatRows& x, int64_t t, int64_t rows, int64_t panel, int64_t end) {
  const char* w = static_cast<const char*>(a.w);
  const int64_t bytes = Panel<W>::bytes(a.ins), tiles = ceil_div(rows, MOST_ROWS);
  vf kept[NEAR_PANELS * NEAR_ROWS * 2];
  __builtin_memset(kept, 0, (end - panel) * rows * 2 * sizeof(vf));
  for (int64_t k = 0; k < a.ins; k += NEAR_STEPS) {
    const int64_t steps = least(NEAR_STEPS, a.ins - k);
    const int64_t all_lines = ceil_div(Panel<W>::bytes(GROUP), 64 * GROUP / STRIDE_STEPS), lines = ceil_div(all_lines, tiles);
    for (int64_t p = panel; p < end; p++) {
      const bool is_last = p + 1 == end;
      const char* next = w + (is_last ? panel : p + 1) * bytes + Panel<W>::bytes(is_last ? k + steps : k);
      for (int64_t i = 0; i < tiles; i++) {  // as even as can be
        const int64_t from = i * rows / tiles, until = (i + 1) * rows / tiles;
        vf* const own = kept + ((p - panel) * rows + from) * 2;
        const Fetch fetch{next, i * lines < all_lines ? lines : 0};
        add_tile<W>(until - from, x.row(t + from) + k, x.stride, Panel<W>(w + p * bytes, k), steps, fetch, own);
        next += steps / STRIDE_STEPS * lines * 64;
      }
    }
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t p = panel; p < end; p++) {
      const vf* own = kept + ((p - panel) * rows + i) * 2;
      finish_panel<W>(a, t + i, p * PANEL, own[0], own[1]);
    }
}

// Between two rows of x as floats: whole cache lines, and never a power of two, whose multiples would meet in one place
// of a cache.
inline int64_t float_stride(int64_t ins) { return ceil_div(ins, 16) * 16 + 16; }

template <class W>
void linear_packed(const Linear& a, void* memory) {
  const int64_t panels = a.outs / PANEL;
  for (int64_t t = 0; t < a.rows; t += ROWS_AT_ONCE) {
    const FloatRows x{static_cast<float*>(memory), t, least(ROWS_AT_ONCE, a.rows - t), float_stride(a.ins)};
    share(x.count, x.count * a.ins < FEW ? x.count : 0, [&](int64_t i) {
      const bf16* from = static_cast<const bf16*>(a.x) + (t + i) * a.x_stride;
      float* to = x.at + i * x.stride;
      for (int64_t k = 0; k < a.ins; k += LANES) store(to + k, load(from + k, a.ins - k), a.ins - k);
    });
    // Of few rows, fewer panels together, so that there is enough to share.
    const int64_t together = x.count > NEAR_ROWS ? NEAR_PANELS : NEAR_PANELS / 2;
    const int64_t groups = ceil_div(panels, together), parts = ceil_div(x.count, NEAR_ROWS);
    share(groups * parts, 0, [&](int64_t item) {
      const int64_t from = item / parts * together, end = least(panels, from + together);
      const int64_t row = t + item % parts * NEAR_ROWS;
      constexpr int P = sizeof(W) == sizeof(int4x32) ? 1 : 2;  // whose products and sums are apart
      switch (x.count) {
        case 1: return few_rows<W, 1, 2 * P>(a, x, from, end);
        case 2: return few_rows<W, 2, P>(a, x, from, end);
        case 3: return few_rows<W, 3, P>(a, x, from, end);
        default: return many_rows<W>(a, x, row, least(NEAR_ROWS, t + x.count - row), from, end);
      }
    });
  }
}

// Rows of a packed weight of bfloat16.
inline void embed(const Embed& a) {
  share(a.rows, 0, [&](int64_t t) {
    const int64_t panel = a.ids[t] / PANEL, out = a.ids[t] % PANEL;
    const bf16* w = static_cast<const bf16*>(a.w) + panel * PANEL * a.ins + out % LANES * 2 + out / LANES;
    for (int64_t k = 0; k < a.ins; k++) static_cast<bf16*>(a.out)[t * a.ins + k] = w[k * PANEL];
  });
}

#endif

// ---- between the products -------------------------------------------------------------------------------------------

template <class T, class W>
void rms_norm(const RmsNorm& a) {
  share(a.rows * a.inner, 0, [&](int64_t i) {
    const T* x = static_cast<const T*>(a.x) + i / a.inner * a.x_stride + i % a.inner * a.dim;
    if (a.residual) {  // summed and rounded first: what is normed is what goes on
      const T* residual = static_cast<const T*>(a.residual) + i * a.dim;
      T* total = static_cast<T*>(a.sum) + i * a.dim;
      for (int64_t k = 0; k < a.dim; k += LANES)
        store(total + k, load(x + k, a.dim - k) + load(residual + k, a.dim - k), a.dim - k);
      x = total;
    }
    vf squares = {};
    for (int64_t k = 0; k < a.dim; k += LANES) {
      const vf v = load(x + k, a.dim - k);
      squares += v * v;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(a.dim) + float(a.eps));
    T* out = static_cast<T*>(a.out) + i * a.dim;
    for (int64_t k = 0; k < a.dim; k += LANES)
      store(out + k, load(x + k, a.dim - k) * factor * load(static_cast<const W*>(a.weight) + k, a.dim - k), a.dim - k);
  });
}

template <class T>
void rope(const Rope& a) {
  const int64_t half = a.dim / 2;
  share(a.rows * a.heads, 0, [&](int64_t i) {
    const int64_t t = i / a.heads;
    const T* x = static_cast<const T*>(a.x) + t * a.x_stride + i % a.heads * a.dim;
    T* out = static_cast<T*>(a.out) + i * a.dim;
    for (int64_t k = 0; k < half; k += LANES) {
      const int64_t left = half - k;
      const vf first = load(x + k, left), second = load(x + half + k, left);
      const vf cos = load(a.cos + t * half + k, left), sin = load(a.sin + t * half + k, left);
      store(out + k, first * cos - second * sin, left);
      store(out + half + k, second * cos + first * sin, left);
    }
  });
}

template <class T>
void gated(const Gated& a) {
  share(a.rows, 0, [&](int64_t t) {
    const T *gate = static_cast<const T*>(a.x) + t * 2 * a.inner, *up = gate + a.inner;
    T* out = static_cast<T*>(a.out) + t * a.inner;
    for (int64_t k = 0; k < a.inner; k += LANES) {
      const vf g = load(gate + k, a.inner - k);
      store(out + k, (a.is_gelu ? gelu(g) : silu(g)) * load(up + k, a.inner - k), a.inner - k);
    }
  });
}

// One head: normed, unless there is no weight, and turned.
template <class T, class W>
inline void enter_head(const Enter& a, const T* x, const W* weight, int64_t t, T* out) {
  const int64_t half = a.dim / 2;
  float factor = 1;
  if (weight) {
    vf squares = {};
    for (int64_t k = 0; k < a.dim; k += LANES) {
      const vf v = load(x + k, a.dim - k);
      squares += v * v;
    }
    factor = 1.0f / __builtin_sqrtf(sum(squares) / float(a.dim) + float(a.eps));
  }
  for (int64_t k = 0; k < half; k += LANES) {
    const int64_t left = half - k;
    vf first = load(x + k, left), second = load(x + half + k, left);
    if (weight) {
      first = first * factor * load(weight + k, left);
      second = second * factor * load(weight + half + k, left);
    }
    const vf cos = load(a.cos + t * half + k, left), sin = load(a.sin + t * half + k, left);
    store(out + k, first * cos - second * sin, left);
    store(out + half + k, second * cos + first * sin, left);
  }
}

template <class T, class W>
void enter(const Enter& a) {
  share(a.rows, 0, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.qkv) + t * a.stride;
    T *keys = static_cast<T*>(a.keys) + a.slots[t] * a.kv_heads * a.dim, *query = static_cast<T*>(a.query);
    for (int64_t h = 0; h < a.heads; h++, x += a.dim)
      enter_head(a, x, static_cast<const W*>(a.query_weight), t, query + (t * a.heads + h) * a.dim);
    for (int64_t h = 0; h < a.kv_heads; h++, x += a.dim)
      enter_head(a, x, static_cast<const W*>(a.key_weight), t, keys + h * a.dim);
    __builtin_memcpy(static_cast<T*>(a.values) + a.slots[t] * a.kv_heads * a.dim, x, a.kv_heads * a.dim * sizeof(T));
  });
}

inline void store_kv(const StoreKv& a) {
  share(a.rows, 0, [&](int64_t t) {
    __builtin_memcpy(a.key_cache + a.slots[t] * a.row_bytes, a.key + t * a.key_stride, a.row_bytes);
    __builtin_memcpy(a.value_cache + a.slots[t] * a.row_bytes, a.value + t * a.value_stride, a.row_bytes);
  });
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

constexpr int64_t LOOKED_AT = 256;  // logits that are taken together, before it is asked which of them it is

template <class T>
void argmax(const Argmax& a) {
  share(a.rows, 1, [&](int64_t t) {
    const T* x = static_cast<const T*>(a.x) + t * a.size;
    float top = -__builtin_inff();
    int64_t found = 0;  // where those begin among which the largest is
    for (int64_t begin = 0; begin < a.size; begin += LOOKED_AT) {
      const int64_t end = least(begin + LOOKED_AT, a.size);
      vf highest = all(top);
      vi wrong = {};
      int64_t i = begin;
      for (; i + LANES <= end; i += LANES) {
        const vf v = load(x + i);
        wrong |= v != v;
        highest = max(v, highest);
      }
      float own = top;
      for (int64_t lane = 0; lane < LANES; lane++) {
        own = highest[lane] > own ? highest[lane] : own;
        if (wrong[lane]) own = __builtin_nanf("");
      }
      for (; i < end; i++) {
        const float v = load(x + i, 1)[0];
        if (!(v <= own)) own = v;
      }
      if (own == top) continue;
      top = own, found = begin;
      if (top != top) break;
    }
    while (found + 1 < a.size) {
      const float v = load(x + found, 1)[0];
      if (v == top || v != v) break;
      found++;
    }
    a.chosen[t] = found;
  });
}

inline void draw(const Draw& a) {
  share(a.rows, 1, [&](int64_t t) {
    const float *x = a.x + t * a.size, temperature = a.temperature[t];
    const int64_t chunks = ceil_div(a.size, LOOKED_AT);
    double* sums = static_cast<double*>(own_scratch.get(chunks * (sizeof(double) + LOOKED_AT * sizeof(float))));
    float* weights = reinterpret_cast<float*>(sums + chunks);
    vf highest = all(-__builtin_inff());
    int64_t i = 0;
    for (; i + LANES <= a.size; i += LANES) highest = max(load(x + i), highest);
    float top = -__builtin_inff();
    for (int64_t lane = 0; lane < LANES; lane++) top = highest[lane] > top ? highest[lane] : top;
    for (; i < a.size; i++) top = x[i] > top ? x[i] : top;
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const int64_t begin = chunk * LOOKED_AT, end = begin + LOOKED_AT;
      for (i = begin; i < least(end, a.size); i += LANES)
        store(weights + i, exp((load(x + i, a.size - i) - top) / temperature));
      for (i = least(end, a.size); i < end; i++) weights[i] = 0;
      double partial[8] = {};
      for (i = begin; i < end; i += 8)
        for (int64_t j = 0; j < 8; j++) partial[j] += weights[i + j];
      sums[chunk] = ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
                    ((partial[4] + partial[5]) + (partial[6] + partial[7]));
      total += sums[chunk];
    }
    const double point = a.share[t] * total;
    double before = 0;
    int64_t chunk = 0;
    while (chunk < chunks - 1 && !(before + sums[chunk] > point)) before += sums[chunk++];
    int64_t last = a.size - 1;  // in case that rounding, or what is no number, leaves the point behind all of them
    for (i = chunk * LOOKED_AT; i < least((chunk + 1) * LOOKED_AT, a.size); i++) {
      if (weights[i] > 0) last = i;
      before += weights[i];
      if (before > point) break;
    }
    a.chosen[t] = last;
  });
}

// ---- attention ------------------------------------------------------------------------------------------------------

// R rows of one sequence for each of some neighbouring key/value heads, a row being a token's head. Their scores are all
// kept, and each position's keys and values are read once, for all the heads together, since they lie beside each other.
// Positions count from a multiple of 16, so that a row's sums do not depend on its neighbours in the tile: what these see
// and it does not, it adds as zero.
template <class T, int R>
struct Rows {
  typedef typename Step<T>::Kept Kept;  // queries: floats, made once, unless they are summed as they are
  static constexpr int KEYS = R <= 3 ? 4 : 2;  // at once: as many sums as there are registers for
  static constexpr int64_t VALUES = 4;         // vectors of a head at once

  const Attend& a;
  const int64_t seq, head, heads, row;
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, stride = a.num_kv_heads * dim;
  const int64_t kept_dim = ceil_div(dim, Step<T>::SIZE) * Step<T>::SIZE;
  const int32_t* const table = a.tables + seq * a.table_width;
  int64_t first[R], last[R];  // the positions that a row sees
  int64_t begin, end, width;  // those that any sees, and so many that they are whole vectors
  float *scores, *sums;       // [heads][R][width]; [heads][R][D]
  Kept* queries;              // [heads][R][kept_dim]

  Rows(const Attend& a, int64_t seq, int64_t head, int64_t heads, int64_t row)
      : a(a), seq(seq), head(head), heads(heads), row(row) {
    const int64_t query_len = a.starts[seq + 1] - a.starts[seq];
    for (int r = 0; r < R; r++) {
      last[r] = a.seq_lens[seq] - query_len + (row + r) / group;
      first[r] = a.window ? most(0, last[r] - a.window + 1) : 0;
    }
    begin = first[0] / 16 * 16, end = last[R - 1] + 1, width = ceil_div(end - begin, 16) * 16;
    const int64_t own_dim = ceil_div(dim, LANES) * LANES;
    scores = static_cast<float*>(own_scratch.get(heads * R * (width + own_dim + kept_dim) * sizeof(float)));
    sums = scores + heads * R * width;
    queries = reinterpret_cast<Kept*>(sums + heads * R * own_dim);
  }

  int64_t at(int64_t h, int r) const {  // where a row stands, in the queries as in the outputs
    return ((a.starts[seq] + (row + r) / group) * a.num_heads + (head + h) * group + (row + r) % group) * dim;
  }

  void run() {
    take_queries();
    each_run(a.keys, [&](int64_t h, int64_t i, const T* key, int64_t count) __attribute__((always_inline)) {
      for (; count >= KEYS; i += KEYS, key += KEYS * stride, count -= KEYS) score<KEYS>(h, i, key);
      for (; count > 0; i++, key += stride, count--) score<1>(h, i, key);
    });
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) soften(scores + (h * R + r) * width, r, sums + (h * R + r) * dim);
    each_run(a.values, [&](int64_t h, int64_t i, const T* value, int64_t count) __attribute__((always_inline)) {
      weigh(h, i, value, count);
    });
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) {
        const float* own = sums + (h * R + r) * dim;
        T* out = static_cast<T*>(a.out) + at(h, r);
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(own + d, dim - d), dim - d);
      }
  }

  void take_queries() {
    for (int64_t h = 0; h < heads; h++)
      for (int r = 0; r < R; r++) {
        const T* query = static_cast<const T*>(a.query) + at(h, r);
        Kept* to = queries + (h * R + r) * kept_dim;
        if constexpr (sizeof(Kept) == sizeof(T)) {
          __builtin_memset(to, 0, kept_dim * sizeof(T));
          __builtin_memcpy(to, query, dim * sizeof(T));
        } else {
          for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(query + d, dim - d));
        }
      }
  }

  // Calls visit(head, i, from, count) for the runs of positions that lie beside each other, and each head of theirs.
  template <class F>
  inline __attribute__((always_inline)) void each_run(const void* cache, F visit) {
    for (int64_t p = begin; p < end;) {
      const int64_t offset = p % a.block_size, count = least(a.block_size - offset, end - p);
      const int64_t slot = int64_t(table[p / a.block_size]) * a.block_size + offset;
      const T* from = static_cast<const T*>(cache) + slot * stride + head * dim;
      // The next block is elsewhere, which no prefetching of the hardware's knows.
      const bool has_next = p + count < end;
      const T* next = has_next ? from + (int64_t(table[p / a.block_size + 1]) * a.block_size - slot) * stride : from;
      for (int64_t h = 0; h < heads; h++, from += dim, next += dim) {
        for (int64_t i = 0; i < count; i++)
          for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(next + i * stride + d);
        visit(h, p - begin, from, count);
      }
      p += count;
    }
  }

  template <int N>
  inline __attribute__((always_inline)) void score(int64_t h, int64_t i, const T* key) {
    vf products[R][N];
    zero(products);
    const Kept* query = queries + h * R * kept_dim;
    const auto step = [&](int64_t d, int64_t left) __attribute__((always_inline)) {
      typename Step<T>::V q[R];
      for (int r = 0; r < R; r++) q[r] = Step<T>::of_kept(query + r * kept_dim + d, left);
      for (int n = 0; n < N; n++) {
        const auto k = Step<T>::of_x(key + n * stride + d, left);
        for (int r = 0; r < R; r++) products[r][n] = Step<T>::add(products[r][n], q[r], k);
      }
    };
    const int64_t whole = dim / Step<T>::SIZE * Step<T>::SIZE;
    for (int64_t d = 0; d < whole; d += Step<T>::SIZE) step(d, Step<T>::SIZE);
    if (whole < dim) step(whole, dim - whole);
    for (int r = 0; r < R; r++) sums_of<N>(products[r], scores + (h * R + r) * width + i);
  }

  // A row's scores become weights, whose sum is one, and its sums zero.
  void soften(float* own, int r, float* sums_of_row) {
    vf highest = all(-__builtin_inff()), total = {}, lane;
    for (int64_t i = 0; i < LANES; i++) lane[i] = float(i);
    const vf from = all(float(first[r] - begin)), to = all(float(last[r] - begin));
    for (int64_t i = 0; i < width; i += LANES) {
      vf s = load(own + i) * float(a.scale);
      if (a.softcap) s = capped(s, float(a.softcap));
      const vf position = lane + float(i);
      s = (position >= from) & (position <= to) ? s : all(-__builtin_inff());
      highest = max(highest, s);
      store(own + i, s);
    }
    float top = highest[0];
    for (int64_t i = 1; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    for (int64_t i = 0; i < width; i += LANES) {
      const vf weight = exp(load(own + i) - top);
      store(own + i, weight);
      total += weight;
    }
    const float inverse = 1.0f / sum(total);
    for (int64_t i = 0; i < width; i += LANES) store(own + i, load(own + i) * inverse);
    __builtin_memset(sums_of_row, 0, dim * sizeof(float));
  }

  void weigh(int64_t h, int64_t i, const T* value, int64_t count) {
    int64_t d = 0;
    for (; d + VALUES * LANES <= dim; d += VALUES * LANES) weigh<VALUES>(h, i, value, count, d, LANES);
    for (; d < dim; d += LANES) weigh<1>(h, i, value, count, d, least(LANES, dim - d));
  }

  // V vectors of the head, from d on; of the last one there may be only so much.
  template <int V>
  inline __attribute__((always_inline)) void weigh(int64_t h, int64_t i, const T* value, int64_t count, int64_t d,
                                                   int64_t left) {
    const float* weights = scores + h * R * width + i;
    float* to = sums + h * R * dim + d;
    vf own[R][V];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) own[r][j] = load(to + r * dim + j * LANES, left);
    for (int64_t n = 0; n < count; n++)
      for (int j = 0; j < V; j++) {
        const vf v = load(value + n * stride + d + j * LANES, left);
        for (int r = 0; r < R; r++) own[r][j] += v * weights[r * width + n];
      }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) store(to + r * dim + j * LANES, own[r][j], left);
  }
};

// All sequences but those that are skipped, as one piece of work.
template <class T>
void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  constexpr int64_t R = 4;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const auto rows_of = [&](int64_t seq) {
    return skips(a, seq) ? 0 : ceil_div((a.starts[seq + 1] - a.starts[seq]) * group, R);
  };
  int64_t rows = 0;
  for (int64_t seq = 0; seq < a.num_seqs; seq++) rows += rows_of(seq);
  // Heads together, as long as there is enough to share.
  const int64_t heads = most(1, least(a.num_kv_heads, rows * a.num_kv_heads / (calling.num_threads * SHARES_PER_THREAD)));
  const int64_t parts = ceil_div(a.num_kv_heads, heads);
  share(rows * parts, 1, [&](int64_t i) {
    const int64_t first = i % parts * heads, count = least(heads, a.num_kv_heads - first);
    int64_t seq = 0;
    for (i /= parts; i >= rows_of(seq); seq++) i -= rows_of(seq);
    const int64_t row = i * R;
    switch (least(R, (a.starts[seq + 1] - a.starts[seq]) * group - row)) {
      case 4: return Rows<T, 4>(a, seq, first, count, row).run();
      case 3: return Rows<T, 3>(a, seq, first, count, row).run();
      case 2: return Rows<T, 2>(a, seq, first, count, row).run();
      default: return Rows<T, 1>(a, seq, first, count, row).run();
    }
  });
}
inline void attend(const Attend& a, bool (*skips)(const Attend&, int64_t)) {
  a.dtype == FLOAT32 ? attend<float>(a, skips) : attend<bf16>(a, skips);
}

#if WIDTH < 64

// Many rows of one sequence: its keys and values are packed as panels of positions and of dimensions, so that scores and
// outputs are the products of above. A tile of rows, being the heads that share a key/value head, token after token,
// goes along the positions with a running softmax.

constexpr int64_t TILE_ROWS = 24;
constexpr int64_t STEP_POSITIONS = 256;  // between two corrections of a running softmax
constexpr int64_t SCORE_STRIDE = STEP_POSITIONS + 16;
constexpr int64_t PACKED_AT_ONCE = 64 << 20;  // bytes of keys and values, unless one head has more

inline int64_t packed_head_bytes(const Attend& a) {
  return ceil_div(longest(a) + PANEL, PANEL) * PANEL * a.head_dim * sizeof(bf16) * 2;
}
inline int64_t heads_together(const Attend& a) {
  return least(a.num_kv_heads, most(1, PACKED_AT_ONCE / packed_head_bytes(a)));
}

struct PackedKv {
  uint32_t *keys, *values;  // [heads][positions / PANEL][D][LANES]; [heads][D / PANEL][positions][LANES]
  int64_t begin, positions;  // the first one, and how many: whole panels
};

inline bool suits_tiles(const Attend& a, int64_t seq) {
  const int64_t rows = (a.starts[seq + 1] - a.starts[seq]) * (a.num_heads / a.num_kv_heads);
  return a.dtype == BFLOAT16 && a.head_dim % PANEL == 0 && rows >= PANEL;
}

// PANEL positions of one head. What a block holds behind its sequence's end must not be multiplied.
inline void pack_positions(const Attend& a, int64_t seq, int64_t head, int64_t position, const PackedKv& to,
                           uint32_t* keys, uint32_t* values) {
  const int32_t* table = a.tables + seq * a.table_width;
  const int64_t dim = a.head_dim, left = a.seq_lens[seq] - position;
  const bf16 *key[PANEL], *value[PANEL];
  for (int64_t i = 0; i < PANEL; i++) {
    const int64_t p = position + least(i, left - 1);
    const int64_t slot = int64_t(table[p / a.block_size]) * a.block_size + p % a.block_size;
    key[i] = static_cast<const bf16*>(a.keys) + (slot * a.num_kv_heads + head) * dim;
    value[i] = static_cast<const bf16*>(a.values) + (slot * a.num_kv_heads + head) * dim;
  }
  for (int64_t d = 0; d < dim; d += 2) {
    vu first, second;  // two dimensions of each position
    for (int64_t i = 0; i < LANES; i++) {
      first[i] = read<uint32_t>(key[i] + d);
      second[i] = read<uint32_t>(key[LANES + i] + d);
    }
    const vu even = (first & 0xffff) | second << 16, odd = first >> 16 | (second & 0xffff0000u);
    __builtin_memcpy(keys + d * LANES, &even, sizeof even);
    __builtin_memcpy(keys + (d + 1) * LANES, &odd, sizeof odd);
  }
  for (int64_t d = 0; d < dim; d += PANEL)
    for (int64_t i = 0; i < PANEL; i++) {
      vu both = widened(&value[i][d].bits) | widened(&value[i][d + LANES].bits) << 16;
      if (i >= left) both = vu{};
      __builtin_memcpy(values + (d / PANEL * to.positions + i) * LANES, &both, sizeof both);
    }
}

struct QueryTile {
  const Attend& a;
  int64_t seq, head, row, group, dim, query_len, num_rows;
  int64_t first_seen[TILE_ROWS], last_seen[TILE_ROWS];
  float highest[TILE_ROWS], correction[TILE_ROWS];
  vf total[TILE_ROWS];
  alignas(64) float scores[TILE_ROWS * SCORE_STRIDE];

  QueryTile(const Attend& a, int64_t seq, int64_t head, int64_t row)
      : a(a), seq(seq), head(head), row(row), group(a.num_heads / a.num_kv_heads), dim(a.head_dim),
        query_len(a.starts[seq + 1] - a.starts[seq]), num_rows(least(TILE_ROWS, query_len * group - row)) {}

  int64_t at(int64_t i) const {  // where a row stands, in the queries as in the outputs
    return ((a.starts[seq] + (row + i) / group) * a.num_heads + head * group + (row + i) % group) * dim;
  }

  static size_t bytes(int64_t dim) { return TILE_ROWS * (float_stride(dim) + dim) * sizeof(float); }

  // keys, values: of this head. memory: `bytes` for the queries as floats, and the outputs
  void run(const PackedKv& packed, const uint32_t* keys, const uint32_t* values, void* memory) {
    float* queries = static_cast<float*>(memory);
    vf* outputs = reinterpret_cast<vf*>(queries + TILE_ROWS * float_stride(dim));  // [D / PANEL][rows][2]
    for (int64_t i = 0; i < num_rows; i++) {
      const bf16* query = static_cast<const bf16*>(a.query) + at(i);
      for (int64_t d = 0; d < dim; d += LANES) store(queries + i * float_stride(dim) + d, load(query + d) * float(a.scale));
      last_seen[i] = a.seq_lens[seq] - query_len + (row + i) / group;
      first_seen[i] = a.window ? most(0, last_seen[i] - a.window + 1) : 0;
      highest[i] = -__builtin_inff();
      total[i] = vf{};
    }
    __builtin_memset(outputs, 0, TILE_ROWS * dim * sizeof(float));
    const int64_t end = last_seen[num_rows - 1] + 1;
    for (int64_t p = first_seen[0] / PANEL * PANEL; p < end; p += STEP_POSITIONS) {
      const int64_t count = ceil_div(least(STEP_POSITIONS, end - p), PANEL) * PANEL, offset = p - packed.begin;
      score(queries, keys + offset / PANEL * dim * LANES, count);
      for (int64_t i = 0; i < num_rows; i++) soften(i, p, count);
      weigh(values + offset * LANES, packed.positions, count, outputs);
    }
    for (int64_t i = 0; i < num_rows; i++) {
      const float inverse = 1.0f / sum(total[i]);
      bf16* out = static_cast<bf16*>(a.out) + at(i);
      for (int64_t d = 0; d < dim; d += PANEL) {
        const vf* own = outputs + (d / PANEL * TILE_ROWS + i) * 2;
        store(out + d, own[0] * inverse);
        store(out + d + LANES, own[1] * inverse);
      }
    }
  }

  // f(from, until) for rows that are multiplied together, as even as can be.
  template <class F>
  void each_few_rows(F f) const {
    const int64_t parts = ceil_div(num_rows, MOST_ROWS);
    for (int64_t i = 0; i < parts; i++) f(i * num_rows / parts, (i + 1) * num_rows / parts);
  }

  void score(const float* queries, const uint32_t* keys, int64_t count) {
    for (int64_t p = 0; p < count; p += PANEL)
      each_few_rows([&](int64_t from, int64_t until) {
        vf sums[MOST_ROWS][2];
        zero(sums);
        add_tile<bf16>(until - from, queries + from * float_stride(dim), float_stride(dim), Panel<bf16>(keys + p / PANEL * dim * LANES),
                       dim, {}, sums[0]);
        for (int64_t i = from; i < until; i++) {
          store(scores + i * SCORE_STRIDE + p, sums[i - from][0]);
          store(scores + i * SCORE_STRIDE + p + LANES, sums[i - from][1]);
        }
      });
  }

  // From a row's scores to weights, and by what its weighted values so far are too large.
  void soften(int64_t i, int64_t p, int64_t count) {
    float* own = scores + i * SCORE_STRIDE;
    const bool all_seen = p >= first_seen[i] && p + count - 1 <= last_seen[i];
    vf top = all(highest[i]);
    if (!all_seen || a.softcap) {
      vf lane;
      for (int64_t j = 0; j < LANES; j++) lane[j] = float(j);
      const vf from = all(float(first_seen[i] - p)), to = all(float(last_seen[i] - p));
      for (int64_t k = 0; k < count; k += LANES) {
        vf s = load(own + k);
        if (a.softcap) s = capped(s, float(a.softcap));
        const vf position = lane + float(k);
        store(own + k, (position >= from) & (position <= to) ? s : all(-__builtin_inff()));
      }
    }
    for (int64_t k = 0; k < count; k += LANES) top = max(top, load(own + k));
    float most_of_row = top[0];
    for (int64_t j = 1; j < LANES; j++) most_of_row = top[j] > most_of_row ? top[j] : most_of_row;
    // A row that has seen nothing yet has no highest score: from zero, its weights are all exp(-inf).
    const float base = most_of_row == -__builtin_inff() ? 0 : most_of_row;
    correction[i] = exp(all(highest[i] - base))[0];
    highest[i] = most_of_row;
    vf weights = {};
    for (int64_t k = 0; k < count; k += LANES) {
      const vf weight = exp(load(own + k) - base);
      store(own + k, weight);
      weights += weight;
    }
    total[i] = total[i] * correction[i] + weights;
  }

  void weigh(const uint32_t* values, int64_t positions, int64_t count, vf* outputs) {
    for (int64_t d = 0; d < dim; d += PANEL)
      each_few_rows([&](int64_t from, int64_t until) {
        vf* own = outputs + (d / PANEL * TILE_ROWS + from) * 2;
        for (int64_t i = from; i < until; i++)
          for (int64_t j = 0; j < 2; j++) own[(i - from) * 2 + j] *= correction[i];
        add_tile<bf16>(until - from, scores + from * SCORE_STRIDE, SCORE_STRIDE,
                       Panel<bf16>(values + d / PANEL * positions * LANES), count, {}, own);
      });
  }
};

// Of as many heads at a time as there is memory for.
inline void attend_tiles(const Attend& a, int64_t seq, void* memory) {
  const int64_t query_len = a.starts[seq + 1] - a.starts[seq], seq_len = a.seq_lens[seq], dim = a.head_dim;
  const int64_t begin = a.window ? most(0, seq_len - query_len + 1 - a.window) / PANEL * PANEL : 0;
  const int64_t panels = ceil_div(seq_len - begin, PANEL), head_words = panels * LANES * dim;
  const int64_t tiles = ceil_div(query_len * (a.num_heads / a.num_kv_heads), TILE_ROWS);
  const int64_t together = heads_together(a);
  const PackedKv packed{static_cast<uint32_t*>(memory), static_cast<uint32_t*>(memory) + together * head_words, begin,
                        panels * PANEL};
  for (int64_t first = 0; first < a.num_kv_heads; first += together) {
    const int64_t heads = least(together, a.num_kv_heads - first);
    share(heads * panels, 0, [&](int64_t i) {
      const int64_t head = i / panels, panel = i % panels;
      pack_positions(a, seq, first + head, begin + panel * PANEL, packed,
                     packed.keys + head * head_words + panel * dim * LANES,
                     packed.values + head * head_words + panel * PANEL * LANES);
    });
    share(heads * tiles, 1, [&](int64_t i) {
      const int64_t head = i % heads, tile = tiles - 1 - i / heads;  // the last ones see most: the longest work first
      QueryTile query(a, seq, first + head, tile * TILE_ROWS);
      query.run(packed, packed.keys + head * head_words, packed.values + head * head_words,
                own_scratch.get(QueryTile::bytes(dim)));
    });
  }
}
#endif

// ---- one operation --------------------------------------------------------------------------------------------------

template <class T>
void run_with(const Op& op) {
  switch (op.code) {
    case LINEAR:
      if (op.linear.format == PLAIN) return linear_columns<T, T>(op.linear, 0, op.linear.outs);
      if (op.linear.format == INT8) return linear_columns<T, int8_t>(op.linear, 0, op.linear.outs);
      return linear_columns<T, int4x32>(op.linear, 0, op.linear.outs);
    case EXPAND:
      return op.expand.format == INT8 ? expand<T, int8_t>(op.expand) : expand<T, int4x32>(op.expand);
    case RMS_NORM:
      return op.rms_norm.weight_dtype == FLOAT32 ? rms_norm<T, float>(op.rms_norm) : rms_norm<T, bf16>(op.rms_norm);
    case ENTER:
      return op.enter.weight_dtype == FLOAT32 ? enter<T, float>(op.enter) : enter<T, bf16>(op.enter);
    case ROPE:
      return rope<T>(op.rope);
    case GATED:
      return gated<T>(op.gated);
    case ARGMAX:
      return argmax<T>(op.argmax);
  }
}

inline size_t shared_bytes(const Op& op) {
#if WIDTH < 64
  if (op.code == LINEAR && op.linear.is_packed)
    return least(op.linear.rows, ROWS_AT_ONCE) * float_stride(op.linear.ins) * sizeof(float);
  if (op.code == ATTEND) {
    for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
      if (suits_tiles(op.attend, seq)) return heads_together(op.attend) * packed_head_bytes(op.attend);
  }
#endif
  return 0;
}

inline int64_t dtype_of(const Op& op) {
  switch (op.code) {
    case LINEAR: return op.linear.dtype;
    case EXPAND: return op.expand.dtype;
    case RMS_NORM: return op.rms_norm.dtype;
    case ROPE: return op.rope.dtype;
    case GATED: return op.gated.dtype;
    case ENTER: return op.enter.dtype;
    case ARGMAX: return op.argmax.dtype;
    default: return FLOAT32;
  }
}

void run(const Op& op, void* shared) {
#if WIDTH < 64
  if (op.code == LINEAR && op.linear.is_packed) {
    if (op.linear.format == PLAIN) return linear_packed<bf16>(op.linear, shared);
    if (op.linear.format == INT8) return linear_packed<int8_t>(op.linear, shared);
    return linear_packed<int4x32>(op.linear, shared);
  }
  if (op.code == EMBED) return embed(op.embed);
  if (op.code == ATTEND) {
    for (int64_t seq = 0; seq < op.attend.num_seqs; seq++)
      if (suits_tiles(op.attend, seq)) attend_tiles(op.attend, seq, shared);
    return attend(op.attend, suits_tiles);
  }
#endif
  if (op.code == STORE_KV) return store_kv(op.store_kv);
  if (op.code == DRAW) return draw(op.draw);
  if (op.code == ATTEND) return attend(op.attend, [](const Attend&, int64_t) { return false; });
  dtype_of(op) == FLOAT32 ? run_with<float>(op) : run_with<bf16>(op);
}

}  // namespace LEVEL
}  // namespace
#endif
