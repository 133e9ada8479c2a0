"""The DCI-tree of IceCache, as plainly as the paper states it: one tree, in float64, on keys that it keeps.

`kvthaw.index.forest` is the same tree in C++ for every sequence and KV head of a layer; tests compare it with this one.

A key k is searched as T_K(k) = [k/c, sqrt(1 - |k|^2/c^2)] and a query q as T_Q(q) = [q/|q|, 0] (equations 2 and 3), with
c >= max |k|, under Euclidean distance. Everything here is written multiplied by c, which changes no order: with
lift(k) = sqrt(c^2 - |k|^2), two keys are the nearer the larger a.b + lift(a) lift(b), a key is the nearer to a query the larger
q.k, and the projection of a key on a direction u of R^(d+1) is k.u[:d] + lift(k) u[d].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig, directions
from levels import draw_level

ROOT = -1
"""Parent of the points of the top level."""

TIE = 1e-4
"""Squared distances that differ by less than this share are equal: two points lie equally far from their mean, whatever rounding
says."""

ROOM = 1.25
"""How much larger c^2 is than the longest key's |k|^2, when the tree is built and whenever a longer key comes, which lays out the
whole tree again. Any c that is at least every norm serves. At c = max |k| itself the last bit would decide: RoPE keeps norms, so a
token that comes again has the longest key's norm but for rounding, and its lift would be the root of a cancelled difference."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a search looks for: how near given points are (larger is nearer), its own projections, and the effort to spend: keep
    points to descend from, of every node (each) or of a level, and P-DCI's share of a node's points. strict: those are the answers,
    too, where otherwise all that got a true distance are."""

    nearness: Callable[[Sequence[int]], list[float]]
    projections: Tensor
    keep: int
    retrieve: float
    merit: Callable[[int], float] | None = None  # how good a node is to descend to; None: as near as its point
    each: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Digest:
    """What the keys below a node have in common, all of them, its own point apart.

    points: how many they are. mean: [D], `coarse`, as outliers are when a query looks at them. norm2: the sum of |k|^2.
    spread: the root mean square of their distances to the mean, over sqrt(D): the standard deviation along a direction,
    were they spread alike in all. outliers: first the point farthest from the mean, then each time the one farthest from
    the mean and those before it, of the node's points and the outliers of their nodes; of equals the first.
    """

    points: int
    mean: Tensor
    norm2: float
    spread: float
    outliers: tuple[int, ...]


def coarse(rows: Tensor) -> Tensor:
    """[..., D], each number rounded to one of 255 of its row, the multiples of max |row| / 127 from -127 to 127: eight bits."""
    step = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / step.clamp_min(1e-300)).round() * step


def fine(query: Tensor) -> Tensor:
    """[D], each number rounded to one of 65,535 of it, or to so many that products with codes of 8 bits add up to 31 bits."""
    step = float(query.abs().max()) / min(32767, (2**31 - 1) // (127 * len(query)))
    return (query / max(step, 1e-300)).round() * step


Unit = tuple[int, ...]
"""The points of a page, in order; or one point."""


class DciTree:
    """One tree over the keys at positions first, first + 1, ... of one KV head.

    Points are numbered from 0 in order of position. level[i] is the level drawn for point i; levels without points do not
    exist, so that "one level up" means the next one that has points. parent[i] is a point of the level above, or ROOT. pages[p]
    are the pages of node p, the points whose parent is p, in the order of their projection on the first direction.
    """

    def __init__(
        self,
        head_dim: int,
        config: TreeConfig | None = None,
        *,
        first: int = 0,
        layer: int = 0,
        head: int = 0,
        scale: float | None = None,
    ) -> None:
        self.config = config or TreeConfig()
        self.scale = head_dim**-0.5 if scale is None else scale  # of q.k in attention
        self.first, self.layer, self.head = first, layer, head
        self.directions = directions(self.config, layer, head, head_dim).double()
        self.keys = torch.empty(0, head_dim, dtype=torch.float64)
        self.level: list[int] = []
        self.parent: list[int] = []
        self.pages: dict[int, list[list[int]]] = {ROOT: []}
        self.radius2 = 0.0  # c^2
        self._lift = self.keys, -1.0, self.keys.new_empty(0)

    def __len__(self) -> int:
        return len(self.level)

    # -- the space ---------------------------------------------------------------------------------------------------------

    @property
    def lift(self) -> Tensor:
        """[n]: sqrt(c^2 - |k|^2)."""
        if self._lift[0] is not self.keys or self._lift[1] != self.radius2:
            lift = (self.radius2 - self.keys.square().sum(1)).clamp_min(0).sqrt()
            self._lift = self.keys, self.radius2, lift
        return self._lift[2]

    def projections(self, points: Sequence[int]) -> Tensor:
        """[len(points), composites * simples]."""
        index = torch.as_tensor(points, dtype=torch.int64)
        return self.keys[index] @ self.directions[:, :-1].T + self.lift[index, None] * self.directions[:, -1]

    def closeness(self, point: int, others: Sequence[int]) -> list[float]:
        """How near keys are to a key, larger is nearer: c^2 (1 - distance^2 / 2)."""
        index = torch.as_tensor(others, dtype=torch.int64)
        near: list[float] = (self.keys[index] @ self.keys[point] + self.lift[index] * self.lift[point]).tolist()
        return near

    def levels(self) -> list[int]:
        """The levels that have points, from the top."""
        return sorted(set(self.level), reverse=True)

    def at_level(self, level: int) -> list[int]:
        return [i for i, own in enumerate(self.level) if own == level]

    # -- building, algorithm 2 ---------------------------------------------------------------------------------------------

    def build(self, keys: Tensor) -> None:
        """Index keys [n, D] from the top level down: parents are searched in the tree above (or all compared with)."""
        keys = self._finite(keys, self.first)
        self.keys = keys
        self.level = [draw_level(self.config, self.layer, self.head, self.first + i) for i in range(len(keys))]
        self.parent = [ROOT] * len(keys)
        self.radius2 = ROOM * float(keys.square().sum(1).max()) if len(keys) else 0.0
        present = self.levels()
        self._no_pages()
        if present:
            self._fill_nodes(self.at_level(present[0]))
        for above, below in itertools.pairwise(present):
            orphans = self.at_level(below)
            if self.config.build_beam:
                for i in orphans:
                    self.parent[i] = self._nearest(self._probe_key(i, "build"), above)
            else:
                self._adopt(orphans, self.at_level(above))
            self._fill_nodes(orphans)

    def _adopt(self, orphans: Sequence[int], parents: Sequence[int]) -> None:
        """Give each orphan its nearest parent, the first of equals."""
        for i in orphans:
            near = self.closeness(i, parents)
            self.parent[i] = parents[near.index(max(near))]

    def _nearest(self, probe: Probe, level: int) -> int:
        """The nearest point of a level that a search finds, the first of equals."""
        found = self.search(probe, level)[-1]
        return min(found, key=lambda i: (-found[i], i))

    def _fill_nodes(self, points: Sequence[int]) -> None:
        """Lay out the pages of the nodes whose points these are, all of a level."""
        nodes: dict[int, list[int]] = {}
        for i in points:
            nodes.setdefault(self.parent[i], []).append(i)
        for node, members in nodes.items():
            self._fill(node, members)

    def _no_pages(self) -> None:
        self.pages = {ROOT: []}
        for i, level in enumerate(self.level):
            if level > 1:
                self.pages[i] = []

    def _fill(self, node: int, members: Sequence[int]) -> None:
        """Sorted by projection, a node's members fill as few pages as hold them, near-equally."""
        ordered = self._ordered(members)
        count = -(-len(ordered) // self.config.page_size)
        cuts = [b * len(ordered) // count for b in range(count + 1)] if count else []
        self.pages[node] = [ordered[a:b] for a, b in itertools.pairwise(cuts)]

    def _ordered(self, members: Sequence[int]) -> list[int]:
        line = self.projections(members)[:, 0].tolist() if members else []
        return [i for _, i in sorted(zip(line, members, strict=True))]

    def members(self, node: int) -> list[int]:
        """The points of a node, in order."""
        return [i for page in self.pages[node] for i in page]

    # -- digests -----------------------------------------------------------------------------------------------------------

    def digests(self) -> dict[int, Digest]:
        """The digest of every node that has points, from the lowest up."""
        found: dict[int, Digest] = {}
        for node in sorted((i for i in self.pages if i != ROOT and self.members(i)), key=lambda i: self.level[i]):
            members = sorted(self.members(node))
            below = [found[i] for i in members if i in found]
            keys = self.keys[torch.tensor(members)]
            points = len(members) + sum(digest.points for digest in below)
            mean = torch.stack([keys.sum(0), *(digest.points * digest.mean for digest in below)]).sum(0) / points
            norm2 = float(keys.square().sum()) + sum(digest.norm2 for digest in below)
            spread = math.sqrt(max(0.0, norm2 / points - float(mean.square().sum())) / len(mean))
            candidates = sorted({*members, *(o for digest in below for o in digest.outliers)})
            around, outliers = [mean], list[int]()
            while candidates and len(outliers) < self.config.outliers:
                apart = torch.cdist(self.keys[torch.tensor(candidates)], torch.stack(around)).amin(1).square().tolist()
                farthest = 0
                for i, own in enumerate(apart):
                    farthest = i if own > (1 + TIE) * apart[farthest] else farthest
                outliers.append(candidates.pop(farthest))
                around.append(self.keys[outliers[-1]])
            found[node] = Digest(points, coarse(mean), norm2, spread, tuple(outliers))
        return found

    # -- searching, algorithm 4 --------------------------------------------------------------------------------------------

    def search(self, probe: Probe, level: int) -> list[dict[int, float]]:
        """From the root down to a level: the points that got a true distance, and how near they are, level by level.

        Where no point of the beam has children, it descends from every point of the level, so that no level comes out empty."""
        nodes, seen = [ROOT], []
        for current in self.levels():
            if current < level:
                break
            here: dict[int, float] = {}
            found = [self.prioritized_dci(node, probe) for node in nodes]
            for each in found:
                here |= dict(zip(each, probe.nearness(each), strict=True))
            merit = here if probe.merit is None else {i: probe.merit(i) for i in here}
            best = [sorted(some, key=lambda i: (-merit[i], i))[: probe.keep] for some in (found if probe.each else [[*here]])]
            seen.append({i: here[i] for some in best for i in some} if probe.strict else here)
            below = [i for some in best for i in some if self.pages.get(i)]
            nodes = below or [i for i in self.at_level(current) if self.pages.get(i)]
        return seen

    def prioritized_dci(self, node: int, probe: Probe) -> list[int]:
        """The members of a node that deserve a true distance: near in the largest projected distance over the simple indices
        of some composite one."""
        members = self.members(node)
        if not members:
            return []
        batches = -(-math.ceil(probe.retrieve * len(members)) // self.config.retrieve_batch)
        retrieve = min(len(members), batches * self.config.retrieve_batch)
        apart = (self.projections(members) - probe.projections).abs()
        bound = apart.view(len(members), self.config.composites, self.config.simples).amax(2).amin(1)
        priority = dict(zip(members, bound.tolist(), strict=True))
        return sorted(priority, key=lambda i: (priority[i], i))[:retrieve]

    def _probe_query(self, query: Tensor, budget: int) -> Probe:
        config, norm = self.config, float(query.norm())
        digests = self.digests() if config.descend == "digest" else {}
        target = self.directions[:, :-1] @ query * (math.sqrt(self.radius2) / norm if norm else 0.0)

        exact, asked = config.descend != "digest", fine(query)

        def nearness(points: Sequence[int]) -> list[float]:
            keys = self.keys[torch.as_tensor(points, dtype=torch.int64)]
            return [float(x) for x in (keys @ query if exact else coarse(keys) @ asked).tolist()]

        def merit(node: int) -> float:
            if node not in digests:
                return -math.inf
            digest = digests[node]
            odd: list[float] = (coarse(self.keys[list(digest.outliers)]) @ asked).tolist()
            return max([float(digest.mean @ asked) + config.spread * norm * digest.spread, *odd])

        pages = -(-budget * (1 if config.descend == "node" else 2) // config.page_size)
        return Probe(
            nearness,
            target,
            max(config.query_beam, math.ceil(config.query_beam_share * len(self)), pages),
            config.query_retrieve_share,
            merit if config.descend == "digest" else None,
            config.descend == "node",
            config.answers == "best",
        )

    def _probe_key(self, point: int, task: str) -> Probe:
        beam, share = (getattr(self.config, f"{task}_{name}") for name in ("beam", "retrieve_share"))
        return Probe(lambda points: self.closeness(point, points), self.projections([point])[0], beam, share)

    # -- selecting pages, algorithm 3, and cutting them to a budget --------------------------------------------------------

    def select(self, queries: Tensor, budget: int) -> list[int]:
        """At most `budget` positions, none twice, for the queries [G, D] of the heads that share these keys.

        Units, pages or single tokens, are taken in rank order, whole, while they fit. Of a page that does not fit, its best
        tokens that got a true distance fill what is left (then its other tokens, in order), so that no budget is wasted while
        pages are left.
        """
        if budget >= len(self):
            return [self.first + i for i in range(len(self))]
        if self.config.unit == "page":
            home = {i: tuple(page) for pages in self.pages.values() for page in pages for i in page}
        else:
            home = {i: (i,) for i in range(len(self))}
        heads = []
        for query in queries.double():
            seen: dict[int, float] = {}
            for level in self.search(self._probe_query(query, budget), 1):
                seen |= level
            heads.append(seen)
        if self.config.merge == "share":
            heads = [self._normalised(heads)]
        ranked = [self._rank(seen, home) for seen in heads]
        chosen: list[int] = []
        taken: set[Unit] = set()
        turn = 0
        while len(chosen) < budget and any(ranked):
            seen, units = heads[turn % len(heads)], ranked[turn % len(heads)]
            turn += 1
            while units and units[0] in taken:
                units.pop(0)
            if not units:
                continue
            unit = units.pop(0)
            taken.add(unit)
            room = budget - len(chosen)
            chosen += unit if len(unit) <= room else sorted(unit, key=lambda i: (-seen.get(i, -math.inf), i))[:room]
        return [self.first + i for i in chosen]

    def _rank(self, seen: dict[int, float], home: dict[int, Unit]) -> list[Unit]:
        """Units with a seen token, the best first; of equals the one with the earliest seen token."""
        scores: dict[Unit, list[float]] = {}
        earliest: dict[Unit, int] = {}
        for i, score in seen.items():
            scores.setdefault(home[i], []).append(score)
            earliest[home[i]] = min(i, earliest.get(home[i], i))
        rank = {unit: max(values) for unit, values in scores.items()}
        return sorted(scores, key=lambda unit: (-rank[unit], earliest[unit]))

    def _normalised(self, heads: Sequence[dict[int, float]]) -> dict[int, float]:
        """One score a token for the group: the largest of its log shares in the heads' attention over what they saw."""
        joint: dict[int, float] = {}
        for seen in heads:
            lse = float(torch.logsumexp(torch.tensor(list(seen.values()), dtype=torch.float64) * self.scale, 0))
            for i, score in seen.items():
                joint[i] = max(joint.get(i, -math.inf), score * self.scale - lse)
        return joint

    # -- changing ----------------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor) -> None:
        """Insert the keys [n, D] of the next n positions, one after the other."""
        keys = self._finite(keys, self.first + len(self))
        for key in keys:
            self._insert(key)

    def _insert(self, key: Tensor) -> None:
        new = len(self)
        level = draw_level(self.config, self.layer, self.head, self.first + new)
        present = self.levels()
        above = min((one for one in present if one > level), default=None)
        below = max((one for one in present if one < level), default=None)
        self.keys = torch.cat([self.keys, key[None]])
        norm2 = float(key.square().sum())
        if norm2 > self.radius2:  # c grows: every lift and projection changes, and with them the order in the nodes
            self.radius2 = ROOM * norm2
            for node in self.pages:
                self._fill(node, self.members(node))

        probe = self._probe_key(new, "insert")
        parent = ROOT if above is None else self._nearest(probe, above)
        moved: list[int] = []
        if below is not None and level not in present:  # a level of its own: it becomes the parent of all below
            moved = self.at_level(below)
        elif below is not None:
            found = self.search(probe, below)[-1]
            moved = sorted(i for i, near in found.items() if near > self.closeness(i, [self.parent[i]])[0])
        self.level.append(level)
        self.parent.append(parent)
        if level > 1:
            self.pages[new] = []
        self._move(moved, new)
        self._place(new)

    def _move(self, points: Sequence[int], node: int) -> None:
        """Give points of other nodes to a node that has none; pages of both are laid out again."""
        gone = set(points)
        for old in sorted({self.parent[i] for i in points}):
            self._fill(old, [i for i in self.members(old) if i not in gone])
        for i in points:
            self.parent[i] = node
        if points:
            self._fill(node, points)

    def _place(self, point: int) -> None:
        """Put a point into its place in the order of its node; a full page becomes two halves."""
        pages = self.pages[self.parent[point]]
        if not pages:
            pages.append([point])
            return
        line = self.projections([point])[0, 0].item()
        ends = [(self.projections(page[-1:])[0, 0].item(), page[-1]) for page in pages]
        where = next((p for p, end in enumerate(ends) if (line, point) <= end), len(pages) - 1)
        page = self._ordered([*pages[where], point])
        half = (len(page) + 1) // 2
        pages[where : where + 1] = [page] if len(page) <= self.config.page_size else [page[:half], page[half:]]

    def truncate(self, length: int) -> None:
        """Forget positions >= length. Children of a point that goes get the nearest parent that stays."""
        keep = max(0, length - self.first)
        if keep >= len(self):
            return
        parent_was = self.parent[:keep]
        self.keys, self.level, self.parent = self.keys[:keep], self.level[:keep], self.parent[:keep]
        present = self.levels()
        orphans = [i for i, parent in enumerate(parent_was) if parent >= keep]
        for level in present:
            above = min((one for one in present if one > level), default=None)
            here = [i for i in orphans if self.level[i] == level]
            if above is None:
                for i in here:
                    self.parent[i] = ROOT
            else:
                self._adopt(here, self.at_level(above))
        touched = {parent for i, parent in enumerate(self.parent) if parent_was[i] != parent}
        for node in list(self.pages):
            if node >= keep:
                del self.pages[node]
                continue
            own = [i for i in range(keep) if self.parent[i] == node]
            if node in touched or len(own) != len(self.members(node)):
                self._fill(node, own)
        if not keep:
            self.radius2 = 0.0

    def _finite(self, keys: Tensor, position: int) -> Tensor:
        keys = keys.double()
        bad = (~keys.isfinite().all(1)).nonzero()
        if len(bad):
            where = f"layer {self.layer}, KV head {self.head}"
            raise ValueError(f"{where}: the key at position {position + int(bad[0])} is not finite")
        return keys

    # -- state and invariants ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The tree as tensors, without keys: pages in order of node (the root first) and of place."""
        nodes = sorted(self.pages)
        pages = [(node, page) for node in nodes for page in self.pages[node]]
        return {
            "first": torch.tensor(self.first, dtype=torch.int64),
            "radius2": torch.tensor(self.radius2, dtype=torch.float64),
            "level": torch.tensor(self.level, dtype=torch.uint8),
            "parent": torch.tensor(self.parent, dtype=torch.int32),
            "page_node": torch.tensor([node for node, _ in pages], dtype=torch.int32),
            "page_count": torch.tensor([len(page) for _, page in pages], dtype=torch.int32),
            "members": torch.tensor([i for _, page in pages for i in page], dtype=torch.int32),
        }

    def load(self, state: dict[str, Any], keys: Tensor) -> None:
        """Become the tree of a state, over its keys [n, D]."""
        self.first, self.radius2 = int(state["first"]), float(state["radius2"])
        self.keys = keys.double()
        self.level, self.parent = state["level"].tolist(), state["parent"].tolist()
        self._no_pages()
        done = 0
        for node, count in zip(state["page_node"].tolist(), state["page_count"].tolist(), strict=True):
            self.pages[node].append(state["members"][done : done + count].tolist())
            done += count

    def invariants(self, *, nearest: bool = False, tolerance: float = 1e-5) -> None:
        """Raise AssertionError where the tree is not one. nearest: as after build(), every parent is the nearest there is;
        tolerance: relative to c, for a tree that was made in float32."""
        n, size, c = len(self), self.config.page_size, math.sqrt(self.radius2)
        slack = tolerance * max(c, 1e-30)
        assert self.level == [draw_level(self.config, self.layer, self.head, self.first + i) for i in range(n)], "levels"
        assert set(self.pages) == {ROOT} | {i for i in range(n) if self.level[i] > 1}, "nodes"
        everyone = [i for node in self.pages for i in self.members(node)]
        assert sorted(everyone) == list(range(n)), "each point stands in exactly one page"
        assert not n or float(self.keys.square().sum(1).max()) <= self.radius2 * (1 + tolerance), "c is at least every norm"
        for node, pages in self.pages.items():
            members = self.members(node)
            assert all(self.parent[i] == node for i in members), f"node {node} holds another's children"
            assert all(1 <= len(page) <= size for page in pages), f"node {node} has a page that is empty or too full"
            if len(members) > size:
                assert all(len(page) >= size // 2 for page in pages), f"node {node} has a page under its minimum fill"
            line = self.projections(members)[:, 0].tolist() if members else []
            assert all(b >= a - slack for a, b in itertools.pairwise(line)), f"node {node} is out of order"
        present = self.levels()
        for above, below in zip([None, *present], present, strict=False):
            parents = self.at_level(above) if above is not None else []
            for i in self.at_level(below):
                if above is None:
                    assert self.parent[i] == ROOT, f"point {i} of the top level has a parent"
                    continue
                assert self.parent[i] in parents, f"the parent of point {i} is not one level up"
                if nearest:
                    near = dict(zip(parents, self.closeness(i, parents), strict=True))
                    assert near[self.parent[i]] >= max(near.values()) - slack * c, f"point {i} has a nearer parent"


def snapshot(index: TreeIndex, seq: int, head: int) -> dict[str, Tensor]:
    """The tree of a sequence and KV head as tensors: levels, parents and pages, without keys."""
    points, pages = index.forest.size(seq), index.forest.pages(seq, head)
    state = {
        "norm2": torch.empty(points, dtype=torch.float64),
        "raw": torch.empty((points, index.config.composites * index.config.simples), dtype=torch.float32),
        "level": torch.empty(points, dtype=torch.uint8),
        "parent": torch.empty(points, dtype=torch.int32),
        "radius2": torch.empty((), dtype=torch.float64),
        "page_node": torch.empty(pages, dtype=torch.int32),
        "page_count": torch.empty(pages, dtype=torch.int32),
        "members": torch.empty(points, dtype=torch.int32),
    }
    addresses = [tensor.data_ptr() for tensor in state.values()]
    index.forest.points(seq, head, *addresses[:4])
    index.forest.save(seq, head, *addresses[4:])
    return {"first": torch.tensor(index.forest.first(seq), dtype=torch.int64), **state}


def snapshots(index: TreeIndex, seq: int) -> list[dict[str, Tensor]]:
    """Of every KV head."""
    return [snapshot(index, seq, head) for head in range(index.context.kv_heads)]


def tree_of(index: TreeIndex, seq: int, head: int) -> DciTree:
    """One of an index's trees as the plain definition, with its keys."""
    shape = index.context
    tree = DciTree(shape.head_dim, index.config, layer=shape.layer, head=head, scale=shape.scale)
    keys = shape.store.read(seq, index.forest.first(seq), index.length(seq))[head, :, 0]
    tree.load(snapshot(index, seq, head), keys)
    return tree


def check_trees(index: TreeIndex, *, nearest: bool = False) -> None:
    """Raise AssertionError where a tree of an index is not one. nearest: as after build(), every parent is the nearest there is."""
    seqs = range(index.context.store.seqs)
    bases = index.context.store.table.on_cpu()[: len(seqs)].contiguous()
    wrong = index.forest.check(bases.data_ptr(), bases.shape[1])
    assert not wrong, wrong
    for seq in seqs:
        for head in range(index.context.kv_heads if index.forest.has(seq) else 0):
            tree = tree_of(index, seq, head)
            tree.invariants(nearest=nearest)
            raw = tree.keys.float() @ tree.directions[:, :-1].T.float()
            saved = snapshot(index, seq, head)["raw"]
            assert torch.allclose(saved, raw, rtol=1e-4, atol=1e-4 * max(1.0, tree.radius2**0.5)), "raw projections"
            if index.config.descend == "digest":
                same_digests(index, seq, head, tree)


def same_digests(index: TreeIndex, seq: int, head: int, tree: DciTree) -> None:
    """Raise AssertionError where a node's digest is not the definition's."""
    nodes, dim, most = [i for i in range(len(tree)) if tree.level[i] > 1], index.context.head_dim, index.config.outliers
    spread, rows = torch.empty(len(nodes)), torch.empty(len(nodes), 1 + most, dim)
    outliers = torch.empty(len(nodes), most, dtype=torch.int32)
    index.forest.digests(seq, head, spread.data_ptr(), rows.data_ptr(), outliers.data_ptr())
    defined, size = tree.digests(), max(1e-30, tree.radius2**0.5)
    close = 4 * max(torch.finfo(index.context.dtype).eps, torch.finfo(torch.float32).eps) * size
    for at, node in enumerate(nodes):
        held = [i for i in outliers[at].tolist() if i >= 0]
        if node not in defined:
            assert not held, f"node {node} has no points, but outliers"
            continue
        want = defined[node]
        odd = coarse(tree.keys[held])
        for own, row in zip(rows[at].double(), [want.mean, *odd, *[want.mean] * most], strict=False):
            step = 1.001 * float(row.abs().max()) / 127  # what lies between two steps may be rounded to either
            assert torch.allclose(own, row, rtol=0, atol=step + 1e-6 * size), f"the digest of node {node}"
        assert abs(float(spread[at]) - want.spread) <= close, f"the spread of node {node}"
        assert len(held) == len(want.outliers) == len(set(held)), f"the outliers of node {node}"
