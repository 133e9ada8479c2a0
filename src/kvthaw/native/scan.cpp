#include "scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "pool.h"
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

using Hit = std::pair<float, int32_t>;
// A heap by this has the worst on top: the lowest score, of equals the latest position.
bool better(const Hit& a, const Hit& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); }

void offer(std::vector<Hit>& best, size_t k, Hit hit) {
    if (best.size() < k) {
        best.push_back(hit);
        std::push_heap(best.begin(), best.end(), better);
    } else if (better(hit, best.front())) {
        std::pop_heap(best.begin(), best.end(), better);
        best.back() = hit;
        std::push_heap(best.begin(), best.end(), better);
    }
}

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
    std::vector<std::vector<Hit>> found(items.size() * group);
    Pool::instance().run(items.size(), threads, [&](size_t i) {
        const Item& item = items[i];
        const Rows rows(bases + static_cast<size_t>(item.lane) * extents, extent, dim, dtype, item.head);
        const float* own = query + (static_cast<size_t>(item.lane) * heads + item.head) * group * dim;
        std::vector<float> block(static_cast<size_t>(group) * kBlock);
        for (int at = item.begin, n; at < item.end; at += n) {
            n = std::min({kBlock, item.end - at, extent - at % extent});
            kernels.group_dots(own, group, rows.key(at), rows.stride(), n, dim, dtype, block.data(), kBlock);
            for (int g = 0; g < group; ++g) {
                std::vector<Hit>& best = found[i * group + g];
                for (int r = 0; r < n; ++r) {
                    const float score = block[static_cast<size_t>(g) * kBlock + r];
                    if (best.size() < static_cast<size_t>(k) || score > best.front().first) offer(best, k, {score, at + r});
                }
            }
        }
    });
    Pool::instance().run(static_cast<size_t>(batch) * heads * group, threads, [&](size_t q) {
        const size_t plane = q / group, g = q % group;
        std::vector<Hit> best;
        for (size_t i = items_of[plane]; i < items_of[plane + 1]; ++i)
            for (const Hit& hit : found[i * group + g]) offer(best, k, hit);
        std::sort(best.begin(), best.end(), better);
        best.resize(k, {-HUGE_VALF, -1});
        for (int j = 0; j < k; ++j) {
            scores[q * k + j] = best[j].first;
            out[q * k + j] = best[j].second;
        }
    });
}

}  // namespace kvthaw
