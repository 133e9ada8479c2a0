// Giving selected rows slots of the pool, for indices that work on the host. kvthaw/kernels/admit.py is the definition.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvthaw {

// For each of `pairs` (sequence, KV head) pairs: rows [width], -1 skips, none twice; tables row_slot [capacity + 1], slot_row and used
// [places + 1], changed in place; used ends in the number of the last step, which is counted on. counts [3]: rows wanted and rows to
// bring are added to the first two, the third becomes the most that a pair wanted. Writes slots and fetch [width], and live
// [places], 1 where a slot holds a row of this step.
void admit(size_t pairs, int width, int capacity, int places, const int32_t* rows, int32_t* row_slot, int32_t* slot_row,
           int32_t* used, int64_t* counts, int32_t* slots, int32_t* fetch, bool* live);

}  // namespace kvthaw
