// One DCI-tree: the index of one KV head of one sequence. tests/index/dci_tree.py states it plainly; the names are the same.
// It keeps no keys: every call that needs them is told where the rows lie now.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "rank.h"
#include "records.h"
#include "rows.h"

namespace kvthaw {

constexpr int kRoot = -1;
constexpr int kMaxLevel = 32;
constexpr double kRoom = 1.25;  // c^2 over the longest key's |k|^2, see ROOM in tests/index/dci_tree.py

enum class Unit : int { page = 0, token = 1 };
enum class Merge : int { take_turns = 0, join = 1 };
enum class Descend : int { node = 0, level = 1, digest = 2 };

// keep: how many points a search descends from, of every node or of a whole level. retrieve: the share of a node's members that
// P-DCI gives a true distance, rounded up to whole batches.
struct Effort {
    int keep = 1;
    double retrieve = 1;
    int batch = 1;

    int retrieved(int members) const {
        if (retrieve >= 1) return members;
        const int64_t least = static_cast<int64_t>(std::ceil(retrieve * members)), batches = (least + batch - 1) / batch;
        return static_cast<int>(std::min<int64_t>(members, batches * batch));
    }
};

// What the trees of one layer have in common.
struct Settings {
    int dim = 0, layer = 0, page_size = 1, composites = 1, simples = 1;
    double promote = 0, promote_higher = 0;
    bool in_order = false;  // every n-th point is promoted; otherwise at random
    uint64_t seed = 0;
    Effort query, insert, build;  // build.keep 0: every point of the level above is compared
    double query_beam_share = 0;
    Unit unit = Unit::page;
    Merge merge = Merge::take_turns;
    Descend descend = Descend::node;
    int outliers = 0;
    float spread = 0;
    float scale = 1;  // of q.k in attention
    Dtype dtype = Dtype::f32;
    const Kernels* kernels = nullptr;
    std::vector<float> directions;  // [heads][indices][dim + 1]
    int first_head = 0;  // the number of the first head among those of all processes, for random choices
    bool strict = false;  // of every node that a query visited only the best query.keep are answers

    int indices() const { return composites * simples; }
    // How many points a query descends from: as many of every node as the budget holds pages, or of a level twice as many.
    int keep(int points, int budget) const {
        const int64_t rows = descend == Descend::node ? budget : 2 * static_cast<int64_t>(budget);
        const int64_t pages = (rows + page_size - 1) / page_size;
        return static_cast<int>(std::max<int64_t>({query.keep, static_cast<int64_t>(std::ceil(query_beam_share * points)), pages}));
    }
    bool digests() const { return descend == Descend::digest; }
    int digest_rows() const { return 1 + outliers; }
    size_t row_bytes() const { return coded_bytes(dim); }
    const float* directions_of(int head) const { return directions.data() + static_cast<size_t>(head) * indices() * (dim + 1); }
};

// What a search looks for. key is float32 [dim]; lift 0 and any scale for a query. reach: how far above a node's mean its keys may lie,
// by its spread, where nodes are ranked by digests. each: effort.keep is of a node, not of a level.
struct Probe {
    const float* key;
    float lift;
    const float* projections;
    Effort effort;
    float reach = 0.0f;
    bool each = false;
};

// The members of one page that got a true distance: [begin, end) of Seen's points.
struct Span {
    int32_t page;
    int32_t begin, end;
    float best = 0;      // of their scores, and the earliest of them, once a query's search has ended
    int32_t tie = 0;
};

// Everything a search gave a true distance, level by level.
struct Seen {
    std::vector<int32_t> points;
    std::vector<float> scores;
    std::vector<Span> spans;
    std::vector<RowBlock> pages;  // of this query and of those that descended with it: what scores are of
    size_t last = 0;  // where the last level begins in points
    float lse = 0;    // log-sum-exp of the scaled scores, where heads are joined by it
    std::vector<uint64_t> best;  // the budget's best points by rank_key, in order, where single tokens are chosen
    // Room to work in.
    std::vector<const void*> rows;
    std::vector<int32_t> frontier, members;
    std::vector<size_t> nodes;  // where each visited node's points end
    std::vector<uint64_t> order, ranked;
    std::vector<float> lines;

    void clear() {
        points.clear();
        scores.clear();
        spans.clear();
        pages.clear();
        last = 0;
    }
};

class Tree {
public:
    Tree(std::shared_ptr<const Settings> settings, int head, int first)
        : settings_(std::move(settings)), directions_(settings_->directions_of(head)), head_(head), first_(first) {
        nodes_.resize(1);
        node_at(0) = Node{};
    }

    int size() const { return static_cast<int>(parent_.size()); }
    int first() const { return first_; }

    // Building, in the steps that the forest runs in parallel.
    void resize(int points);                                      // room for points that measure_points then fills
    int measure_points(const Rows& rows, int begin, int end);     // norms, projections, levels; the first bad point or -1
    void lay_levels();                                            // after all are measured: c, lifts, levels, the root
    struct Adoption {
        int below, above;              // the level whose points need parents, the level of those
        std::vector<float> panels;     // the parents packed for Kernels::nearest; empty where they are searched
    };
    Adoption open_level(const Rows& rows, int below, int above);  // makes the nodes of `above`
    void adopt(const Rows& rows, const Adoption& to, int begin, int count);  // of the points of the level below
    int adopt_together(int orphans) const {  // of how many adopt() is best called at a time
        return settings_->build.keep ? std::min(4096, std::max(256, orphans / 16)) : 4 * kNearestKeys;
    }
    void fill_level(int level);                                   // the nodes whose points are of this level
    std::vector<std::array<int, 2>> level_pairs() const;          // (below, above), from the top
    const std::vector<int32_t>& at_level(int level) const { return levels_[level]; }
    int lowest_nodes() const;                                     // the lowest level that has nodes; 0: none
    // Writes what queries by digests read of these points' nodes, level by level.
    void summarise(const Rows& rows, const int32_t* points, int count);

    // Changing. measured: norms and raw projections of the new points, finite.
    void append(const Rows& rows, int count, const double* norm2, const float* raw);
    void truncate(const Rows& rows, int length);

    // Searching. Algorithm 4 down to a level.
    void search(const Rows& rows, const Probe& probe, int level, Seen& seen) const;
    // Search for up to kTogether queries [count][dim], all levels: the same as for each alone. The effort grows with the budget. By
    // digests, score_pages() is then due for all parts, in any order and at once; by points, nothing.
    void descend(const Rows& rows, const float* queries, int count, int budget, Seen* seen) const;
    void score_pages(const float* queries, int count, int part, int parts, Seen* seen) const;
    // What choose() needs of a search beside its scores.
    void rank_spans(Seen& seen, int budget) const;
    static void keep_answers(Seen& seen);
    // How many points the latest such search visited: the next one takes about as long.
    uint32_t visited() const { return __atomic_load_n(&visited_, __ATOMIC_RELAXED); }
    // The heads' searches together, cut to a budget: writes positions, returns how many.
    int choose(const Seen* seen, int heads, int budget, int32_t* out) const;

    // State. What a tree is beyond what its keys say: c^2, and of every page, nodes by point, its node, its number of keys, these keys.
    int page_total() const { return static_cast<int>(page_of_node_order().size()); }
    void save(double* radius2, int32_t* page_node, int32_t* page_count, int32_t* members) const;
    // Become the tree that was saved, but for its digests. held: how many points are measured; truncate() removes the others before
    // anything is searched. Returns what cannot be, whatever the numbers are; empty if nothing. members: as many as points.
    std::string restore(int held, double radius2, int pages, const int32_t* page_node, const int32_t* page_count,
                        const int32_t* members);
    void save_points(double* norm2, float* raw, uint8_t* level, int32_t* parent) const;
    // Of every node, by point: spread, rows [1 + outliers][dim] of mean and outliers as a query sees them, outliers [outliers].
    void save_digests(float* spread, float* rows, int32_t* outliers) const;
    // What is wrong with the maps between points, nodes and pages, or with a digest; empty if nothing.
    std::string check(const Rows& rows) const;
    size_t nbytes() const;

    static int draw_level(const Settings& settings, int head, int position);

private:
    // What a query reads of a node or a page lies in one piece. A node: this, then its digest as i8 rows, the mean, then the outliers,
    // the mean again where there are fewer.
    struct Node {
        int32_t page = -1, members = 0;  // the first of its chain of pages
        float spread = -1;               // of the digest; below 0: no points
    };
    // A page: this, its points [page_size], their nodes [page_size] and their keys as i8 rows, both written by summarise(), and their
    // projections on the first direction [page_size].
    struct Page {
        int32_t node, next, count;
    };
    static size_t node_bytes(const Settings& set) { return sizeof(Node) + (set.digests() ? set.digest_rows() * set.row_bytes() : 0); }
    static size_t page_bytes(const Settings& set) {
        return sizeof(Page) + set.page_size * (12 + (set.digests() ? set.row_bytes() : 0));
    }
    // Of a node's points and all below them: what the nodes above need to make theirs.
    struct Digest {
        int32_t points = 0;
        double norm2 = 0;  // the sum of their |k|^2
    };

    // lift and projections of a point at the present c
    void place_in_space(int point);
    void grow_radius();
    Node& node_at(int node) const { return *reinterpret_cast<Node*>(nodes_.at(node)); }
    char* digest_rows(int node) const { return nodes_.at(node) + sizeof(Node); }
    Page& page_at(int page) const { return *reinterpret_cast<Page*>(pages_.at(page)); }
    int32_t* slots(int page) const { return reinterpret_cast<int32_t*>(pages_.at(page) + sizeof(Page)); }
    int32_t* below(int page) const { return slots(page) + settings_->page_size; }
    char* page_rows(int page) const { return reinterpret_cast<char*>(below(page) + settings_->page_size); }
    float* line(int page) const { return reinterpret_cast<float*>(pages_.at(page) + page_bytes(*settings_)) - settings_->page_size; }
    float projection(int point) const { return projection_[static_cast<size_t>(point) * settings_->indices()]; }

    int node_of(int point) const { return point == kRoot ? 0 : node_of_[point]; }
    int new_node(int point);
    void number_nodes(int level);  // makes those of its points, of one parent side by side
    std::vector<float> pack(const Rows& rows, int level) const;
    void adopt_nearest(const Rows& rows, const std::vector<float>& panels, int above, const int32_t* orphans, int count);
    void adopt_by_descent(const Rows& rows, int above, const int32_t* orphans, int count);
    struct Visit {
        int32_t node, key;
    };
    // Room to work in for adopt_by_descent().
    struct Descent {
        static constexpr uint64_t kNone = ~uint64_t{0};
        std::vector<Visit> visits, sorted;
        std::vector<int32_t> members, next, start;      // members of this node and of the one after it
        std::vector<float> keys, panel, lifts, scores;  // panel: the members' keys
        std::vector<float> axes, apart, bound;          // axes: the members' projections [indices][members]
        std::vector<uint64_t> best;                     // of each key a heap of `keep` ranks, the last one first
        std::vector<float> floor;                       // of each key that one's score

        const float *projections = nullptr, *ranked = nullptr;  // of the key; of that whose members `apart` ranks
        int retrieve = 0;

        float consider(const Settings& settings, int key, int member, float score);
        bool retrieves(const Settings& settings, int member);
    };
    void collect_node(const Rows& rows, int node, std::vector<int32_t>& members) const;
    void gather_projections(Descent& room) const;
    static void sort_by_node(Descent& room);
    int nearest_at(const Seen& seen) const;  // of the last level that a search saw
    int new_page(int node);
    void free_pages(int node);
    void fill(int node, std::vector<int32_t>& members);
    int32_t* outliers(int node) { return outliers_.data() + static_cast<size_t>(node) * settings_->outliers; }
    const int32_t* outliers(int node) const { return outliers_.data() + static_cast<size_t>(node) * settings_->outliers; }
    void encode_pages(const Rows& rows, int node);
    void refresh(const Rows& rows, std::vector<int32_t>& points);  // summarise() these points' nodes and all above them
    void descend_digests(const Probe* probes, int count, Seen* seen) const;
    void ask_pages(int node) const;
    // visit(at, page, slot) of every point of the spans from `span` on.
    template <class Visit>
    void each_slot(const Seen& seen, size_t span, Visit visit) const {
        for (; span < seen.spans.size(); ++span) {
            const Span& own = seen.spans[span];
            const int32_t* tokens = slots(own.page);
            const bool whole = own.end - own.begin == page_at(own.page).count;
            for (int at = own.begin, slot = 0; at < own.end; ++at, ++slot) {
                while (!whole && tokens[slot] != seen.points[at]) ++slot;  // both are in the node's order
                visit(at, own.page, slot);
            }
        }
    }
    void members_of(int node, std::vector<int32_t>& out) const;
    std::vector<int32_t> page_of_node_order() const;  // every page, nodes by point
    void insert(const Rows& rows, int point, Seen& seen, std::vector<int32_t>& changed);  // changed: whose nodes did
    void move(const std::vector<int32_t>& points, int to);
    void place(int point);
    int level_above(int level) const;  // the next that has points; 0: none
    int level_below(int level) const;
    int choose_pages(const Seen* seen, int heads, int budget, int32_t* out) const;
    int choose_tokens(const Seen* seen, int heads, int budget, int32_t* out) const;
    void collect(int node, const Probe& probe, Seen& seen) const;
    void score(const Rows& rows, const Probe& probe, size_t begin, Seen& seen) const;
    void prioritized_dci(int node, const Probe& probe, int retrieve, Seen& seen) const;

    std::shared_ptr<const Settings> settings_;  // outlives the forest that made the tree: copies share trees
    const float* directions_;  // [indices][dim + 1]
    int head_, first_;
    double radius2_ = 0;  // c^2
    mutable uint32_t visited_ = 0;

    // By point.
    std::vector<double> norm2_;
    std::vector<float> raw_, lift_, projection_;  // raw_ and projection_ [indices] each
    std::vector<uint8_t> level_;
    std::vector<int32_t> parent_, page_, node_of_;  // node_of_: -1 at level 1

    std::array<std::vector<int32_t>, kMaxLevel + 1> levels_;
    std::vector<Digest> digests_{Digest{}};  // by node; the root's and all of it stay empty where points are descended by
    std::vector<int32_t> outliers_ = std::vector<int32_t>(settings_->outliers, -1);
    std::vector<int32_t> free_nodes_, free_page_ids_;
    Records nodes_{node_bytes(*settings_)}, pages_{page_bytes(*settings_)};  // the root first
};

}  // namespace kvthaw
