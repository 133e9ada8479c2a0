#include "gather.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "pool.h"

namespace kvthaw {

size_t gather_rows(const int64_t* bases, int blocks, int block_size, size_t row_bytes, int batch, int heads, int width,
                   const int32_t* rows, char* out, int64_t* where, int threads) {
    std::vector<const char*> from;
    const size_t total = static_cast<size_t>(batch) * heads * width;
    from.reserve(total);
    for (size_t i = 0; i < total; ++i) {
        if (rows[i] < 0) continue;
        const size_t plane = i / width, seq = plane / heads, head = plane % heads;
        const int number = rows[i] / block_size;
        where[from.size()] = static_cast<int64_t>(i);
        from.push_back(reinterpret_cast<const char*>(bases[seq * blocks + number]) +
                       (head * block_size + static_cast<size_t>(rows[i] - number * block_size)) * row_bytes);
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

}  // namespace kvthaw
