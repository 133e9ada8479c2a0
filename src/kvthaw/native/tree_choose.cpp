// Algorithm 3: from what the query heads of a group found to the rows that a budget allows.
#include <algorithm>
#include <cmath>

#include "rank.h"
#include "tree.h"

namespace kvthaw {

namespace {

struct Ranked {
    float score;
    int32_t tie;           // the earliest token that got a true distance
    int32_t page;
    int32_t part;          // the first head's view of it
};

// A heap's largest is the best page.
constexpr auto worse = [](const Ranked& a, const Ranked& b) {
    return a.score < b.score || (a.score == b.score && a.tie > b.tie);
};

// One head's view of a page, and the next head's where heads are joined (-1: none).
struct Part {
    int32_t head, span, next;
};

struct Room {
    std::vector<std::vector<Ranked>> queues;
    std::vector<Part> parts;
    std::vector<int32_t> mark;  // by page: its place in the joint queue, then whether it was taken; 0 between calls
    std::vector<int32_t> undo;
    std::vector<float> slot_scores;
    std::vector<int> order;
};

}  // namespace

int Tree::choose(const Seen* seen, int heads, int budget, int32_t* out) const {
    return settings_->unit == Unit::page ? choose_pages(seen, heads, budget, out) : choose_tokens(seen, heads, budget, out);
}

int Tree::choose_tokens(const Seen* seen, int heads, int budget, int32_t* out) const {
    static thread_local std::vector<uint8_t> taken;
    static thread_local std::vector<uint64_t> joint;
    if (taken.size() < parent_.size()) taken.resize(parent_.size(), 0);
    int chosen = 0;
    const auto take = [&](int point) {
        if (taken[point]) return false;
        taken[point] = 1;
        out[chosen++] = first_ + point;
        return true;
    };
    if (settings_->merge == Merge::join) {  // a token among the best of all is among the best of the head that ranks it highest
        joint.clear();
        for (int head = 0; head < heads; ++head)
            for (uint64_t key : seen[head].best)
                joint.push_back(rank_key(score_of(key) * settings_->scale - seen[head].lse, id_of(key)));
        std::sort(joint.begin(), joint.end());
        for (size_t j = 0; j < joint.size() && chosen < budget; ++j) take(id_of(joint[j]));
    } else {
        std::vector<size_t> next(heads, 0);
        for (int turn = 0, idle = 0; chosen < budget && idle < heads; turn = (turn + 1) % heads) {
            const std::vector<uint64_t>& best = seen[turn].best;
            size_t& at = next[turn];
            while (at < best.size() && !take(id_of(best[at]))) ++at;
            idle = at < best.size() ? 0 : idle + 1;
        }
    }
    for (int c = 0; c < chosen; ++c) taken[out[c] - first_] = 0;
    return chosen;
}

int Tree::choose_pages(const Seen* seen, int heads, int budget, int32_t* out) const {
    static thread_local Room room;
    const bool join = settings_->merge == Merge::join;
    const float scale = settings_->scale;
    const auto value = [&](int head, float score) { return join ? score * scale - seen[head].lse : score; };
    // Scores of a page's slots as its queue sees them; -inf: no true distance.
    const auto score_slots = [&](int page, int first) {
        room.slot_scores.assign(settings_->page_size, -HUGE_VALF);
        for (int p = first; p >= 0; p = room.parts[p].next) {
            const Part& part = room.parts[p];
            const Span& span = seen[part.head].spans[part.span];
            for (int at = span.begin, slot = 0; at < span.end; ++at, ++slot) {
                while (slots(page)[slot] != seen[part.head].points[at]) ++slot;  // both are in the node's order
                room.slot_scores[slot] = std::max(room.slot_scores[slot], value(part.head, seen[part.head].scores[at]));
            }
        }
    };

    room.parts.clear();
    const int queues = join ? 1 : heads;
    if (static_cast<int>(room.queues.size()) < queues) room.queues.resize(queues);
    for (int q = 0; q < queues; ++q) room.queues[q].clear();
    if (room.mark.size() < pages_.size()) room.mark.resize(pages_.size(), 0);
    for (int head = 0; head < heads; ++head) {
        auto& queue = room.queues[join ? 0 : head];
        for (size_t s = 0; s < seen[head].spans.size(); ++s) {
            const Span& span = seen[head].spans[s];
            const Ranked ranked{value(head, span.best), span.tie, span.page, static_cast<int32_t>(room.parts.size())};
            int32_t next = -1;
            if (int32_t& mark = room.mark[span.page]; !join || mark == 0) {
                if (join) mark = static_cast<int32_t>(queue.size()) + 1;
                queue.push_back(ranked);
            } else {
                Ranked& known = queue[mark - 1];
                next = known.part;
                known = {std::max(known.score, ranked.score), std::min(known.tie, ranked.tie), span.page, ranked.part};
            }
            room.parts.push_back({head, static_cast<int32_t>(s), next});
        }
    }
    if (join)
        for (const Ranked& ranked : room.queues[0]) room.mark[ranked.page] = 0;
    for (int q = 0; q < queues; ++q) std::make_heap(room.queues[q].begin(), room.queues[q].end(), worse);

    room.undo.clear();
    int chosen = 0;
    size_t idle = 0;
    for (int turn = 0; chosen < budget && idle < static_cast<size_t>(queues); turn = (turn + 1) % queues) {
        auto& queue = room.queues[turn];
        Ranked next{};
        bool found = false;
        while (!found && !queue.empty()) {
            std::pop_heap(queue.begin(), queue.end(), worse);
            next = queue.back();
            queue.pop_back();
            found = !room.mark[next.page];
        }
        if (!found) {
            ++idle;
            continue;
        }
        idle = 0;
        room.mark[next.page] = 1;
        room.undo.push_back(next.page);
        const int count = page_at(next.page).count, left = budget - chosen;
        const int32_t* tokens = slots(next.page);
        if (count <= left) {
            for (int slot = 0; slot < count; ++slot) out[chosen++] = first_ + tokens[slot];
            continue;
        }
        score_slots(next.page, next.part);
        room.order.resize(count);
        for (int slot = 0; slot < count; ++slot) room.order[slot] = slot;
        std::sort(room.order.begin(), room.order.end(), [&](int a, int b) {
            const float x = room.slot_scores[a], y = room.slot_scores[b];
            return x > y || (x == y && tokens[a] < tokens[b]);
        });
        for (int slot = 0; slot < left; ++slot) out[chosen++] = first_ + tokens[room.order[slot]];
    }
    for (int page : room.undo) room.mark[page] = 0;
    return chosen;
}

}  // namespace kvthaw
