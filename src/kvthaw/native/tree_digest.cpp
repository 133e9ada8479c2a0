// What queries read of a node: its members' keys in 8 bits, page by page, and its digest, the mean and the spread of all keys below it
// and its outliers, the points that these two describe worst.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tree.h"

namespace kvthaw {

// Two points lie equally far from their mean, whatever rounding says.
constexpr float kTie = 1e-4f;

void Tree::encode_pages(const Rows& rows, int node) {
    const int dim = settings_->dim;
    std::vector<float> key(dim);
    for (int page = node_at(node).page; page >= 0; page = page_at(page).next)
        for (int slot = 0; slot < page_at(page).count; ++slot) {
            settings_->kernels->widen(rows.key(first_ + slots(page)[slot]), dim, rows.dtype(), key.data());
            settings_->kernels->encode(key.data(), dim, page_rows(page) + slot * settings_->row_bytes());
            below(page)[slot] = node_of_[slots(page)[slot]];
        }
}

void Tree::summarise(const Rows& rows, const int32_t* points, int count) {
    if (!settings_->digests()) return;
    const int dim = settings_->dim, most = settings_->outliers;
    const size_t bytes = settings_->row_bytes();
    const Kernels& kernels = *settings_->kernels;
    std::vector<double> sum(dim);
    std::vector<float> centre(dim), apart, dots;
    std::vector<int32_t> members, candidates;
    std::vector<const void*> at;
    for (int p = 0; p < count; ++p) {
        const int node = node_of(points[p]);
        members_of(node, members);
        for (int i : members)
            for (size_t b = 0; b < size_of(rows.dtype()) * dim; b += 64) __builtin_prefetch(rows.key(first_ + i) + b);
        encode_pages(rows, node);
        if (node == 0) continue;  // the root, which nobody descends to
        Digest& digest = digests_[node] = Digest{};
        char* own = digest_rows(node);
        node_at(node).spread = -1.0f;
        std::fill(outliers(node), outliers(node) + most, -1);
        if (members.empty()) continue;
        std::sort(members.begin(), members.end());  // sums do not depend on the order of the pages
        std::fill(sum.begin(), sum.end(), 0.0);
        candidates = members;
        for (int i : members) {
            kernels.add(rows.key(first_ + i), dim, rows.dtype(), 1.0, sum.data());
            digest.points += 1;
            digest.norm2 += norm2_[i];
            const int below = node_of_[i];
            if (below < 0 || digests_[below].points == 0) continue;
            kernels.add(digest_rows(below), dim, Dtype::i8, digests_[below].points, sum.data());
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
        node_at(node).spread = static_cast<float>(std::sqrt(std::max(0.0, digest.norm2 / digest.points - centre2) / dim));
        kernels.encode(centre.data(), dim, own);
        for (int o = 1; o <= most; ++o) std::copy(own, own + bytes, own + o * bytes);  // until there is an outlier

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
            kernels.encode(centre.data(), dim, own + (o + 1) * bytes);
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
    for (size_t next = 0; next < points.size(); ++next)  // grows: the points above
        if (points[next] != kRoot && parent_[points[next]] != kRoot) points.push_back(parent_[points[next]]);
    once();
    std::sort(points.begin() + (!points.empty() && points.front() == kRoot), points.end(), lower);
    summarise(rows, points.data(), static_cast<int>(points.size()));
}

void Tree::save_digests(float* spread, float* rows, int32_t* outliers) const {
    for (int i = 0; i < size(); ++i) {
        const int node = node_of_[i];
        if (node < 0) continue;
        *spread++ = node_at(node).spread;
        for (int r = 0; r < settings_->digest_rows(); ++r)
            for (int d = 0; d < settings_->dim; ++d) {
                const char* row = digest_rows(node) + r * settings_->row_bytes();
                float step;
                std::memcpy(&step, row + settings_->row_bytes() - 4, 4);
                *rows++ = step * static_cast<int8_t>(row[d]);
            }
        outliers = std::copy(this->outliers(node), this->outliers(node) + settings_->outliers, outliers);
    }
}

}  // namespace kvthaw
