#include "forest.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <mutex>
#include <stdexcept>

#include "pool.h"

namespace kvthaw {

Forest::Forest(Settings settings, int seqs, int heads, int block_size)
    : settings_(std::make_shared<const Settings>(std::move(settings))), heads_(heads), block_size_(block_size),
      trees_(seqs, std::vector<std::shared_ptr<Tree>>(heads)) {}

Forest::Forest(const Forest& other)
    : settings_(other.settings_), heads_(other.heads_), block_size_(other.block_size_) {
    std::shared_lock lock(other.mutex_);
    trees_ = other.trees_;
}

void Forest::refuse(int head, int position) const {
    throw std::invalid_argument("layer " + std::to_string(settings_->layer) + ", KV head " + std::to_string(head) +
                                ": the key at position " + std::to_string(position) + " is not finite");
}

Tree& Forest::tree(int seq, int head) {
    std::shared_ptr<Tree>& tree = trees_.at(seq).at(head);
    if (!tree) throw std::out_of_range("sequence " + std::to_string(seq) + " has no tree");
    if (tree.use_count() > 1) tree = std::make_shared<Tree>(*tree);
    return *tree;
}

const Tree& Forest::tree(int seq, int head) const {
    const std::shared_ptr<Tree>& tree = trees_.at(seq).at(head);
    if (!tree) throw std::out_of_range("sequence " + std::to_string(seq) + " has no tree");
    return *tree;
}

void Forest::grow(int seqs) {
    std::unique_lock lock(mutex_);
    if (seqs > this->seqs()) trees_.resize(seqs, std::vector<std::shared_ptr<Tree>>(heads_));
}

void Forest::share(int seq, const Forest& other, int its) {
    std::vector<std::shared_ptr<Tree>> trees;
    {
        std::shared_lock lock(other.mutex_);
        trees = other.trees_.at(its);
    }
    grow(seq + 1);
    std::unique_lock lock(mutex_);
    trees_[seq] = std::move(trees);
}

std::vector<std::shared_ptr<Tree>> Forest::measured(int first, int points, int held, const int64_t* bases, int threads) const {
    std::vector<std::shared_ptr<Tree>> made;
    for (int head = 0; head < heads_; ++head) made.push_back(std::make_shared<Tree>(empty_tree(head, first)));
    // Measured in blocks, so that a model of two KV heads uses every thread too.
    constexpr int kBlock = 1024;
    const int blocks = (held + kBlock - 1) / kBlock;
    std::vector<int> bad(static_cast<size_t>(heads_) * blocks, -1);
    Pool::instance().run(made.size(), threads, [&](size_t head) { made[head]->resize(points); });
    Pool::instance().run(bad.size(), threads, [&](size_t item) {
        const int head = static_cast<int>(item) / blocks, begin = static_cast<int>(item) % blocks * kBlock;
        bad[item] = made[head]->measure_points(rows(bases, head), begin, std::min(held, begin + kBlock));
    });
    for (size_t item = 0; item < bad.size(); ++item)
        if (bad[item] >= 0) refuse(static_cast<int>(item) / blocks, first + bad[item]);
    return made;
}

void Forest::summarise(const std::vector<std::shared_ptr<Tree>>& made, const int64_t* bases, int threads) const {
    if (!settings_->digests()) return;
    Pool& pool = Pool::instance();
    struct Item {
        int head, begin, count;
    };
    std::vector<Item> items;
    constexpr int kNodes = 64;  // nearly all nodes are of the lowest level: in blocks
    for (int head = 0; head < heads_; ++head) {
        const int nodes = static_cast<int>(made[head]->at_level(made[head]->lowest_nodes()).size());
        for (int begin = 0; begin < nodes; begin += kNodes) items.push_back({head, begin, std::min(kNodes, nodes - begin)});
    }
    pool.run(items.size(), threads, [&](size_t i) {
        const Item& item = items[i];
        Tree& tree = *made[item.head];
        tree.summarise(rows(bases, item.head), tree.at_level(tree.lowest_nodes()).data() + item.begin, item.count);
    });
    pool.run(heads_, threads, [&](size_t head) {
        Tree& tree = *made[head];
        tree.summarise(rows(bases, static_cast<int>(head)), &kRoot, 1);
        for (int level = std::max(tree.lowest_nodes(), 1) + 1; level <= kMaxLevel; ++level)
            tree.summarise(rows(bases, static_cast<int>(head)), tree.at_level(level).data(),
                           static_cast<int>(tree.at_level(level).size()));
    });
}

void Forest::build(int seq, int first, int points, const int64_t* bases, int threads) {
    grow(seq + 1);
    std::unique_lock lock(mutex_);
    Pool& pool = Pool::instance();
    std::vector<std::shared_ptr<Tree>> made = measured(first, points, points, bases, threads);

    pool.run(heads_, threads, [&](size_t head) { made[head]->lay_levels(); });

    struct Item {
        int head, begin, count;
    };
    std::vector<Item> items;
    std::vector<Tree::Adoption> adoptions(heads_);
    std::vector<std::vector<std::array<int, 2>>> pairs;
    for (const auto& tree : made) pairs.push_back(tree->level_pairs());
    for (size_t step = 0; step < kMaxLevel; ++step) {  // from the top: a level's parents are found in the tree above it
        items.clear();
        for (int head = 0; head < heads_; ++head) {
            const int orphans = step < pairs[head].size() ? static_cast<int>(made[head]->at_level(pairs[head][step][0]).size()) : 0;
            const int together = made[head]->adopt_together(orphans);
            for (int begin = 0; begin < orphans; begin += together) items.push_back({head, begin, std::min(together, orphans - begin)});
        }
        if (items.empty()) break;
        pool.run(heads_, threads, [&](size_t head) {
            if (step >= pairs[head].size()) return;
            const auto [below, above] = pairs[head][step];
            adoptions[head] = made[head]->open_level(rows(bases, static_cast<int>(head)), below, above);
        });
        pool.run(items.size(), threads, [&](size_t i) {
            const Item& item = items[i];
            made[item.head]->adopt(rows(bases, item.head), adoptions[item.head], item.begin, item.count);
        });
        pool.run(heads_, threads, [&](size_t head) {
            if (step < pairs[head].size()) made[head]->fill_level(pairs[head][step][0]);
        });
    }
    summarise(made, bases, threads);
    trees_[seq] = std::move(made);
}

void Forest::restore(int seq, int first, int points, int held, const int64_t* bases, const double* radius2, const int32_t* pages,
                     const int32_t* page_node, const int32_t* page_count, const int32_t* members, int threads) {
    grow(seq + 1);
    std::unique_lock lock(mutex_);
    std::vector<std::shared_ptr<Tree>> made = measured(first, points, held, bases, threads);
    std::vector<size_t> begin(heads_, 0);  // of each head's pages
    for (int head = 1; head < heads_; ++head) begin[head] = begin[head - 1] + pages[head - 1];
    std::vector<std::string> wrong(heads_);
    Pool::instance().run(heads_, threads, [&](size_t head) {
        Tree& tree = *made[head];
        wrong[head] = tree.restore(held, radius2[head], pages[head], page_node + begin[head], page_count + begin[head],
                                   members + head * points);
        if (wrong[head].empty()) tree.truncate(rows(bases, static_cast<int>(head)), first + held);
    });
    for (int head = 0; head < heads_; ++head)
        if (!wrong[head].empty())
            throw std::invalid_argument("layer " + std::to_string(settings_->layer) + ", KV head " + std::to_string(head) +
                                        ": no tree has " + wrong[head] + " as it was saved");
    summarise(made, bases, threads);
    trees_[seq] = std::move(made);
}

void Forest::append(const std::vector<int>& seqs, int points, const int64_t* bases, int blocks, int threads) {
    std::unique_lock lock(mutex_);
    Pool& pool = Pool::instance();
    const size_t items = seqs.size() * heads_;
    const int indices = settings_->indices();
    for (int seq : seqs)
        if (!has(seq)) throw std::out_of_range("sequence " + std::to_string(seq) + " has no tree");
    // Measure all before anything changes: a bad key leaves every tree as it was.
    struct Measured {
        std::vector<double> norm2;
        std::vector<float> raw;
        int bad = -1;
    };
    std::vector<Measured> measured(items);
    pool.run(items, threads, [&](size_t item) {
        const int seq = static_cast<int>(item) / heads_, head = static_cast<int>(item) % heads_;
        const Rows at = rows(bases + static_cast<size_t>(seq) * blocks, head);
        const Tree& tree = *trees_[seqs[seq]][head];
        Measured& own = measured[item];
        own.norm2.resize(points);
        own.raw.resize(static_cast<size_t>(points) * indices);
        std::vector<float> key(settings_->dim);
        for (int i = 0; i < points; ++i) {
            settings_->kernels->widen(at.key(tree.first() + tree.size() + i), settings_->dim, settings_->dtype, key.data());
            settings_->kernels->measure(key.data(), settings_->dim, settings_->directions_of(head), indices, settings_->dim + 1, &own.norm2[i],
                                       &own.raw[static_cast<size_t>(i) * indices]);
            if (own.bad < 0 && !std::isfinite(own.norm2[i])) own.bad = tree.first() + tree.size() + i;
        }
    });
    for (size_t item = 0; item < items; ++item)
        if (measured[item].bad >= 0) refuse(static_cast<int>(item) % heads_, measured[item].bad);

    // Trees that other sequences share are copied; what each item replaces is decided before any runs.
    std::vector<std::shared_ptr<Tree>> before(items);
    std::vector<uint8_t> shared(items);
    for (size_t item = 0; item < items; ++item)
        shared[item] = trees_[seqs[item / heads_]][item % heads_].use_count() > 1;
    for (size_t item = 0; item < items; ++item) before[item] = trees_[seqs[item / heads_]][item % heads_];
    pool.run(items, threads, [&](size_t item) {
        std::shared_ptr<Tree>& tree = trees_[seqs[item / heads_]][item % heads_];
        if (shared[item]) tree = std::make_shared<Tree>(*before[item]);
        tree->append(rows(bases + item / heads_ * blocks, static_cast<int>(item % heads_)), points, measured[item].norm2.data(),
                     measured[item].raw.data());
    });
}

void Forest::select(int batch, int group, const float* query, int budget, const int64_t* bases, int blocks, int32_t* out,
                    int32_t* counts, int threads) const {
    std::shared_lock lock(mutex_);
    if (batch > seqs()) throw std::out_of_range("more queries than sequences");
    const size_t trees = static_cast<size_t>(batch) * heads_;
    std::fill(out, out + trees * budget, -1);
    std::fill(counts, counts + trees, 0);
    // A tree that fits the budget goes whole; the others are searched, one item a query head.
    std::vector<int> searched;
    for (size_t t = 0; t < trees; ++t) {
        const Tree* tree = trees_[t / heads_][t % heads_].get();
        if (tree == nullptr || tree->size() == 0) continue;
        if (tree->size() > budget) {
            searched.push_back(static_cast<int>(t));
            continue;
        }
        counts[t] = tree->size();
        for (int i = 0; i < tree->size(); ++i) out[t * budget + i] = tree->first() + i;
    }
    if (searched.empty() || budget == 0) return;
    for (int t : searched)
        for (size_t i = 0; i < static_cast<size_t>(group) * settings_->dim; ++i)
            if (!std::isfinite(query[static_cast<size_t>(t) * group * settings_->dim + i]))
                throw std::invalid_argument("layer " + std::to_string(settings_->layer) + ", sequence " + std::to_string(t / heads_) +
                                            ", KV head " + std::to_string(t % heads_) + ": a query is not finite");
    // The longest searches first, so that none begins when the other threads are about to end.
    std::vector<uint32_t> cost(trees, 0);
    for (int t : searched) cost[t] = trees_[t / heads_][t % heads_]->visited();
    std::stable_sort(searched.begin(), searched.end(), [&](int a, int b) { return cost[a] > cost[b]; });
    // Room for every search of a call, kept by the calling thread; the thread that ends the last search of a tree merges them.
    static thread_local std::vector<Seen> kept;
    std::vector<Seen>& seen = kept;
    if (seen.size() < searched.size() * group) seen.resize(searched.size() * group);
    // By digests the query heads of a tree together, which read much alike, but no fewer searches than threads.
    const int many = static_cast<int>(searched.size()), workers = threads > 0 ? threads : Pool::cores();
    const int least = std::max((workers + many - 1) / many, (group + kTogether - 1) / kTogether);
    const int parts = settings_->digests() ? std::min(group, least) : group;
    const size_t searches = searched.size() * parts;
    // A search by digests is of several items, so that no thread waits long for the last: one descends, and some score what it found, those
    // of the search that descended first before the others. descended: the numbers of searches in that order; kFailed: it threw.
    constexpr int kFailed = -2;
    const int scoring = settings_->digests() ? 4 : 0;
    std::vector<std::atomic<int>> left(searched.size()), unscored(searches), descended(searches);
    for (auto& count : left) count.store(parts, std::memory_order_relaxed);
    for (auto& count : unscored) count.store(scoring, std::memory_order_relaxed);
    for (auto& which : descended) which.store(-1, std::memory_order_relaxed);
    std::atomic<size_t> next{0};
    using Clock = std::chrono::steady_clock;
    std::atomic<uint64_t> longest{0};
    Pool::instance().run(searches * (1 + scoring), threads, [&](size_t item) {
        int which = static_cast<int>(item);
        const bool descends = item < searches;
        for (int spins = 0; !descends && (which = descended[(item - searches) / scoring].load(std::memory_order_acquire)) == -1;)
            Pool::wait_briefly(spins++);
        if (which == kFailed) return;
        const auto begin = Clock::now();
        const size_t s = which / parts, t = searched[s], seq = t / heads_;
        const int part = which % parts, first = group * part / parts, count = group * (part + 1) / parts - first;
        const Tree& tree = *trees_[seq][t % heads_];
        const float* asked = query + (t * group + first) * settings_->dim;
        Seen* own = &seen[s * group + first];
        if (descends) {
            const auto tell = [&](int ended) { descended[next.fetch_add(1)].store(ended, std::memory_order_release); };
            try {
                tree.descend(rows(bases + seq * blocks, static_cast<int>(t % heads_)), asked, count, budget, own);
            } catch (...) {
                tell(kFailed);
                throw;
            }
            tell(which);
        } else {
            tree.score_pages(asked, count, static_cast<int>((item - searches) % scoring), scoring, own);
        }
        if (scoring == 0 || (!descends && unscored[which].fetch_sub(1, std::memory_order_acq_rel) == 1)) {
            size_t points = 0;
            for (int q = 0; q < count; ++q) {
                points += own[q].points.size();
                tree.rank_spans(own[q], budget);
            }
            products_.fetch_add(points, std::memory_order_relaxed);
            if (left[s].fetch_sub(1, std::memory_order_acq_rel) == 1)
                counts[t] = tree.choose(&seen[s * group], group, budget, out + t * budget);
        }
        const uint64_t took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
        search_ns_.fetch_add(took, std::memory_order_relaxed);
        for (uint64_t most = longest.load(); most < took && !longest.compare_exchange_weak(most, took);) {
        }
    });
    longest_ns_.fetch_add(longest, std::memory_order_relaxed);
}

void Forest::truncate(int seq, int length, const int64_t* bases) {
    std::unique_lock lock(mutex_);
    if (!has(seq)) return;
    for (int head = 0; head < heads_; ++head) {
        const Tree& now = *trees_[seq][head];
        if (length - now.first() < now.size()) tree(seq, head).truncate(rows(bases, head), length);
    }
}

void Forest::reorder(const std::vector<int>& seqs) {
    std::unique_lock lock(mutex_);
    std::vector<std::vector<std::shared_ptr<Tree>>> next;
    for (int seq : seqs) next.push_back(trees_.at(seq));
    trees_ = std::move(next);
}

std::string Forest::check(const int64_t* bases, int blocks) const {
    std::shared_lock lock(mutex_);
    for (int seq = 0; seq < seqs(); ++seq)
        for (int head = 0; head < heads_; ++head)
            if (const auto& tree = trees_[seq][head])
                if (const std::string wrong = tree->check(rows(bases + static_cast<size_t>(seq) * blocks, head)); !wrong.empty())
                    return "sequence " + std::to_string(seq) + ", KV head " + std::to_string(head) + ": " + wrong;
    return "";
}

size_t Forest::nbytes() const {
    std::shared_lock lock(mutex_);
    std::vector<const Tree*> trees;
    for (const auto& seq : trees_)
        for (const auto& tree : seq)
            if (tree) trees.push_back(tree.get());
    std::sort(trees.begin(), trees.end());
    trees.erase(std::unique(trees.begin(), trees.end()), trees.end());
    size_t total = 0;
    for (const Tree* tree : trees) total += tree->nbytes();
    return total;
}

}  // namespace kvthaw
