// The arithmetic that is worth an instruction set: chosen once, at run time, as a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvthaw {

// What rows are stored as; all arithmetic is in float32, but for i8: codes that encode() made, with their step behind them. f8: e4m3
// codes; the float kScales bytes before those of a key is their scale.
enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, f64 = 4, f8 = 5 };
enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, neon = 3 };

constexpr size_t kScales = 8;

constexpr size_t size_of(Dtype dtype) {
    return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 || dtype == Dtype::f8 ? 1 : 2;
}

// Bytes of an i8 row: codes to a whole number of floats, then the step.
constexpr size_t coded_bytes(int dim) { return (static_cast<size_t>(dim) + 3) / 4 * 4 + 4; }

constexpr int kTogether = 4;  // queries that dots_together() multiplies at once

// i8 rows side by side, and which queries want their products: a bit a query.
struct RowBlock {
    const char* rows;
    int32_t count;
    uint32_t queries;
};

struct Kernels {
    Isa isa;
    int panel;  // parents side by side in a packed panel of `nearest`
    int group;  // `nearest` wants a multiple of this many keys
    // out[dim]: a stored row as float32.
    void (*widen)(const void* row, int dim, Dtype dtype, float* out);
    // sum[dim] += weight * a stored row.
    void (*add)(const void* row, int dim, Dtype dtype, double weight, double* sum);
    // out[coded_bytes(dim)]: whole numbers from -127 to 127, the nearest to from / step, and the step, max |from| / 127.
    void (*encode)(const float* from, int dim, void* out);
    // |key|^2 in double, and the inner products with `count` directions that lie `stride` floats apart.
    void (*measure)(const float* key, int dim, const float* directions, int count, int stride, double* norm2, float* raw);
    // out[count]: query . row for rows scattered in memory, not i8. Each value is the same whatever its neighbours are.
    void (*dots)(const float* query, const void* const* rows, size_t count, int dim, Dtype dtype, float* out);
    // out[q][...]: of each of `count` queries, one after the other, its products with the rows that it wants. A query is rounded to
    // one of 65,535 multiples of its largest number (fewer above 512 dimensions), products are summed as whole numbers, and every
    // instruction set gives the same bits.
    void (*dots_together)(const float* const* queries, int count, const RowBlock* blocks, size_t many, int dim, float* const* out);
    // out[count][rows]: the numbers of dots(), of `count` keys [dim] each, for rows [rows][dim] side by side. rows: a multiple of 4.
    void (*products)(const float* const* keys, int count, const float* panel, int rows, int dim, float* out);
    // The natural logarithm of the sum of exp(scale x) over count > 0 finite numbers, scale > 0.
    float (*log_sum_exp)(const float* x, size_t count, float scale);
    // For `count` keys [count][depth] the parent with the largest inner product, the first of equals. panels: ceil(parents /
    // panel) panels [depth][panel]; the last is filled up with copies of the last parent. count: a multiple of group, at most
    // kNearestKeys.
    void (*nearest)(const float* keys, int count, const float* panels, int parents, int depth, int32_t* which);
};

constexpr int kNearestKeys = 96;

// The table of an instruction set, or null where this build or this machine has none.
const Kernels* find_kernels(Isa isa);
// The best table of this machine.
const Kernels* best_kernels();

}  // namespace kvthaw
