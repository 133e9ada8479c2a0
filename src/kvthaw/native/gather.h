// Gathering scattered rows for one copy to the device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvthaw {

// Copies each wanted row (K and V, row_bytes) of sequences x heads into `out`, one behind the other in order, and its flat index in
// rows [batch][heads][width] into `where`; -1 skips. Returns how many. bases: [batch][blocks].
size_t gather_rows(const int64_t* bases, int blocks, int block_size, size_t row_bytes, int batch, int heads, int width,
                   const int32_t* rows, char* out, int64_t* where, int threads);

}  // namespace kvthaw
