"""A radix tree over token ids, one node a block of tokens; it says which prefixes are kept, and which to drop first."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


class Node:
    """Up to a block of tokens that follow those of its parent. Only a node without children may have fewer. pins: entries with a
    name that contain it."""

    __slots__ = ("children", "parent", "pins", "tokens")

    def __init__(self, parent: Node | None, tokens: Tensor) -> None:
        self.parent, self.tokens, self.pins = parent, tokens, 0
        self.children: dict[bytes, Node] = {}


class PrefixTree:
    """The prefixes that are kept, by salt: prompts of different salts share nothing.

    nodes: all of them, the least recently used first; a node comes after its children, so the first without pins is a leaf.
    pinned: how many have pins.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[Node, None] = {}
        self.pinned = 0
        self._roots: dict[str, Node] = {}

    def match(self, ids: Tensor, salt: str) -> tuple[list[Node], int]:
        """Return the nodes that a prompt [T] begins with, and how many of its tokens they hold. The last node may go on
        differently."""
        path: list[Node] = []
        node, done = self._roots.get(salt), 0
        for block in ids.split(self.block_size):
            if node is None:
                break
            found = node.children.get(_key(block))
            if found is None:
                near = max(node.children.values(), key=lambda child: common(child.tokens, block), default=None)
                same = 0 if near is None else common(near.tokens, block)
                return [*path, near] if near is not None and same else path, done + same
            path.append(found)
            node, done = found, done + len(block)
        return path, done

    def insert(self, ids: Tensor, salt: str) -> Iterator[tuple[Node, bool]]:
        """Yield the nodes that hold a prompt [T], block by block, and whether each is new; a new one is part of the tree once the
        next is asked for. The last may hold more tokens than the prompt has."""
        node = self._roots.setdefault(salt, Node(None, ids[:0]))
        try:
            for block in ids.split(self.block_size):
                longer = (child for child in node.children.values() if common(child.tokens, block) == len(block))
                found = node.children.get(_key(block)) or next(longer, None)
                new = found is None
                found = found or Node(node, block.clone())
                yield found, new
                if node.parent is None:
                    self._roots[salt] = node  # which has gone if the last one behind it was dropped meanwhile
                node.children[_key(found.tokens)] = found
                self.pin(found, 1)  # nothing on the way is dropped meanwhile
                self.pin(node, -1)
                node = found
        finally:
            self.pin(node, -1)
            self.touch(node)

    def covered(self, node: Node) -> list[Node]:
        """Return the nodes beside one that hold less of the same tokens and have no pins."""
        beside = [] if node.parent is None else node.parent.children.values()
        return [
            other
            for other in beside
            if not other.pins
            and len(other.tokens) < len(node.tokens)
            and common(other.tokens, node.tokens) == len(other.tokens)
        ]

    def touch(self, node: Node | None) -> None:
        """Have a node and those before it be the most recently used."""
        while node is not None and node.parent is not None:
            self.nodes.pop(node, None)
            self.nodes[node] = None
            node = node.parent

    def pin(self, node: Node | None, pins: int) -> None:
        """Add pins to a node and those before it, or take them off."""
        while node is not None and node.parent is not None:
            before, node.pins = node.pins, node.pins + pins
            self.pinned += (node.pins > 0) - (before > 0)
            node = node.parent

    def unpinned(self) -> Iterator[Node]:
        """Yield the nodes without pins, the least recently used first."""
        return (node for node in self.nodes if not node.pins)

    def remove(self, node: Node) -> None:
        """Take a node without children out."""
        del self.nodes[node]
        assert node.parent is not None
        del node.parent.children[_key(node.tokens)]
        if node.parent.parent is None and not node.parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root.children}


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()


def common(one: Tensor, other: Tensor) -> int:
    """Return how many tokens two sequences begin with alike."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).nonzero()
    return int(differ[0, 0]) if len(differ) else n
