// Work on rows that needs no tree: gathering them for one copy to the device, and the flat scan that a tree must beat.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace kvthaw {

// Copies each wanted row (K and V, row_bytes) of lanes x heads into `out`, one behind the other in order, and its flat index in
// rows [batch][heads][width] into `where`; -1 skips. Returns how many. bases: [batch][extents].
size_t gather_rows(const int64_t* bases, int extents, int extent, size_t row_bytes, int batch, int heads, int width,
                   const int32_t* rows, char* out, int64_t* where, int threads);

// The exact top k of positions [first, length) for each query head: query [batch][heads * group][dim] float32, out and scores
// [batch][heads * group][k], the best first, -1 and -inf where there are fewer than k.
void flat_topk(const Kernels& kernels, const int64_t* bases, int extents, int extent, int dim, Dtype dtype, int batch, int heads,
               int group, const float* query, const int32_t* firsts, const int32_t* lengths, int k, int32_t* out, float* scores,
               int threads);

}  // namespace kvthaw
