// Giving selected rows slots of the pool, for indices that work on the host. kvthaw/kernels/admit.py is the definition.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvthaw {

// For each of `pairs` (lane, KV head) pairs: rows [width], -1 skips, none twice; tables row_slot [capacity + 1], slot_row and used
// [places + 1], changed in place. Writes slots and fetch [width], and live [places], 1 where a slot holds a row of this step.
void admit(size_t pairs, int width, int capacity, int places, int32_t step, const int32_t* rows, int32_t* row_slot,
           int32_t* slot_row, int32_t* used, int32_t* slots, int32_t* fetch, bool* live);

}  // namespace kvthaw
