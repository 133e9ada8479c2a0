// Building a tree, and the pages of its nodes.
#include "tree.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvthaw {

namespace {

uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

}  // namespace

int Tree::draw_level(const Settings& settings, int head, int position) {
    const uint64_t x = splitmix64(splitmix64(splitmix64(splitmix64(settings.seed) ^ static_cast<uint64_t>(settings.layer)) ^
                                             static_cast<uint64_t>(head)) ^
                                  static_cast<uint64_t>(position));
    int level = 1;
    if (settings.in_order) {
        int64_t count = position + 1, every = static_cast<int64_t>(std::ceil(1 / settings.promote));
        for (; count % every == 0 && level < kMaxLevel; ++level) {
            count /= every;
            every = static_cast<int64_t>(std::ceil(1 / settings.promote_higher));
        }
        return level;
    }
    const double uniform = static_cast<double>(x >> 11) * 0x1p-53;
    for (double threshold = settings.promote; uniform < threshold && level < kMaxLevel; threshold *= settings.promote_higher)
        ++level;
    return level;
}

void Tree::resize(int points) {
    const size_t n = points, indices = settings_->indices();
    norm2_.resize(n);
    raw_.resize(n * indices);
    lift_.resize(n);
    projection_.resize(n * indices);
    level_.resize(n);
    parent_.resize(n, kRoot);
    page_.resize(n, -1);
    node_of_.resize(n, -1);
}

int Tree::measure_points(const Rows& rows, int begin, int end) {
    std::vector<float> key(settings_->dim);
    const int indices = settings_->indices();
    int bad = -1;
    for (int i = begin; i < end; ++i) {
        settings_->kernels->widen(rows.key(first_ + i), settings_->dim, rows.dtype(), key.data());
        settings_->kernels->measure(key.data(), settings_->dim, directions_, indices, settings_->dim + 1, &norm2_[i],
                                    &raw_[static_cast<size_t>(i) * indices]);
        if (bad < 0 && !std::isfinite(norm2_[i])) bad = i;
        level_[i] = static_cast<uint8_t>(draw_level(*settings_, settings_->first_head + head_, first_ + i));
    }
    return bad;
}

void Tree::place_in_space(int point) {
    const size_t indices = settings_->indices();
    const double lift = std::sqrt(std::max(0.0, radius2_ - norm2_[point]));
    lift_[point] = static_cast<float>(lift);
    for (size_t j = 0; j < indices; ++j)
        projection_[point * indices + j] =
            static_cast<float>(raw_[point * indices + j] + lift * directions_[j * (settings_->dim + 1) + settings_->dim]);
}

void Tree::lay_levels() {
    radius2_ = 0;
    for (auto& level : levels_) level.clear();
    for (int i = 0; i < size(); ++i) {
        radius2_ = std::max(radius2_, kRoom * norm2_[i]);
        levels_[level_[i]].push_back(i);
    }
    for (int i = 0; i < size(); ++i) place_in_space(i);
    nodes_.reserve(1 + parent_.size() - levels_[1].size());
    if (size()) fill_level(level_below(kMaxLevel + 1));
}

std::vector<std::array<int, 2>> Tree::level_pairs() const {
    std::vector<std::array<int, 2>> pairs;
    int above = 0;
    for (int level = kMaxLevel; level > 0; --level) {
        if (levels_[level].empty()) continue;
        if (above) pairs.push_back({level, above});
        above = level;
    }
    return pairs;
}

int Tree::lowest_nodes() const {
    for (int level = 2; level <= kMaxLevel; ++level)
        if (!levels_[level].empty()) return level;
    return 0;
}

int Tree::level_above(int level) const {
    for (++level; level <= kMaxLevel; ++level)
        if (!levels_[level].empty()) return level;
    return 0;
}

int Tree::level_below(int level) const {
    for (--level; level > 0; --level)
        if (!levels_[level].empty()) return level;
    return 0;
}

void Tree::number_nodes(int level) {
    std::vector<int32_t> points = levels_[level];
    std::sort(points.begin(), points.end(), [&](int a, int b) {
        const int x = node_of(parent_[a]), y = node_of(parent_[b]);
        return x < y || (x == y && (projection(a) < projection(b) || (projection(a) == projection(b) && a < b)));
    });
    for (int point : points) new_node(point);
}

int Tree::new_node(int point) {
    int node;
    if (free_nodes_.empty()) {
        node = static_cast<int>(nodes_.size());
        nodes_.resize(node + 1);
        if (settings_->digests()) {
            digests_.emplace_back();
            outliers_.resize(outliers_.size() + settings_->outliers, -1);
        }
    } else {
        node = free_nodes_.back();
        free_nodes_.pop_back();
        if (settings_->digests()) digests_[node] = Digest{};
    }
    node_at(node) = Node{};
    return node_of_[point] = node;
}

int Tree::new_page(int node) {
    int page;
    if (free_page_ids_.empty()) {
        page = static_cast<int>(pages_.size());
        pages_.resize(page + 1);
    } else {
        page = free_page_ids_.back();
        free_page_ids_.pop_back();
    }
    page_at(page) = {node, -1, 0};
    return page;
}

void Tree::free_pages(int node) {
    std::vector<int32_t> chain;
    for (int page = node_at(node).page; page >= 0; page = page_at(page).next) chain.push_back(page);
    for (int page : chain) page_at(page).node = -1;
    free_page_ids_.insert(free_page_ids_.end(), chain.rbegin(), chain.rend());
    node_at(node).page = -1;
    node_at(node).members = 0;
}

void Tree::members_of(int node, std::vector<int32_t>& out) const {
    out.clear();
    for (int page = node_at(node).page; page >= 0; page = page_at(page).next)
        out.insert(out.end(), slots(page), slots(page) + page_at(page).count);
}

void Tree::fill(int node, std::vector<int32_t>& members) {
    std::sort(members.begin(), members.end(), [&](int a, int b) {
        const float x = projection(a), y = projection(b);
        return x < y || (x == y && a < b);
    });
    free_pages(node);
    const int64_t n = static_cast<int64_t>(members.size()), size = settings_->page_size, count = (n + size - 1) / size;
    int previous = -1;
    for (int64_t b = 0; b < count; ++b) {
        const int page = new_page(node);
        (previous < 0 ? node_at(node).page : page_at(previous).next) = page;
        previous = page;
        for (int64_t m = b * n / count; m < (b + 1) * n / count; ++m) {
            const int slot = page_at(page).count++;
            slots(page)[slot] = members[m];
            line(page)[slot] = projection(members[m]);
            page_[members[m]] = page;
        }
    }
    node_at(node).members = static_cast<int32_t>(n);
}

void Tree::fill_level(int level) {
    if (level > 1 && level_below(level) == 0) number_nodes(level);  // no points at level 1: nodes without any
    // Members by node: a counting sort. The nodes are those that open_level() made last, side by side; or the root.
    int32_t low = INT32_MAX, high = 0;
    for (int i : levels_[level]) {
        low = std::min(low, node_of(parent_[i]));
        high = std::max(high, node_of(parent_[i]));
    }
    std::vector<int32_t> start(high - low + 2, 0), sorted(levels_[level].size()), members;
    for (int i : levels_[level]) ++start[node_of(parent_[i]) - low + 1];
    size_t pages = pages_.size();
    for (size_t node = 1; node < start.size(); ++node) pages += (start[node] + settings_->page_size - 1) / settings_->page_size;
    pages_.reserve(pages);
    for (size_t node = 0; node + 1 < start.size(); ++node) start[node + 1] += start[node];
    std::vector<int32_t> at(start.begin(), start.end() - 1);
    for (int i : levels_[level]) sorted[at[node_of(parent_[i]) - low]++] = i;
    for (int node = low; node <= high; ++node) {
        members.assign(sorted.begin() + start[node - low], sorted.begin() + start[node - low + 1]);
        fill(node, members);
    }
}

size_t Tree::nbytes() const {
    const auto bytes = [](const auto& v) { return v.capacity() * sizeof(v[0]); };
    size_t total = bytes(norm2_) + bytes(raw_) + bytes(lift_) + bytes(projection_) + bytes(level_) + bytes(parent_) + bytes(page_) +
                   bytes(node_of_) + bytes(free_nodes_) + bytes(free_page_ids_) + bytes(digests_) + bytes(outliers_) + nodes_.nbytes() +
                   pages_.nbytes();
    for (const auto& level : levels_) total += bytes(level);
    return total;
}

}  // namespace kvthaw
