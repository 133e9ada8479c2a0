#include "cluster_on_cpu.h"
#include "choose_rows.cu"

extern "C" void run(const u8* scores, const int* counts, const int* totals, const int* lengths, const int* wanted, const u32* whole,
                    const float* factors, const u32* codes, const u16* weights, int* rows, int* found, int heads, int capacity,
                    int chunks, int k, int first, int share, float scale, u32 low, u32 high, int batch, long bytes, unsigned seed) {
  run_grid(heads, batch, bytes, seed, [=] {
    choose_rows(scores, counts, totals, lengths, wanted, whole, factors, codes, weights, rows, found, heads, capacity, chunks, k, first,
                share, scale, low, high);
  });
}
