// The trees of one layer: lanes x KV heads, in parallel. Trees are shared by lanes until one changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tree.h"

namespace kvthaw {

class Forest {
public:
    Forest(Settings settings, int lanes, int heads, int extent);
    Forest(const Forest& other);  // shares its trees

    // Index positions first .. first + points of a lane anew. bases: its extents.
    void build(int lane, int first, int points, const int64_t* bases, int threads);
    // Insert the next `points` positions of some lanes. bases: [lanes.size()][extents].
    void append(const std::vector<int>& lanes, int points, const int64_t* bases, int extents, int threads);
    // query: [batch][heads * group][dim] float32; rows: [batch][heads][budget]; counts: [batch][heads].
    void select(int batch, int group, const float* query, int budget, const int64_t* bases, int extents, int32_t* rows,
                int32_t* counts, int threads) const;
    void truncate(int lane, int length, const int64_t* bases);
    void reorder(const std::vector<int>& lanes);
    void grow(int lanes);  // at least so many lanes, the new ones without trees

    int lanes() const { return static_cast<int>(trees_.size()); }
    int heads() const { return heads_; }
    bool has(int lane) const { return lane < lanes() && trees_[lane][0] != nullptr; }
    Tree& tree(int lane, int head);  // its own, not shared
    const Tree& tree(int lane, int head) const;
    Tree empty_tree(int head, int first) const { return Tree(settings_, head, first); }
    Rows rows(const int64_t* bases, int head) const { return Rows(bases, extent_, settings_->dim, settings_->dtype, head); }
    // bases: [lanes][extents], where the rows lie now.
    std::string check(const int64_t* bases, int extents) const;
    size_t nbytes() const;
    uint64_t products() const { return products_.load(std::memory_order_relaxed); }  // of queries with keys, so far

private:
    [[noreturn]] void refuse(int head, int position) const;

    std::shared_ptr<const Settings> settings_;
    int heads_, extent_;
    std::vector<std::vector<std::shared_ptr<Tree>>> trees_;  // [lane][head]; null: nothing was ever built
    mutable std::atomic<uint64_t> products_{0};
    mutable std::shared_mutex mutex_;
};

}  // namespace kvthaw
