// Where rows lie: one sequence of the host store, seen by one KV head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace kvthaw {

// Row (head, t) begins (head * block_size + t % block_size) * stride() bytes after base[t / block_size], with K, then V; rows of f8
// with the scales of both before them. See kvthaw/kernels/row_format.py.
// Addresses hold for one call only: the store may move a block between calls.
class Rows {
public:
    Rows(const int64_t* base, int block_size, int dim, Dtype dtype, int head)
        : base_(base), block_size_(block_size),
          stride_(dtype == Dtype::f8 ? kScales + (2 * static_cast<size_t>(dim) + 7) / 8 * 8 : 2 * size_of(dtype) * dim),
          offset_(stride_ * head * block_size + (dtype == Dtype::f8 ? kScales : 0)), dim_(dim), dtype_(dtype) {
        if ((block_size & (block_size - 1)) == 0)
            for (shift_ = 0; (1 << shift_) < block_size;) ++shift_;
    }

    const char* key(int position) const {
        const int number = shift_ >= 0 ? position >> shift_ : position / block_size_;
        return reinterpret_cast<const char*>(base_[number]) + offset_ + stride_ * static_cast<size_t>(position - number * block_size_);
    }
    // Bytes from a row to the next of the same block.
    size_t stride() const { return stride_; }
    int block_size() const { return block_size_; }
    int dim() const { return dim_; }
    Dtype dtype() const { return dtype_; }

private:
    const int64_t* base_;
    int block_size_, shift_ = -1;
    size_t stride_, offset_;
    int dim_;
    Dtype dtype_;
};

}  // namespace kvthaw
