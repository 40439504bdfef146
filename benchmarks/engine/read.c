// Memory read bandwidth: n threads, each over its own part. For benchmarks/engine/cpu.py.
#include <omp.h>
#include <stdint.h>

uint64_t read_all(const uint64_t *from, int64_t count, int threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : total) schedule(static)
  for (int64_t i = 0; i < count; i++) total ^= from[i];
  return total;
}
