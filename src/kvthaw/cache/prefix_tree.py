"""A radix tree over token ids with one block of tokens per node: it finds cached prefixes, and which node to evict first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from torch import Tensor


class Node:
    """Up to a block of tokens that follow the tokens of its parent. Only a leaf may have fewer than a block.

    parent: a root's is the root itself.
    pins: named entries that contain it.
    salt: salt of its prompts, if it is a root.
    order: sorted keys of its children. The longest common prefix with a key is at one of the two neighbours of the key.
    """

    __slots__ = ("children", "order", "parent", "pins", "salt", "tokens")

    def __init__(self, parent: Node | None, tokens: Tensor, salt: str = "") -> None:
        self.parent, self.tokens, self.pins, self.salt = parent or self, tokens, 0, salt
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []

    def add(self, child: Node) -> None:
        """Add a child. It replaces a child with equal tokens."""
        key = _key(child.tokens)
        if key not in self.children:
            insort(self.order, key)
        self.children[key] = child

    def drop(self, child: Node) -> None:
        """Remove a child."""
        key = _key(child.tokens)
        del self.children[key]
        del self.order[bisect_left(self.order, key)]

    def nearest(self, block: Tensor) -> tuple[Node | None, int]:
        """Return the child with the longest common prefix with a block, and the prefix's length; (None, 0) if there is none."""
        at = bisect_left(self.order, _key(block))
        beside = [self.children[key] for key in self.order[max(0, at - 1) : at + 1]]
        same = [common(child.tokens, block) for child in beside]
        best = max(same, default=0)
        return (beside[same.index(best)], best) if best else (None, 0)

    def beginnings(self, tokens: Tensor) -> Iterator[Node]:
        """Yield the children whose tokens are a proper prefix of `tokens`, the longest first."""
        key, at = _key(tokens), bisect_left(self.order, _key(tokens))
        while at:
            child = self.children[self.order[at - 1]]
            same = common(child.tokens, tokens)
            if same == len(child.tokens):
                yield child
                at -= 1
            else:  # all prefixes begin with the tokens that this child shares
                at = bisect_right(self.order, key[: same * tokens.itemsize], hi=at)


class PrefixTree:
    """The cached prefixes, by salt. Prompts with different salts share nothing.

    nodes: all nodes, the least recently used first. A node comes after its children, so the first without pins is a leaf.
    pinned: number of pinned nodes.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[Node, None] = {}
        self.pinned = 0
        self._roots: dict[str, Node] = {}

    def match(self, ids: Tensor, salt: str) -> tuple[list[Node], int]:
        """Return the nodes of a prompt's [T] longest prefix, and its tokens. The last node may continue differently."""
        path: list[Node] = []
        node, done = self._roots.get(salt), 0
        for block in ids.split(self.block_size):
            if node is None:
                break
            found = node.children.get(_key(block))
            if found is None:
                near, same = node.nearest(block)
                return path if near is None else [*path, near], done + same
            path.append(found)
            node, done = found, done + len(block)
        return path, done

    def insert(self, ids: Tensor, salt: str) -> Iterator[tuple[Node, bool]]:
        """Yield (node, new) for each block of a prompt [T]. A new node joins the tree when the next one is requested.

        The last node may hold more tokens than the prompt has.
        """
        node = self._roots.get(salt) or Node(None, ids[:0], salt)
        try:
            for block in ids.split(self.block_size):
                found = node.children.get(_key(block))
                if found is None:
                    near, same = node.nearest(block)
                    found = near if same == len(block) else None
                new = found is None
                found = found or Node(node, block.clone())
                yield found, new
                if node.parent is node:
                    self._roots[salt] = node  # the root was removed if its last child was dropped meanwhile
                node.add(found)
                self._pin(found, 1)  # so that nothing on the path is dropped meanwhile
                node = found
        finally:
            self.pin(node, -1)
            self.touch(node)

    def covered(self, node: Node) -> list[Node]:
        """Return the node's siblings that hold a proper prefix of its tokens and have no pins."""
        return [other for other in node.parent.beginnings(node.tokens) if not other.pins]

    def touch(self, node: Node) -> None:
        """Mark a node and its ancestors as the most recently used."""
        while node.parent is not node:
            self.nodes.pop(node, None)
            self.nodes[node] = None
            node = node.parent

    def pin(self, node: Node, pins: int) -> None:
        """Add `pins` pins to a node and its ancestors; a negative number removes pins."""
        while node.parent is not node:
            self._pin(node, pins)
            node = node.parent

    def unpinned(self) -> Iterator[Node]:
        """Yield the nodes without pins, the least recently used first."""
        return (node for node in self.nodes if not node.pins)

    def remove(self, node: Node) -> None:
        """Remove a leaf."""
        del self.nodes[node]
        parent = node.parent
        parent.drop(node)
        if parent.parent is parent and not parent.children:
            del self._roots[parent.salt]

    def _pin(self, node: Node, pins: int) -> None:
        before, node.pins = node.pins, node.pins + pins
        self.pinned += (node.pins > 0) - (before > 0)


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()


def common(one: Tensor, other: Tensor) -> int:
    """Return the length of the common prefix of two token sequences."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).nonzero()
    return int(differ[0, 0]) if len(differ) else n
