// The trees of one layer: sequences x KV heads, in parallel. Sequences share trees until one changes.
#pragma once

#include <array>
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
    Forest(Settings settings, int seqs, int heads, int block_size);
    Forest(const Forest& other);  // shares its trees

    // Index positions first .. first + points of a sequence from scratch. bases: the addresses of its blocks.
    void build(int seq, int first, int points, const int64_t* bases, int threads);
    // The same from what Tree::save wrote of each head, one after the other, but for all after the first `held` points; pages: of
    // each head how many. Throws std::invalid_argument, with the sequence as it was, for what was never saved.
    void restore(int seq, int first, int points, int held, const int64_t* bases, const double* radius2, const int32_t* pages,
                 const int32_t* page_node, const int32_t* page_count, const int32_t* members, int threads);
    // Insert the next `points` positions of some sequences. bases: [seqs.size()][blocks].
    void append(const std::vector<int>& seqs, int points, const int64_t* bases, int blocks, int threads);
    // query: [batch][heads * group][dim] float32; rows: [batch][heads][budget]; counts: [batch][heads].
    void select(int batch, int group, const float* query, int budget, const int64_t* bases, int blocks, int32_t* rows,
                int32_t* counts, int threads) const;
    void truncate(int seq, int length, const int64_t* bases);
    void reorder(const std::vector<int>& seqs);
    void share(int seq, const Forest& other, int its);  // the trees of another forest's sequence, until either changes
    void grow(int seqs);  // at least so many sequences, the new ones without trees

    int seqs() const { return static_cast<int>(trees_.size()); }
    int heads() const { return heads_; }
    bool has(int seq) const { return seq < seqs() && trees_[seq][0] != nullptr; }
    Tree& tree(int seq, int head);  // its own, not shared
    const Tree& tree(int seq, int head) const;
    Tree empty_tree(int head, int first) const { return Tree(settings_, head, first); }
    Rows rows(const int64_t* bases, int head) const { return Rows(bases, block_size_, settings_->dim, settings_->dtype, head); }
    // bases: [seqs][blocks], where the rows lie now.
    std::string check(const int64_t* bases, int blocks) const;
    size_t nbytes() const;
    uint64_t products() const { return products_.load(std::memory_order_relaxed); }  // of queries with keys, so far
    // What searches took so far: all their pieces, and the longest of each call.
    std::array<uint64_t, 2> search_ns() const { return {search_ns_.load(), longest_ns_.load()}; }

private:
    [[noreturn]] void refuse(int head, int position) const;
    // A tree a head, the first points of which are measured, all in no place yet.
    std::vector<std::shared_ptr<Tree>> measured(int first, int points, int held, const int64_t* bases, int threads) const;
    void summarise(const std::vector<std::shared_ptr<Tree>>& made, const int64_t* bases, int threads) const;

    std::shared_ptr<const Settings> settings_;
    int heads_, block_size_;
    std::vector<std::vector<std::shared_ptr<Tree>>> trees_;  // [seq][head]; null: nothing was ever built
    mutable std::atomic<uint64_t> products_{0}, search_ns_{0}, longest_ns_{0};
    mutable std::shared_mutex mutex_;
};

}  // namespace kvthaw
