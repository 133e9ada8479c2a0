// A node's digest: the mean and the spread of all keys below it, and its outliers, the points that these two describe worst.
#include <algorithm>
#include <cmath>

#include "tree.h"

namespace kvthaw {

// Two points lie equally far from their mean, whatever rounding says.
constexpr float kTie = 1e-4f;

void Tree::summarise(const Rows& rows, const int32_t* points, int count) {
    if (!settings_->digests()) return;
    const int dim = settings_->dim, most = settings_->outliers;
    const Kernels& kernels = *settings_->kernels;
    std::vector<double> sum(dim);
    std::vector<float> centre(dim), apart, dots;
    std::vector<int32_t> members, candidates;
    std::vector<const void*> at;
    for (int p = 0; p < count; ++p) {
        const int node = node_of_[points[p]];
        Digest& digest = digests_[node] = Digest{};
        std::fill(outliers(node), outliers(node) + most, -1);
        members_of(node, members);
        if (members.empty()) continue;
        std::sort(members.begin(), members.end());  // sums do not depend on the order of the pages
        std::fill(sum.begin(), sum.end(), 0.0);
        candidates = members;
        for (int i : members)
            for (size_t b = 0; b < settings_->mean_bytes(); b += 64) __builtin_prefetch(rows.key(first_ + i) + b);
        for (int i : members) {
            kernels.add(rows.key(first_ + i), dim, rows.dtype(), 1.0, sum.data());
            digest.points += 1;
            digest.norm2 += norm2_[i];
            const int below = node_of_[i];
            if (below < 0 || digests_[below].points == 0) continue;
            kernels.add(mean(below), dim, rows.dtype(), digests_[below].points, sum.data());
            digest.points += digests_[below].points;
            digest.norm2 += digests_[below].norm2;
            for (int o = 0; o < most && outliers(below)[o] >= 0; ++o) candidates.push_back(outliers(below)[o]);
        }
        double centre2 = 0;
        for (int d = 0; d < dim; ++d) {
            const double x = sum[d] / digest.points;
            centre[d] = static_cast<float>(x);
            centre2 += x * x;
        }
        digest.spread = static_cast<float>(std::sqrt(std::max(0.0, digest.norm2 / digest.points - centre2) / dim));
        kernels.narrow(centre.data(), dim, rows.dtype(), mean(node));

        // Each outlier is the candidate farthest from the mean and from the outliers before it.
        std::sort(candidates.begin(), candidates.end());
        at.clear();
        for (int i : candidates) at.push_back(rows.key(first_ + i));
        dots.resize(candidates.size());
        apart.assign(candidates.size(), HUGE_VALF);
        for (int o = 0; o < std::min<int>(most, static_cast<int>(candidates.size())); ++o) {
            kernels.dots(centre.data(), at.data(), at.size(), dim, rows.dtype(), dots.data());
            size_t farthest = 0;  // those taken are at -inf
            for (size_t c = 0; c < candidates.size(); ++c) {
                apart[c] = std::min(apart[c], static_cast<float>(norm2_[candidates[c]] + centre2 - 2.0 * dots[c]));
                if (apart[c] > (1 + kTie) * apart[farthest]) farthest = c;
            }
            outliers(node)[o] = candidates[farthest];
            apart[farthest] = -HUGE_VALF;
            centre2 = norm2_[candidates[farthest]];
            kernels.widen(at[farthest], dim, rows.dtype(), centre.data());
        }
    }
}

void Tree::refresh(const Rows& rows, std::vector<int32_t>& points) {
    if (!settings_->digests()) return;
    const auto lower = [&](int a, int b) { return level_[a] < level_[b] || (level_[a] == level_[b] && a < b); };
    const auto once = [&] {
        std::sort(points.begin(), points.end());
        points.erase(std::unique(points.begin(), points.end()), points.end());
    };
    once();
    for (size_t next = 0; next < points.size(); ++next)  // grows: whoever is above
        if (points[next] != kRoot && parent_[points[next]] != kRoot) points.push_back(parent_[points[next]]);
    once();
    if (!points.empty() && points.front() == kRoot) points.erase(points.begin());
    std::sort(points.begin(), points.end(), lower);
    summarise(rows, points.data(), static_cast<int>(points.size()));
}

// What a query may find at best below the points from `begin` on: the merit by which their nodes are descended.
void Tree::weigh(const Rows& rows, const Probe& probe, size_t begin, Seen& seen) const {
    const size_t found = seen.points.size() - begin;
    const int most = settings_->outliers;
    seen.merits.resize(found);
    for (size_t s = 0; s < found; ++s) {
        const int node = node_of_[seen.points[begin + s]];
        __builtin_prefetch(&digests_[node]);
        seen.rows[s] = mean(node);
    }
    settings_->kernels->dots(probe.key, seen.rows.data(), found, rows.dim(), rows.dtype(), seen.merits.data());
    seen.rows.clear();
    for (size_t s = 0; s < found; ++s) {
        const int node = node_of_[seen.points[begin + s]];
        if (digests_[node].points == 0)
            seen.merits[s] = -HUGE_VALF;
        else
            seen.merits[s] += probe.reach * digests_[node].spread;
        for (int o = 0; o < most && outliers(node)[o] >= 0; ++o) seen.rows.push_back(rows.key(first_ + outliers(node)[o]));
    }
    seen.lines.resize(seen.rows.size());
    settings_->kernels->dots(probe.key, seen.rows.data(), seen.rows.size(), rows.dim(), rows.dtype(), seen.lines.data());
    for (size_t s = 0, next = 0; s < found; ++s) {
        const int node = node_of_[seen.points[begin + s]];
        for (int o = 0; o < most && outliers(node)[o] >= 0; ++o, ++next) seen.merits[s] = std::max(seen.merits[s], seen.lines[next]);
    }
}

void Tree::save_digests(float* spread, void* mean, int32_t* outliers) const {
    char* to = static_cast<char*>(mean);
    for (int i = 0; i < size(); ++i) {
        const int node = node_of_[i];
        if (node < 0) continue;
        *spread++ = digests_[node].spread;
        to = std::copy(this->mean(node), this->mean(node) + settings_->mean_bytes(), to);
        outliers = std::copy(this->outliers(node), this->outliers(node) + settings_->outliers, outliers);
    }
}

}  // namespace kvthaw
