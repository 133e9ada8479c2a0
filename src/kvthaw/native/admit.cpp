#include "admit.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace kvthaw {

namespace {

struct Pair {  // the tables of one (sequence, KV head), and what it wanted
    const int32_t* rows;
    int32_t *row_slot, *slot_row, *used, *slots, *fetch;
    bool* live;
    int wanted, missing;
};

void admit_one(Pair& p, int width, int places) {
    const int32_t step = ++p.used[places];
    int wanted = 0, missing = 0;
    for (int m = 0; m < width; ++m) {
        const int32_t slot = p.rows[m] < 0 ? -1 : p.row_slot[p.rows[m]];
        p.slots[m] = slot;
        if (slot >= 0) p.used[slot] = step;
        wanted += p.rows[m] >= 0;
        missing += p.rows[m] >= 0 && slot < 0;
    }
    p.wanted = wanted;
    p.missing = missing;
    // Those wanted longest ago go first, ties by slot; slots hit in this step come last. One integer holds both.
    std::vector<int64_t> order;
    if (missing > 0) {
        order.resize(places);
        for (int slot = 0; slot < places; ++slot) order[slot] = static_cast<int64_t>(p.used[slot]) << 32 | slot;
        if (missing < places) std::nth_element(order.begin(), order.begin() + missing, order.end());
        std::sort(order.begin(), order.begin() + std::min(missing, places));
    }
    int next = 0;
    for (int m = 0; m < width; ++m) {
        p.fetch[m] = -1;
        const int32_t row = p.rows[m];
        if (row < 0 || p.slots[m] >= 0) continue;
        const auto slot = static_cast<int32_t>(order[next++] & 0xffffffff);
        if (p.slot_row[slot] >= 0) p.row_slot[p.slot_row[slot]] = -1;
        p.slot_row[slot] = row;
        p.row_slot[row] = slot;
        p.used[slot] = step;
        p.slots[m] = slot;
        p.fetch[m] = row;
    }
    for (int slot = 0; slot < places; ++slot) p.live[slot] = p.used[slot] == step;
}

}  // namespace

void admit(size_t pairs, int width, int capacity, int places, const int32_t* rows, int32_t* row_slot, int32_t* slot_row,
           int32_t* used, int64_t* counts, int32_t* slots, int32_t* fetch, bool* live) {
    std::vector<Pair> all;
    for (size_t i = 0; i < pairs; ++i)
        all.push_back({rows + i * width, row_slot + i * (capacity + size_t{1}), slot_row + i * (places + size_t{1}),
                       used + i * (places + size_t{1}), slots + i * width, fetch + i * width, live + i * places, 0, 0});
    if (pairs * width < 512) {  // less work than handing it over; right after a search the threads are awake
        for (Pair& pair : all) admit_one(pair, width, places);
    } else {
        Pool::instance().run(pairs, 0, [&](size_t i) { admit_one(all[i], width, places); });
    }
    for (const Pair& pair : all) {
        counts[0] += pair.wanted;
        counts[1] += pair.missing;
        counts[2] = std::max<int64_t>(counts[2], pair.wanted);
    }
}

}  // namespace kvthaw
