// Finding the parents of many points at once.
#include <algorithm>
#include <cmath>

#include "rank.h"
#include "tree.h"

namespace kvthaw {

std::vector<float> Tree::pack(const Rows& rows, int level) const {
    const int dim = settings_->dim, depth = dim + 1, width = settings_->kernels->panel;
    const int parents = static_cast<int>(levels_[level].size()), panels = (parents + width - 1) / width;
    std::vector<float> packed(static_cast<size_t>(panels) * width * depth), key(depth);
    for (int p = 0; p < panels * width; ++p) {
        const int point = levels_[level][std::min(p, parents - 1)];
        settings_->kernels->widen(rows.key(first_ + point), dim, rows.dtype(), key.data());
        key[dim] = lift_[point];
        float* at = packed.data() + static_cast<size_t>(p / width) * width * depth + p % width;
        for (int d = 0; d < depth; ++d) at[static_cast<size_t>(d) * width] = key[d];
    }
    return packed;
}

// In T_K's space the nearest parent has the largest inner product, the lift being one more dimension, so that a blocked product
// finds every parent exactly.
void Tree::adopt_nearest(const Rows& rows, const std::vector<float>& panels, int above, const int32_t* orphans, int count) {
    const int dim = settings_->dim, depth = dim + 1, group = settings_->kernels->group;
    const std::vector<int32_t>& parents = levels_[above];
    std::vector<float> keys(static_cast<size_t>(kNearestKeys) * depth);
    int32_t which[kNearestKeys];
    for (int begin = 0; begin < count; begin += kNearestKeys) {
        const int n = std::min(kNearestKeys, count - begin), padded = (n + group - 1) / group * group;
        for (int i = 0; i < n; ++i) {
            float* key = keys.data() + static_cast<size_t>(i) * depth;
            settings_->kernels->widen(rows.key(first_ + orphans[begin + i]), dim, rows.dtype(), key);
            key[dim] = lift_[orphans[begin + i]];
        }
        std::fill(keys.begin() + static_cast<size_t>(n) * depth, keys.begin() + static_cast<size_t>(padded) * depth, 0.0f);
        settings_->kernels->nearest(keys.data(), padded, panels.data(), static_cast<int>(parents.size()), depth, which);
        for (int i = 0; i < n; ++i) parent_[orphans[begin + i]] = parents[which[i]];
    }
}

Tree::Adoption Tree::open_level(const Rows& rows, int below, int above) {
    number_nodes(above);
    return {below, above, settings_->build.keep ? std::vector<float>() : pack(rows, above)};
}

void Tree::adopt(const Rows& rows, const Adoption& to, int begin, int count) {
    const int32_t* orphans = levels_[to.below].data() + begin;
    if (!settings_->build.keep) return adopt_nearest(rows, to.panels, to.above, orphans, count);
    adopt_by_descent(rows, to.above, orphans, count);
}

// What Tree::search finds for each key and Tree::nearest_at takes of it, but level by level for all keys, so that the keys at a node are
// multiplied with its members together.
void Tree::adopt_by_descent(const Rows& rows, int above, const int32_t* orphans, int count) {
    constexpr int kTogether = 32;
    static thread_local Descent kept;
    Descent& room = kept;
    const int dim = settings_->dim, keep = settings_->build.keep;
    const Kernels& kernels = *settings_->kernels;
    room.keys.resize(static_cast<size_t>(count) * dim);
    room.visits.clear();
    for (int key = 0; key < count; ++key) {
        kernels.widen(rows.key(first_ + orphans[key]), dim, rows.dtype(), &room.keys[static_cast<size_t>(key) * dim]);
        room.visits.push_back({0, key});
    }
    for (int level = kMaxLevel;; --level) {
        if (levels_[level].empty()) continue;
        room.best.assign(static_cast<size_t>(count) * keep, Descent::kNone);
        room.floor.assign(count, -HUGE_VALF);
        sort_by_node(room);
        collect_node(rows, room.visits[0].node, room.next);
        for (size_t begin = 0, end; begin < room.visits.size(); begin = end) {
            const int node = room.visits[begin].node;
            for (end = begin; end < room.visits.size() && room.visits[end].node == node;) ++end;
            std::swap(room.members, room.next);
            if (end < room.visits.size()) collect_node(rows, room.visits[end].node, room.next);  // whose rows come meanwhile
            const int members = static_cast<int>(room.members.size()), padded = (members + 3) / 4 * 4;
            room.panel.resize(static_cast<size_t>(padded) * dim);
            room.lifts.resize(members);
            for (int m = 0; m < members; ++m) {
                kernels.widen(rows.key(first_ + room.members[m]), dim, rows.dtype(), &room.panel[static_cast<size_t>(m) * dim]);
                room.lifts[m] = lift_[room.members[m]];
            }
            std::fill(room.panel.begin() + static_cast<size_t>(members) * dim, room.panel.end(), 0.0f);
            room.scores.resize(static_cast<size_t>(kTogether) * padded);
            room.retrieve = settings_->build.retrieved(members);
            if (room.retrieve < members) gather_projections(room);
            const float* lifts = room.lifts.data();
            for (size_t first = begin; first < end; first += kTogether) {
                const int together = static_cast<int>(std::min<size_t>(kTogether, end - first));
                const float* keys[kTogether];
                for (int k = 0; k < together; ++k) keys[k] = &room.keys[static_cast<size_t>(room.visits[first + k].key) * dim];
                kernels.products(keys, together, room.panel.data(), padded, dim, room.scores.data());
                for (int k = 0; k < together; ++k) {
                    const int key = room.visits[first + k].key, point = orphans[key];
                    const float* scores = room.scores.data() + static_cast<size_t>(k) * padded;
                    const float lift = lift_[point];
                    float floor = room.floor[key];
                    room.projections = &projection_[static_cast<size_t>(point) * settings_->indices()];
                    for (int m = 0; m < members; ++m) {
                        const float score = scores[m] + lift * lifts[m];
                        if (__builtin_expect(!(score < floor), 0)) floor = room.consider(*settings_, key, m, score);
                    }
                }
            }
        }
        if (level == above) break;
        room.visits.clear();
        for (int key = 0; key < count; ++key) {
            const size_t begin = room.visits.size();
            const uint64_t* best = &room.best[static_cast<size_t>(key) * keep];
            for (int b = 0; b < keep; ++b) {
                if (best[b] == Descent::kNone) continue;
                if (const int node = node_of_[id_of(best[b])]; node_at(node).members > 0) room.visits.push_back({node, key});
            }
            if (room.visits.size() > begin) continue;
            for (int point : levels_[level])  // the level below has points, but none here: descend from all
                if (const int node = node_of_[point]; node_at(node).members > 0) room.visits.push_back({node, key});
        }
    }
    for (int key = 0; key < count; ++key) {
        const auto best = room.best.begin() + static_cast<size_t>(key) * keep;
        parent_[orphans[key]] = id_of(*std::min_element(best, best + keep));
    }
}

// The members of a node, with their rows asked for.
void Tree::collect_node(const Rows& rows, int node, std::vector<int32_t>& members) const {
    members_of(node, members);
    const size_t bytes = size_of(rows.dtype()) * settings_->dim;
    for (int point : members)
        for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(rows.key(first_ + point) + b);
}

void Tree::gather_projections(Descent& room) const {
    room.ranked = nullptr;
    const size_t members = room.members.size(), indices = settings_->indices();
    room.axes.resize(indices * members);
    for (size_t m = 0; m < members; ++m)
        for (size_t j = 0; j < indices; ++j) room.axes[j * members + m] = projection_[room.members[m] * indices + j];
}

// Keeps a member if it is among the best of a key and P-DCI gives it a true distance. Returns the score below which no point is kept
// any more. Apart from the loop over members, which few points leave.
__attribute__((noinline)) float Tree::Descent::consider(const Settings& settings, int key, int member, float score) {
    const int keep = settings.build.keep;
    uint64_t* own = best.data() + static_cast<size_t>(key) * keep;
    const uint64_t rank = rank_key(score, members[member]);
    if (rank < own[0] && retrieves(settings, member)) {
        std::pop_heap(own, own + keep);
        own[keep - 1] = rank;
        std::push_heap(own, own + keep);
        if (own[0] != kNone) floor[key] = score_of(own[0]);
    }
    return floor[key];
}

// Whether a member is one of the `retrieve` nearest to a key in projection, of equals the earlier.
bool Tree::Descent::retrieves(const Settings& settings, int member) {
    const size_t count = members.size();
    if (retrieve >= static_cast<int>(count)) return true;
    if (ranked != projections) {
        ranked = projections;
        apart.assign(count, HUGE_VALF);
        bound.resize(count);
        for (int composite = 0; composite < settings.composites; ++composite) {
            std::fill(bound.begin(), bound.end(), 0.0f);
            for (int j = composite * settings.simples; j < (composite + 1) * settings.simples; ++j) {
                const float* axis = &axes[j * count];
                for (size_t m = 0; m < count; ++m) bound[m] = std::max(bound[m], std::fabs(axis[m] - projections[j]));
            }
            for (size_t m = 0; m < count; ++m) apart[m] = std::min(apart[m], bound[m]);
        }
    }
    int nearer = 0;
    for (size_t m = 0; m < count; ++m)
        nearer += (apart[m] < apart[member]) | ((apart[m] == apart[member]) & (members[m] < members[member]));
    return nearer < retrieve;
}

void Tree::sort_by_node(Descent& room) {
    int32_t low = INT32_MAX, high = 0;
    for (const Visit& visit : room.visits) {
        low = std::min(low, visit.node);
        high = std::max(high, visit.node);
    }
    room.start.assign(high - low + 2, 0);
    for (const Visit& visit : room.visits) ++room.start[visit.node - low + 1];
    for (size_t n = 1; n < room.start.size(); ++n) room.start[n] += room.start[n - 1];
    room.sorted.resize(room.visits.size());
    for (const Visit& visit : room.visits) room.sorted[room.start[visit.node - low]++] = visit;
    std::swap(room.visits, room.sorted);
}

}  // namespace kvthaw
