// A search for queries: by digests for all query heads of a thread together, otherwise one after the other.
#include <algorithm>
#include <array>
#include <cmath>

#include "rank.h"
#include "tree.h"

namespace kvthaw {

namespace {

// A node that queries descend to: a bit a query.
struct Asked {
    int32_t node;
    uint32_t queries;
};

// A node that queries may descend to, and its point.
struct Found {
    int32_t node, point;
};

struct Descending {
    std::vector<Asked> frontier;
    std::vector<Found> found;
    std::vector<RowBlock> digests;  // of found
    std::array<std::vector<float>, kTogether> products;
    std::array<std::vector<uint64_t>, kTogether> order;
    std::vector<uint64_t> ranked;
};

template <class Visit>
inline void each_query(uint32_t queries, Visit visit) {
    for (; queries != 0; queries &= queries - 1) visit(__builtin_ctz(queries));
}

}  // namespace

void Tree::descend(const Rows& rows, const float* queries, int count, int budget, Seen* seen) const {
    const Settings& set = *settings_;
    std::array<Probe, kTogether> probes;
    std::vector<float> projections(static_cast<size_t>(count) * set.indices());
    for (int q = 0; q < count; ++q) {
        const float* query = queries + static_cast<size_t>(q) * set.dim;
        float* own = projections.data() + static_cast<size_t>(q) * set.indices();
        double norm2;
        set.kernels->measure(query, set.dim, directions_, set.indices(), set.dim + 1, &norm2, own);
        const float scale = norm2 > 0 ? static_cast<float>(std::sqrt(radius2_ / norm2)) : 0.0f;
        for (int i = 0; i < set.indices(); ++i) own[i] *= scale;
        probes[q] = {query, 0.0f, own, set.query, set.spread * static_cast<float>(std::sqrt(norm2)), set.descend == Descend::node};
        probes[q].effort.keep = set.keep(size(), budget);
        seen[q].clear();
        if (!set.digests()) search(rows, probes[q], 1, seen[q]);
    }
    if (set.digests()) descend_digests(probes.data(), count, seen);
}

// Every query sees what it would see alone, in the same order: a node or page that several descend to is read once and multiplied
// with all of them. Keys' scores do not decide where to descend, so that score_pages() can come later.
void Tree::descend_digests(const Probe* probes, int count, Seen* seen) const {
    static thread_local Descending kept;
    Descending& room = kept;
    std::vector<RowBlock>& pages = seen[0].pages;
    const Settings& set = *settings_;
    const size_t bytes = set.row_bytes(), each = set.digest_rows();
    std::array<const float*, kTogether> queries;
    std::array<float*, kTogether> out;
    std::array<uint64_t*, kTogether> rank;
    for (int q = 0; q < count; ++q) queries[q] = probes[q].key;
    room.frontier.assign(1, {0, (1u << count) - 1});
    for (int level = kMaxLevel; level >= 1; --level) {
        if (levels_[level].empty()) continue;
        // Nodes, then their pages, then rows lie anywhere: ask for all of one kind before the first is needed.
        for (const Asked& asked : room.frontier) __builtin_prefetch(&node_at(asked.node));
        for (const Asked& asked : room.frontier) ask_pages(asked.node);
        room.found.clear();
        room.digests.clear();
        const auto add = [&](int page, int slot, int32_t count, uint32_t asking) {
            pages.push_back({page_rows(page) + slot * bytes, count, asking});
            if (level == 1) return;
            const size_t at = room.found.size();
            room.found.resize(at + count);
            room.digests.resize(at + count);
            for (int i = 0; i < count; ++i) {
                const int node = below(page)[slot + i];
                room.found[at + i] = {node, slots(page)[slot + i]};
                room.digests[at + i] = {digest_rows(node), static_cast<int32_t>(each), asking};
            }
        };
        for (const Asked& asked : room.frontier) {
            const int members = node_at(asked.node).members;
            if (set.query.retrieved(members) < members) {
                each_query(asked.queries, [&](int q) {
                    const size_t span = seen[q].spans.size();
                    collect(asked.node, probes[q], seen[q]);
                    each_slot(seen[q], span, [&](int, int page, int slot) { add(page, slot, 1, 1u << q); });
                });
                continue;
            }
            for (int page = node_at(asked.node).page; page >= 0; page = page_at(page).next) {
                const int32_t held = page_at(page).count;
                each_query(asked.queries, [&](int q) {
                    const int32_t at = static_cast<int32_t>(seen[q].points.size());
                    seen[q].points.insert(seen[q].points.end(), slots(page), slots(page) + held);
                    seen[q].spans.push_back({page, at, at + held});
                });
                add(page, 0, held, asked.queries);
            }
        }
        if (level == 1) break;
        for (int q = 0; q < count; ++q) {
            room.products[q].resize(room.digests.size() * each);
            room.order[q].resize(room.digests.size());
            out[q] = room.products[q].data();
            rank[q] = room.order[q].data();
        }
        set.kernels->dots_together(queries.data(), count, room.digests.data(), room.digests.size(), set.dim, out.data());
        for (size_t f = 0; f < room.found.size(); ++f) {
            const float spread = node_at(room.found[f].node).spread;
            each_query(room.digests[f].queries, [&](int q) {
                float best = out[q][0] + probes[q].reach * spread;
                for (size_t r = 0; r < each; ++r) best = std::max(best, out[q][r]);
                *rank[q]++ = rank_key(spread < 0 ? -HUGE_VALF : best, room.found[f].point);
                out[q] += each;
            });
        }
        std::array<uint64_t, kTogether> last;  // of those a query descends to
        for (int q = 0; q < count; ++q) {
            const size_t keep = probes[q].effort.keep, weighed = rank[q] - room.order[q].data();
            last[q] = ~uint64_t{0};
            rank[q] = room.order[q].data();
            if (weighed <= keep) continue;
            room.ranked.assign(rank[q], rank[q] + weighed);
            std::nth_element(room.ranked.begin(), room.ranked.begin() + keep - 1, room.ranked.end());
            last[q] = room.ranked[keep - 1];
        }
        room.frontier.clear();
        uint32_t children = 0;
        for (size_t f = 0; f < room.found.size(); ++f) {
            uint32_t descending = 0;
            each_query(room.digests[f].queries, [&](int q) { descending |= static_cast<uint32_t>(*rank[q]++ <= last[q]) << q; });
            if (descending == 0) continue;
            room.frontier.push_back({room.found[f].node, descending});
            if (node_at(room.found[f].node).members > 0) children |= descending;
        }
        for (int q = 0; q < count; ++q) {  // the level below has points, but none here: descend from all
            if (children >> q & 1) continue;
            for (Asked& asked : room.frontier) asked.queries &= ~(1u << q);
            for (int point : levels_[level]) room.frontier.push_back({node_of_[point], 1u << q});
        }
    }
    for (int q = 0; q < count; ++q) seen[q].scores.resize(seen[q].points.size());
}

void Tree::score_pages(const float* queries, int count, int part, int parts, Seen* seen) const {
    const std::vector<RowBlock>& pages = seen[0].pages;
    const size_t begin = pages.size() * part / parts, end = pages.size() * (part + 1) / parts;
    std::array<const float*, kTogether> asked;
    std::array<float*, kTogether> out;
    for (int q = 0; q < count; ++q) {
        asked[q] = queries + static_cast<size_t>(q) * settings_->dim;
        out[q] = seen[q].scores.data();
    }
    for (size_t p = 0; p < begin; ++p) each_query(pages[p].queries, [&](int q) { out[q] += pages[p].count; });
    settings_->kernels->dots_together(asked.data(), count, pages.data() + begin, end - begin, settings_->dim, out.data());
}

void Tree::keep_answers(Seen& seen) {
    size_t points = 0, spans = 0;
    for (Span& span : seen.spans) {
        const size_t begin = points;
        for (int at = span.begin; at < span.end; ++at) {
            if (seen.scores[at] == -HUGE_VALF) continue;
            seen.points[points] = seen.points[at];
            seen.scores[points++] = seen.scores[at];
        }
        if (points > begin) seen.spans[spans++] = {span.page, static_cast<int32_t>(begin), static_cast<int32_t>(points)};
    }
    seen.points.resize(points);
    seen.scores.resize(points);
    seen.spans.resize(spans);
}

void Tree::rank_spans(Seen& seen, int budget) const {
    const Settings& set = *settings_;
    __atomic_store_n(&visited_, static_cast<uint32_t>(seen.points.size()), __ATOMIC_RELAXED);
    if (set.strict) keep_answers(seen);
    for (Span& span : seen.spans) {
        span.best = seen.scores[span.begin];
        span.tie = seen.points[span.begin];
        for (int at = span.begin + 1; at < span.end; ++at) {
            span.best = std::max(span.best, seen.scores[at]);
            span.tie = std::min(span.tie, seen.points[at]);
        }
    }
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
