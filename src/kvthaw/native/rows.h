// Where rows lie: one lane of the host store, seen by one KV head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace kvthaw {

// Row (head, t): K begins ((head * extent + t % extent) * 2) * dim elements after base[t / extent], and V follows K. Addresses
// hold for one call only: the store may move an extent between calls.
class Rows {
public:
    Rows(const int64_t* base, int extent, int dim, Dtype dtype, int head)
        : base_(base), extent_(extent), stride_(2 * size_of(dtype) * dim), offset_(stride_ * head * extent), dim_(dim),
          dtype_(dtype) {
        if ((extent & (extent - 1)) == 0)
            for (shift_ = 0; (1 << shift_) < extent;) ++shift_;
    }

    const char* key(int position) const {
        const int number = shift_ >= 0 ? position >> shift_ : position / extent_;
        return reinterpret_cast<const char*>(base_[number]) + offset_ + stride_ * static_cast<size_t>(position - number * extent_);
    }
    // Bytes from a row to the next of the same extent.
    size_t stride() const { return stride_; }
    int extent() const { return extent_; }
    int dim() const { return dim_; }
    Dtype dtype() const { return dtype_; }

private:
    const int64_t* base_;
    int extent_, shift_ = -1;
    size_t stride_, offset_;
    int dim_;
    Dtype dtype_;
};

}  // namespace kvthaw
