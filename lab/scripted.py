"""Steps whose rows follow a script, so that a model of random weights has the hit rate of real text.

Random weights hardly want a row twice. Here every index is asked as ever, at its full cost, and then its rows give way to
those of a script: a window that moves along a random order of the retrieval region, so that neighbouring steps share exactly
the share that was asked for. It costs one more launch a layer. Rows are then not near each other in the text, as pages would
be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Method, Selection
from kvthaw.errors import ConfigError
from kvthaw.index.around import AroundIndex

_STEPS = 128  # then the script begins again, with a step of new rows


class _Script:
    """What the layers of a cache have in common: step [1] int64, which the first that asked advances; and what each one brings,
    rows [B, H, steps, M] int32 and counts [B, H] int32. Kept here, since none of it is of the indexes."""

    def __init__(self) -> None:
        self.step = torch.empty(0)
        self.first: int | None = None
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


class ScriptedIndex(AroundIndex):
    """An index whose rows are a script's. Everything else is the index's own, its log_weight and partial included."""

    def __init__(self, script: _Script, make: Any, hits: float, shape: IndexContext) -> None:
        super().__init__(shape, make(shape))
        self.script, self.hits = script, hits

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        found, script, layer = self.inner.select(query, budget), self.script, self.context.layer
        if layer not in script.layers or script.layers[layer][0].shape[0] != query.shape[0]:
            self._write(query, budget)
        if script.first == layer:
            script.step.add_(1).remainder_(_STEPS)
        rows, counts = script.layers[layer]
        return replace(found, rows=rows.index_select(2, script.step).squeeze(2), counts=counts)

    def _write(self, query: Tensor, budget: int) -> None:
        """rows are a view of orders [B, H, n] in which a step begins (1 - hits) M places after the one before."""
        shape, script, batch, device = self.context, self.script, query.shape[0], query.device
        assert shape.sequences is not None
        sink, end = shape.regions.sink, int(shape.sequences.on_device.starts.min())
        if end - sink < budget:
            raise ConfigError(
                f"hits is {self.hits}; that needs {budget} rows to choose from, and {max(0, end - sink)} tokens stand between sink "
                "and window"
            )
        stride = max(1, round((1 - self.hits) * budget))
        generator = torch.Generator(device=device).manual_seed(shape.seed + shape.layer)
        order = torch.randperm(end - sink, generator=generator, device=device).to(torch.int32) + sink
        starts = torch.randint(end - sink, (batch, shape.kv_heads, 1), generator=generator, device=device)
        at = (starts + torch.arange(budget + stride * (_STEPS - 1), device=device)) % (end - sink)
        counts = torch.full((batch, shape.kv_heads), budget, dtype=torch.int32, device=device)
        script.layers[shape.layer] = order[at].unfold(2, budget, stride), counts
        if script.first is None:
            script.step, script.first = torch.zeros(1, dtype=torch.int64, device=device), shape.layer


def scripted(method: Method, hits: float) -> Method:
    """A method whose steps share `hits` of their rows with the step before, in [0, 1). One cache for each."""
    if method.index is None:
        raise ConfigError(f"hits is {hits}; {method.name} retrieves nothing")
    return replace(method, index=cast(Any, partial(ScriptedIndex, _Script(), method.index, hits)))
