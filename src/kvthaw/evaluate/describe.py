"""What a method is, in words, from its fields alone."""

from __future__ import annotations

from typing import Any

import torch

from kvthaw.cache.host import HostStore
from kvthaw.methods import METHODS, resolve
from kvthaw.types import LayerShape, Method


def describe(method: Method) -> dict[str, Any]:
    """name, paper, unit, kv ("dense", "evicts" or "offloads"), decides ("host", "device" or None) and graph_safe (None where
    nothing is decided)."""
    decides, safe = None, None
    if method.index is not None:
        store = HostStore(1, 1, 64, torch.float32)
        index = method.index(
            LayerShape(0, 1, 1, 64, torch.float32, torch.device("cpu"), store, method.regions.for_budget(256), 64**-0.5)
        )
        decides, safe = "host" if index.on_host else "device", index.graph_safe
    return {
        "name": method.name,
        "paper": method.paper,
        "unit": method.unit,
        "kv": "dense" if method.dense else "evicts" if method.evicts else "offloads",
        "decides": decides,
        "graph_safe": safe,
    }


def markdown() -> str:
    """The table of all methods, as docs/methods.md has it."""
    rows = [describe(resolve(name)) for name in METHODS]
    lines = ["| " + " | ".join(column.replace("_", " ") for column in rows[0]) + " |", "|" + "---|" * len(rows[0])]
    words = {True: "yes", False: "no", None: "-"}
    lines += ["| " + " | ".join(words.get(value, str(value)) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
