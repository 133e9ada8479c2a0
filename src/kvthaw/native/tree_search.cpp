// Algorithm 4: from the root down, with prioritized DCI in every node.
#include <algorithm>
#include <cmath>

#include "rank.h"
#include "tree.h"

namespace kvthaw {

namespace {

int share_of(double share, int members) { return static_cast<int>(std::ceil(share * members)); }

}  // namespace

void Tree::collect(int node, const Probe& probe, Seen& seen) const {
    const int members = nodes_[node].members;
    const int limit = share_of(probe.effort.retrieve, members);
    if (limit < members && settings_->indices() > 1) return prioritized_dci(node, probe, limit, seen);
    // With one direction the members nearest in projection are a run of the node's order: cut it from the farther end.
    int low = 0, high = members;
    if (limit < members) {
        seen.lines.clear();
        seen.members.clear();
        for (int page = nodes_[node].page; page >= 0; page = pages_[page].next) {
            seen.lines.insert(seen.lines.end(), line(page), line(page) + pages_[page].count);
            seen.members.insert(seen.members.end(), slots(page), slots(page) + pages_[page].count);
        }
        const float at = probe.projections[0];
        while (high - low > limit) {
            const float left = std::fabs(seen.lines[low] - at), right = std::fabs(seen.lines[high - 1] - at);
            if (left > right || (left == right && seen.members[low] > seen.members[high - 1]))
                ++low;
            else
                --high;
        }
    }
    int start = 0;
    for (int page = nodes_[node].page; page >= 0; start += pages_[page].count, page = pages_[page].next) {
        const int begin = std::max(low - start, 0), end = std::min(high - start, static_cast<int>(pages_[page].count));
        if (begin >= end) continue;
        const int32_t at = static_cast<int32_t>(seen.points.size());
        seen.points.insert(seen.points.end(), slots(page) + begin, slots(page) + end);
        seen.spans.push_back({page, at, at + end - begin});
    }
}

void Tree::prioritized_dci(int node, const Probe& probe, int retrieve, Seen& seen) const {
    const int members = nodes_[node].members, simples = settings_->simples, composites = settings_->composites;
    std::vector<int32_t> points;
    members_of(node, points);
    std::vector<float> priority(members, HUGE_VALF);
    std::vector<int> order(members);
    for (int m = 0; m < members; ++m) {
        const float* own = &projection_[static_cast<size_t>(points[m]) * settings_->indices()];
        for (int composite = 0; composite < composites; ++composite) {
            float bound = 0;
            for (int i = composite * simples; i < (composite + 1) * simples; ++i)
                bound = std::max(bound, std::fabs(own[i] - probe.projections[i]));
            priority[m] = std::min(priority[m], bound);
        }
        order[m] = m;
    }
    std::nth_element(order.begin(), order.begin() + retrieve, order.end(), [&](int a, int b) {
        return priority[a] < priority[b] || (priority[a] == priority[b] && points[a] < points[b]);
    });
    std::vector<uint8_t> chosen(members, 0);
    for (int m = 0; m < retrieve; ++m) chosen[order[m]] = 1;
    for (int page = nodes_[node].page, m = 0; page >= 0; page = pages_[page].next) {
        const int32_t at = static_cast<int32_t>(seen.points.size());
        for (int s = 0; s < pages_[page].count; ++s, ++m)
            if (chosen[m]) seen.points.push_back(points[m]);
        if (static_cast<size_t>(at) < seen.points.size()) seen.spans.push_back({page, at, static_cast<int32_t>(seen.points.size())});
    }
}

void Tree::search(const Rows& rows, const Probe& probe, int stop, Seen& seen) const {
    seen.frontier.assign(1, 0);
    for (int level = kMaxLevel; level >= stop; --level) {
        if (levels_[level].empty()) continue;
        const size_t begin = seen.last = seen.points.size();
        // Nodes, then their pages, then rows lie anywhere: ask for all of one kind before the first is needed.
        for (int node : seen.frontier) __builtin_prefetch(&nodes_[node]);
        for (int node : seen.frontier)
            if (const int page = nodes_[node].page; page >= 0) {
                __builtin_prefetch(&pages_[page]);
                __builtin_prefetch(slots(page));
                __builtin_prefetch(slots(page) + settings_->page_size);  // a node's pages mostly follow each other
            }
        for (int node : seen.frontier) collect(node, probe, seen);

        const size_t found = seen.points.size() - begin;
        seen.rows.resize(found);
        for (size_t s = 0; s < found; ++s) seen.rows[s] = rows.key(first_ + seen.points[begin + s]);
        seen.scores.resize(seen.points.size());
        settings_->kernels->dots(probe.key, seen.rows.data(), found, rows.dim(), rows.dtype(), seen.scores.data() + begin);
        if (probe.lift != 0)
            for (size_t s = begin; s < seen.points.size(); ++s) seen.scores[s] += probe.lift * lift_[seen.points[s]];

        if (level == 1) break;
        seen.frontier.clear();
        const size_t beam = probe.effort.beam;
        bool children = false;
        const auto descend = [&](int point) {
            seen.frontier.push_back(node_of_[point]);
            children |= nodes_[node_of_[point]].members > 0;
        };
        if (found <= beam) {
            for (size_t s = begin; s < seen.points.size(); ++s) descend(seen.points[s]);
        } else {
            if (probe.reach >= 0)
                weigh(probe, begin, seen);
            else
                seen.merits.assign(seen.scores.begin() + begin, seen.scores.end());
            seen.order.clear();
            for (size_t s = 0; s < found; ++s) seen.order.push_back(rank_key(seen.merits[s], seen.points[begin + s]));
            std::nth_element(seen.order.begin(), seen.order.begin() + beam, seen.order.end());
            for (size_t s = 0; s < beam; ++s) descend(id_of(seen.order[s]));
        }
        if (!children) {  // the level below has points, but none here: descend from all
            seen.frontier.clear();
            for (int point : levels_[level]) descend(point);
        }
    }
}

void Tree::search_query(const Rows& rows, const float* query, int budget, Seen& seen) const {
    const Settings& set = *settings_;
    double norm2;
    std::vector<float> projections(set.indices());
    set.kernels->measure(query, set.dim, directions_, set.indices(), set.dim + 1, &norm2, projections.data());
    const float scale = norm2 > 0 ? static_cast<float>(std::sqrt(radius2_ / norm2)) : 0.0f;
    for (float& x : projections) x *= scale;
    const float reach = set.digests() ? set.spread * static_cast<float>(std::sqrt(norm2)) : -1.0f;
    Probe probe{query, 0.0f, projections.data(), set.query, reach};
    const int64_t pages = (2 * static_cast<int64_t>(budget) + set.page_size - 1) / set.page_size;
    probe.effort.beam = static_cast<int>(std::max<int64_t>({set.query.beam, share_of(set.query_beam_share, size()), pages}));
    seen.clear();
    search(rows, probe, 1, seen);
    if (set.merge == Merge::join) seen.lse = set.kernels->log_sum_exp(seen.scores.data(), seen.scores.size(), set.scale);
    if (set.unit == Unit::token) {
        const size_t keep = std::min<size_t>(budget, seen.points.size());
        seen.best.clear();
        for (size_t s = 0; s < seen.points.size(); ++s) seen.best.push_back(rank_key(seen.scores[s], seen.points[s]));
        if (keep < seen.best.size()) std::nth_element(seen.best.begin(), seen.best.begin() + keep, seen.best.end());
        seen.best.resize(keep);
        std::sort(seen.best.begin(), seen.best.end());
    }
}

}  // namespace kvthaw
