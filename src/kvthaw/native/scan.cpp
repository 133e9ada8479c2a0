#include "scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "pool.h"
#include "rank.h"
#include "rows.h"

namespace kvthaw {

size_t gather_rows(const int64_t* bases, int extents, int extent, size_t row_bytes, int batch, int heads, int width,
                   const int32_t* rows, char* out, int64_t* where, int threads) {
    std::vector<const char*> from;
    const size_t total = static_cast<size_t>(batch) * heads * width;
    from.reserve(total);
    for (size_t i = 0; i < total; ++i) {
        if (rows[i] < 0) continue;
        const size_t plane = i / width, lane = plane / heads, head = plane % heads;
        const int number = rows[i] / extent;
        where[from.size()] = static_cast<int64_t>(i);
        from.push_back(reinterpret_cast<const char*>(bases[lane * extents + number]) +
                       (head * extent + static_cast<size_t>(rows[i] - number * extent)) * row_bytes);
    }
    // Enough rows an item that waking a thread for it pays.
    constexpr size_t kRows = 64;
    Pool::instance().run((from.size() + kRows - 1) / kRows, threads, [&](size_t item) {
        const size_t begin = item * kRows, end = std::min(from.size(), begin + kRows);
        constexpr size_t kAhead = 6;
        const auto ask = [&](size_t i) {
            for (size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(from[i] + b);
        };
        for (size_t i = begin; i < std::min(end, begin + kAhead); ++i) ask(i);
        for (size_t i = begin; i < end; ++i) {
            if (i + kAhead < end) ask(i + kAhead);
            std::memcpy(out + i * row_bytes, from[i], row_bytes);
        }
    });
    return from.size();
}

namespace {

// The best k so far, and some that were not yet sorted out.
struct Best {
    std::vector<uint64_t> keys;
    float least = -HUGE_VALF;  // who scores less is not among the best k

    void offer(float score, int32_t position, size_t k) {
        keys.push_back(rank_key(score, position));
        if (keys.size() >= 4 * k + 64) cut(k);
    }
    void cut(size_t k) {
        if (keys.size() <= k) return;
        std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
        keys.resize(k);
        least = score_of(keys.back());
    }
};

}  // namespace

void flat_topk(const Kernels& kernels, const int64_t* bases, int extents, int extent, int dim, Dtype dtype, int batch, int heads,
               int group, const float* query, const int32_t* firsts, const int32_t* lengths, int k, int32_t* out, float* scores,
               int threads) {
    if (k == 0) return;
    constexpr int kItem = 4096, kBlock = 256;  // rows an item keeps one top k over; rows scored at once
    struct Item {
        int lane, head, begin, end;
    };
    std::vector<Item> items;
    std::vector<size_t> items_of(static_cast<size_t>(batch) * heads + 1, 0);
    for (int lane = 0; lane < batch; ++lane)
        for (int head = 0; head < heads; ++head) {
            for (int begin = firsts[lane]; begin < lengths[lane]; begin += kItem)
                items.push_back({lane, head, begin, std::min(lengths[lane], begin + kItem)});
            items_of[static_cast<size_t>(lane) * heads + head + 1] = items.size();
        }
    std::vector<Best> found(items.size() * group);
    Pool::instance().run(items.size(), threads, [&](size_t i) {
        const Item& item = items[i];
        const Rows rows(bases + static_cast<size_t>(item.lane) * extents, extent, dim, dtype, item.head);
        const float* own = query + (static_cast<size_t>(item.lane) * heads + item.head) * group * dim;
        std::vector<float> block(static_cast<size_t>(group) * kBlock);
        for (int at = item.begin, n; at < item.end; at += n) {
            n = std::min({kBlock, item.end - at, extent - at % extent});
            kernels.group_dots(own, group, rows.key(at), rows.stride(), n, dim, dtype, block.data(), kBlock);
            for (int g = 0; g < group; ++g) {
                Best& best = found[i * group + g];
                const float* scores_of = block.data() + static_cast<size_t>(g) * kBlock;
                for (int r = 0; r < n; ++r)
                    if (scores_of[r] >= best.least) best.offer(scores_of[r], at + r, k);
            }
        }
        for (int g = 0; g < group; ++g) found[i * group + g].cut(k);
    });
    Pool::instance().run(static_cast<size_t>(batch) * heads * group, threads, [&](size_t q) {
        const size_t plane = q / group, g = q % group;
        Best best;
        for (size_t i = items_of[plane]; i < items_of[plane + 1]; ++i) {
            const std::vector<uint64_t>& more = found[i * group + g].keys;
            best.keys.insert(best.keys.end(), more.begin(), more.end());
        }
        best.cut(k);
        std::sort(best.keys.begin(), best.keys.end());
        const int count = static_cast<int>(best.keys.size());
        for (int j = 0; j < k; ++j) {
            scores[q * k + j] = j < count ? score_of(best.keys[j]) : -HUGE_VALF;
            out[q * k + j] = j < count ? id_of(best.keys[j]) : -1;
        }
    });
}

}  // namespace kvthaw
