#include "admit.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace kvthaw {

void admit(size_t pairs, int width, int capacity, int places, int32_t step, const int32_t* rows, int32_t* row_slot,
           int32_t* slot_row, int32_t* used, int32_t* slots, int32_t* fetch, bool* live) {
    std::vector<int32_t> order(places);
    for (size_t pair = 0; pair < pairs; ++pair) {
        int missing = 0;
        for (int m = 0; m < width; ++m) {
            const int32_t slot = rows[m] < 0 ? -1 : row_slot[rows[m]];
            slots[m] = slot;
            if (slot >= 0) used[slot] = step;
            missing += rows[m] >= 0 && slot < 0;
        }
        if (missing > 0) {  // those wanted longest ago go first, ties by slot; slots hit in this step come last
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + std::min(missing, places), order.end(), [&](int32_t a, int32_t b) {
                return used[a] != used[b] ? used[a] < used[b] : a < b;
            });
        }
        int next = 0;
        for (int m = 0; m < width; ++m) {
            fetch[m] = -1;
            if (rows[m] < 0 || slots[m] >= 0) continue;
            const int32_t slot = order[next++];
            if (slot_row[slot] >= 0) row_slot[slot_row[slot]] = -1;
            slot_row[slot] = rows[m];
            row_slot[rows[m]] = slot;
            used[slot] = step;
            slots[m] = slot;
            fetch[m] = rows[m];
        }
        for (int slot = 0; slot < places; ++slot) live[slot] = used[slot] == step;
        rows += width, slots += width, fetch += width, live += places;
        row_slot += capacity + 1, slot_row += places + 1, used += places + 1;
    }
}

}  // namespace kvthaw
