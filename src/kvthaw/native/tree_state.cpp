// The state of a tree: written, read again, checked.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tree.h"

namespace kvthaw {

std::vector<int32_t> Tree::page_of_node_order() const {
    std::vector<int32_t> order;
    for (int point = kRoot; point < size(); ++point) {
        if (point != kRoot && node_of_[point] < 0) continue;
        for (int page = node_at(node_of(point)).page; page >= 0; page = page_at(page).next) order.push_back(page);
    }
    return order;
}

void Tree::save(double* radius2, int32_t* page_node, int32_t* page_count, int32_t* members) const {
    *radius2 = radius2_;
    for (int page : page_of_node_order()) {
        *page_node++ = parent_[slots(page)[0]];
        *page_count++ = page_at(page).count;
        members = std::copy(slots(page), slots(page) + page_at(page).count, members);
    }
}

void Tree::save_points(double* norm2, float* raw, uint8_t* level, int32_t* parent) const {
    std::copy(norm2_.begin(), norm2_.end(), norm2);
    std::copy(raw_.begin(), raw_.end(), raw);
    std::copy(level_.begin(), level_.end(), level);
    std::copy(parent_.begin(), parent_.end(), parent);
}

std::string Tree::restore(int held, double radius2, int pages, const int32_t* page_node, const int32_t* page_count,
                          const int32_t* members) {
    const int n = size(), unknown = kRoot - 1;
    if (!std::isfinite(radius2) || std::any_of(norm2_.begin(), norm2_.end(), [&](double norm2) { return norm2 > radius2; }))
        return "its radius";
    radius2_ = radius2;
    for (int i = held; i < n; ++i) level_[i] = static_cast<uint8_t>(draw_level(*settings_, settings_->first_head + head_, first_ + i));
    for (int i = 0; i < n; ++i) {
        levels_[level_[i]].push_back(i);
        place_in_space(i);
        if (level_[i] > 1) new_node(i);
    }
    std::fill(parent_.begin(), parent_.end(), unknown);
    int placed = 0, last = -1;  // last: the page before
    for (int p = 0, before = unknown; p < pages; before = page_node[p++]) {
        const int of = page_node[p], count = page_count[p];
        if (of < std::max(kRoot, before) || of >= n || (of != kRoot && level_[of] < 2)) return "the node of a page";
        if (count < 1 || count > settings_->page_size || count > n - placed) return "the number of keys in a page";
        const int page = new_page(node_of(of));
        (of == before ? page_at(last).next : node_at(node_of(of)).page) = page;
        last = page;
        for (; page_at(page).count < count; ++placed) {
            const int i = members[placed], slot = page_at(page).count++;
            if (i < 0 || i >= n || parent_[i] != unknown) return "a key in no page, or in two";
            parent_[i] = of;
            page_[i] = page;
            slots(page)[slot] = i;
            line(page)[slot] = projection(i);
        }
        node_at(node_of(of)).members += count;
    }
    for (int i = 0; i < n; ++i) {
        const int above = level_above(level_[i]);
        if (parent_[i] == unknown) return "a key in no page, or in two";
        if (parent_[i] == kRoot ? above : level_[parent_[i]] != above) return "the level of a parent";
    }
    return "";
}

std::string Tree::check(const Rows& rows) const {
    std::vector<int> found(size(), 0);
    size_t chained = 0;
    for (int point = kRoot; point < size(); ++point) {
        if (point != kRoot && (node_of_[point] >= 0) != (level_[point] > 1)) return "a node at level 1, or none above it";
        if (point != kRoot && node_of_[point] < 0) continue;
        const int node = node_of(point);
        int members = 0;
        for (int page = node_at(node).page; page >= 0; page = page_at(page).next, ++chained) {
            if (page_at(page).node != node) return "a page of another node";
            if (page_at(page).count < 1 || page_at(page).count > settings_->page_size) return "a page's count";
            members += page_at(page).count;
            for (int s = 0; s < page_at(page).count; ++s) {
                const int i = slots(page)[s];
                if (i < 0 || i >= size()) return "a slot without a point";
                ++found[i];
                if (page_[i] != page) return "a point that does not know its page";
                if (parent_[i] != point) return "a point in the node of another parent";
                if (line(page)[s] != projection(i)) return "a slot's projection";
                if (lift_[i] != static_cast<float>(std::sqrt(std::max(0.0, radius2_ - norm2_[i])))) return "a lift";
            }
        }
        if (members != node_at(node).members) return "a node's count";
    }
    if (std::any_of(found.begin(), found.end(), [](int times) { return times != 1; })) return "a point in no page, or in two";
    if (chained + free_page_ids_.size() != pages_.size()) return "lost pages";
    size_t levelled = 0;
    for (int level = 1; level <= kMaxLevel; ++level) {
        levelled += levels_[level].size();
        for (int i : levels_[level])
            if (level_[i] != level) return "a point in another's level";
    }
    if (levelled != parent_.size()) return "a point at no level";
    if (!settings_->digests()) return "";
    Tree fresh(*this);
    const int pages = static_cast<int>(pages_.size());
    for (int page = 0; page < pages; ++page) std::memset(fresh.below(page), 0, settings_->page_size * (4 + settings_->row_bytes()));
    fresh.summarise(rows, &kRoot, 1);
    for (int level = 2; level <= kMaxLevel; ++level)
        fresh.summarise(rows, levels_[level].data(), static_cast<int>(levels_[level].size()));
    for (int i = 0; i < size(); ++i)
        if (const int node = node_of_[i]; node >= 0) {
            if (digests_[node].points != fresh.digests_[node].points) return "a digest's count";
            if (!std::equal(outliers(node), outliers(node) + settings_->outliers, fresh.outliers(node))) return "a digest's outliers";
            if (node_at(node).spread != fresh.node_at(node).spread) return "a digest's spread";
            const size_t bytes = settings_->digest_rows() * settings_->row_bytes();
            if (digests_[node].points && std::memcmp(digest_rows(node), fresh.digest_rows(node), bytes))
                return "a digest's codes or steps";
        }
    for (int page = 0; page < pages; ++page)
        if (const size_t count = page_at(page).node < 0 ? 0 : page_at(page).count;
            std::memcmp(below(page), fresh.below(page), 4 * count) ||
            std::memcmp(page_rows(page), fresh.page_rows(page), count * settings_->row_bytes()))
            return "a page's nodes or keys in 8 bits";
    return "";
}

}  // namespace kvthaw
