// Algorithm 4: from the root down, with prioritized DCI in every node.
#include <algorithm>
#include <cmath>

#include "rank.h"
#include "tree.h"

namespace kvthaw {

void Tree::collect(int node, const Probe& probe, Seen& seen) const {
    const int members = node_at(node).members;
    const int limit = probe.effort.retrieved(members);
    if (limit < members && settings_->indices() > 1) return prioritized_dci(node, probe, limit, seen);
    // With one direction the members nearest in projection are a run of the node's order: cut it from the farther end.
    int low = 0, high = members;
    if (limit < members) {
        seen.lines.clear();
        seen.members.clear();
        for (int page = node_at(node).page; page >= 0; page = page_at(page).next) {
            seen.lines.insert(seen.lines.end(), line(page), line(page) + page_at(page).count);
            seen.members.insert(seen.members.end(), slots(page), slots(page) + page_at(page).count);
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
    for (int page = node_at(node).page; page >= 0; start += page_at(page).count, page = page_at(page).next) {
        const int begin = std::max(low - start, 0), end = std::min(high - start, static_cast<int>(page_at(page).count));
        if (begin >= end) continue;
        const int32_t at = static_cast<int32_t>(seen.points.size());
        seen.points.insert(seen.points.end(), slots(page) + begin, slots(page) + end);
        seen.spans.push_back({page, at, at + end - begin});
    }
}

void Tree::prioritized_dci(int node, const Probe& probe, int retrieve, Seen& seen) const {
    const int simples = settings_->simples, composites = settings_->composites;
    members_of(node, seen.members);
    seen.order.clear();
    for (int point : seen.members) {
        const float* own = &projection_[static_cast<size_t>(point) * settings_->indices()];
        float priority = HUGE_VALF;
        for (int composite = 0; composite < composites; ++composite) {
            float bound = 0;
            for (int i = composite * simples; i < (composite + 1) * simples; ++i)
                bound = std::max(bound, std::fabs(own[i] - probe.projections[i]));
            priority = std::min(priority, bound);
        }
        seen.order.push_back(rank_key(-priority, point));
    }
    std::vector<uint64_t>& best = seen.ranked;
    best.assign(seen.order.begin(), seen.order.end());
    std::nth_element(best.begin(), best.begin() + retrieve - 1, best.end());
    const uint64_t last = best[retrieve - 1];
    size_t m = 0;
    for (int page = node_at(node).page; page >= 0; page = page_at(page).next) {
        const int32_t at = static_cast<int32_t>(seen.points.size());
        for (int s = 0; s < page_at(page).count; ++s, ++m)
            if (seen.order[m] <= last) seen.points.push_back(seen.members[m]);
        if (static_cast<size_t>(at) < seen.points.size()) seen.spans.push_back({page, at, static_cast<int32_t>(seen.points.size())});
    }
}

// True distances of the points from `begin` on.
void Tree::score(const Rows& rows, const Probe& probe, size_t begin, Seen& seen) const {
    const size_t found = seen.points.size() - begin;
    seen.rows.resize(found);
    seen.scores.resize(seen.points.size());
    for (size_t s = 0; s < found; ++s) seen.rows[s] = rows.key(first_ + seen.points[begin + s]);
    settings_->kernels->dots(probe.key, seen.rows.data(), found, rows.dim(), rows.dtype(), seen.scores.data() + begin);
    if (probe.lift != 0)
        for (size_t s = begin; s < seen.points.size(); ++s) seen.scores[s] += probe.lift * lift_[seen.points[s]];
}

void Tree::ask_pages(int node) const {
    const int count = (node_at(node).members + settings_->page_size - 1) / settings_->page_size;
    for (int p = 0; p < count; ++p) {  // a node's pages mostly follow each other
        const char* header = pages_.at(node_at(node).page) + p * page_bytes(*settings_);
        for (size_t b = 0; b < sizeof(Page) + 8 * static_cast<size_t>(settings_->page_size); b += 64) __builtin_prefetch(header + b);
    }
}

void Tree::search(const Rows& rows, const Probe& probe, int stop, Seen& seen) const {
    seen.frontier.assign(1, 0);
    for (int level = kMaxLevel; level >= stop; --level) {
        if (levels_[level].empty()) continue;
        const size_t begin = seen.last = seen.points.size();
        // Nodes, then their pages, then rows lie anywhere: ask for all of one kind before the first is needed.
        for (int node : seen.frontier) __builtin_prefetch(&node_at(node));
        for (int node : seen.frontier) ask_pages(node);
        seen.nodes.clear();
        for (int node : seen.frontier) {
            collect(node, probe, seen);
            seen.nodes.push_back(seen.points.size());
        }

        score(rows, probe, begin, seen);

        const bool strict = settings_->strict && probe.each;
        if (level <= stop && !strict) break;
        seen.frontier.clear();
        bool children = false;
        const auto descend = [&](int point) {
            if (level <= stop) return;
            const int node = node_of_[point];
            seen.frontier.push_back(node);
            children |= node_at(node).members > 0;
        };
        if (!probe.each) seen.nodes.assign(1, seen.points.size());
        size_t from = begin;
        for (size_t to : seen.nodes) {  // the best of each
            const size_t keep = probe.effort.keep;
            if (to - from <= keep) {
                for (size_t s = from; s < to; ++s) descend(seen.points[s]);
            } else {
                seen.order.clear();
                for (size_t s = from; s < to; ++s) seen.order.push_back(rank_key(seen.scores[s], seen.points[s]));
                seen.ranked = seen.order;
                std::nth_element(seen.ranked.begin(), seen.ranked.begin() + keep - 1, seen.ranked.end());
                const uint64_t last = seen.ranked[keep - 1];
                for (size_t s = from; s < to; ++s) {
                    if (seen.order[s - from] <= last)
                        descend(seen.points[s]);
                    else if (strict)
                        seen.scores[s] = -HUGE_VALF;  // rank_spans() leaves it out
                }
            }
            from = to;
        }
        if (level <= stop) break;
        if (!children) {  // the level below has points, but none here: descend from all
            seen.frontier.clear();
            for (int point : levels_[level]) descend(point);
        }
    }
}

int Tree::nearest_at(const Seen& seen) const {
    size_t best = seen.last;
    for (size_t s = seen.last + 1; s < seen.points.size(); ++s)
        if (seen.scores[s] > seen.scores[best] || (seen.scores[s] == seen.scores[best] && seen.points[s] < seen.points[best])) best = s;
    return seen.points[best];
}

}  // namespace kvthaw
