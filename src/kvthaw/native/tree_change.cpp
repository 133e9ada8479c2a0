// Inserting into a tree and removing from its end.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tree.h"

namespace kvthaw {

void Tree::append(const Rows& rows, int count, const double* norm2, const float* raw) {
    const int begin = size(), indices = settings_->indices();
    resize(begin + count);
    std::copy(norm2, norm2 + count, norm2_.begin() + begin);
    std::copy(raw, raw + static_cast<size_t>(count) * indices, raw_.begin() + static_cast<size_t>(begin) * indices);
    Seen seen;
    std::vector<int32_t> changed;
    const double radius2 = radius2_;
    for (int i = begin; i < begin + count; ++i) insert(rows, i, seen, changed);
    refresh(rows, changed);  // inserting reads none of this, so that once for all will do
    if (radius2_ != radius2 && settings_->digests())
        for (int node = 0; node < static_cast<int>(nodes_.size()); ++node) encode_pages(rows, node);
}

void Tree::insert(const Rows& rows, int point, Seen& seen, std::vector<int32_t>& changed) {
    const int dim = settings_->dim;
    const Kernels& kernels = *settings_->kernels;
    const int level = draw_level(*settings_, settings_->first_head + head_, first_ + point);
    const int above = level_above(level), below = level_below(level);
    const bool lonely = levels_[level].empty();
    if (norm2_[point] > radius2_) {
        radius2_ = kRoom * norm2_[point];
        grow_radius();  // of the points that stand in the tree
    }
    place_in_space(point);
    level_[point] = static_cast<uint8_t>(level);

    std::vector<float> key(dim);
    kernels.widen(rows.key(first_ + point), dim, rows.dtype(), key.data());
    const Probe probe{key.data(), lift_[point], &projection_[static_cast<size_t>(point) * settings_->indices()], settings_->insert};
    int parent = kRoot;
    if (above) {
        seen.clear();
        search(rows, probe, above, seen);
        parent = nearest_at(seen);
    }
    std::vector<int32_t> moved;
    if (below && lonely) {  // a level of its own: it becomes the parent of all below
        moved = levels_[below];
    } else if (below) {
        seen.clear();
        search(rows, probe, below, seen);
        std::vector<float> held(dim), other(dim);
        int holder = kRoot;
        for (size_t s = seen.last; s < seen.points.size(); ++s) {
            const int child = seen.points[s];
            if (holder != parent_[child]) {  // a node's members come one after the other
                holder = parent_[child];
                kernels.widen(rows.key(first_ + holder), dim, rows.dtype(), held.data());
            }
            const void* row = rows.key(first_ + child);
            float near;
            kernels.dots(held.data(), &row, 1, dim, rows.dtype(), &near);
            if (seen.scores[s] > near + lift_[holder] * lift_[child]) moved.push_back(child);
        }
    }
    levels_[level].push_back(point);
    parent_[point] = parent;
    if (level > 1) new_node(point);
    changed.push_back(parent);
    for (int i : moved) changed.push_back(parent_[i]);
    if (level > 1) changed.push_back(point);
    move(moved, point);
    place(point);
}

void Tree::grow_radius() {
    std::vector<int32_t> members;
    for (const auto& level : levels_)
        for (int i : level) place_in_space(i);
    for (size_t node = 0; node < nodes_.size(); ++node) {
        members_of(static_cast<int>(node), members);
        if (!members.empty()) fill(static_cast<int>(node), members);
    }
}

void Tree::move(const std::vector<int32_t>& points, int to) {
    if (points.empty()) return;
    std::vector<int32_t> losing, members, staying;
    for (int i : points) losing.push_back(node_of(parent_[i]));
    std::sort(losing.begin(), losing.end());
    losing.erase(std::unique(losing.begin(), losing.end()), losing.end());
    for (int i : points) parent_[i] = to;
    for (int node : losing) {
        members_of(node, members);
        staying.clear();
        for (int i : members)
            if (parent_[i] != to) staying.push_back(i);
        fill(node, staying);
    }
    members = points;
    fill(node_of(to), members);
}

void Tree::place(int point) {
    const int node = node_of(parent_[point]), size = settings_->page_size;
    const float at = projection(point);
    const auto before = [&](float x, int other) { return x < at || (x == at && other < point); };
    ++node_at(node).members;
    int page = node_at(node).page;
    if (page < 0) {
        page = new_page(node);
        node_at(node).page = page;
    }
    while (page_at(page).next >= 0 && before(line(page)[page_at(page).count - 1], slots(page)[page_at(page).count - 1]))
        page = page_at(page).next;
    int count = page_at(page).count, slot = 0;
    while (slot < count && before(line(page)[slot], slots(page)[slot])) ++slot;
    if (count == size) {  // with the new point the page has one too many: its halves become two pages
        const int half = (size + 2) / 2, kept = slot < half ? half - 1 : half, right = new_page(node);
        page_at(right).next = page_at(page).next;
        page_at(page).next = right;
        for (int s = kept; s < size; ++s) {
            slots(right)[s - kept] = slots(page)[s];
            line(right)[s - kept] = line(page)[s];
            page_[slots(page)[s]] = right;
        }
        page_at(right).count = size - kept;
        page_at(page).count = kept;
        if (slot >= half) {
            slot -= kept;
            page = right;
        }
        count = page_at(page).count;
    }
    for (int s = count; s > slot; --s) {
        slots(page)[s] = slots(page)[s - 1];
        line(page)[s] = line(page)[s - 1];
    }
    slots(page)[slot] = point;
    line(page)[slot] = at;
    page_at(page).count = count + 1;
    page_[point] = page;
}

void Tree::truncate(const Rows& rows, int length) {
    const int keep = std::max(0, length - first_), n = size();
    if (keep >= n) return;
    if (keep == 0) {
        *this = Tree(settings_, head_, first_);
        return;
    }
    for (auto& level : levels_) level.erase(std::lower_bound(level.begin(), level.end(), keep), level.end());
    // Nodes whose members change: those that lose some, and those that adopt.
    std::vector<uint8_t> touched(nodes_.size(), 0);
    std::vector<int32_t> changed;
    for (int i = keep; i < n; ++i)
        if (parent_[i] < keep) {
            touched[node_of(parent_[i])] = 1;
            changed.push_back(parent_[i]);
        }
    std::vector<int32_t> orphans;
    for (int level = kMaxLevel; level > 0; --level) {
        orphans.clear();
        for (int i : levels_[level])
            if (parent_[i] >= keep) orphans.push_back(i);
        if (orphans.empty()) continue;
        if (const int above = level_above(level))
            adopt_nearest(rows, pack(rows, above), above, orphans.data(), static_cast<int>(orphans.size()));
        else
            for (int i : orphans) parent_[i] = kRoot;
        for (int i : orphans) {
            touched[node_of(parent_[i])] = 1;
            changed.push_back(parent_[i]);
        }
    }
    for (int i = keep; i < n; ++i)
        if (node_of_[i] >= 0) {
            free_pages(node_of_[i]);
            free_nodes_.push_back(node_of_[i]);
        }
    std::vector<std::vector<int32_t>> members(nodes_.size());
    for (int i = 0; i < keep; ++i)
        if (const int node = node_of(parent_[i]); touched[node]) members[node].push_back(i);
    resize(keep);
    for (size_t node = 0; node < nodes_.size(); ++node)
        if (touched[node]) fill(static_cast<int>(node), members[node]);
    refresh(rows, changed);
}

}  // namespace kvthaw
