"""What methods attend to on a pretrained model's own keys, values and queries. Each layer is run alone.

`python -m lab.real_keys --model FILE.gguf --layers 3,8,13,18,23,28 --length 3000 --out FILE` on a CPU. One JSON line a
method and budget, means over KV heads, their query heads and `--steps` steps behind a prompt (models/real_keys.py):

- attention_mass: the share of full attention's weights that is attended to. attended: how many tokens that are.
- output_error: of the layer's output, over the norm of full attention's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvthaw.cache.choice import Choice
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cli.options import budget_of, listed, tokens_of, words
from kvthaw.evaluate.files import read_asset
from kvthaw.methods import METHODS, resolve
from lab.script import Report, options, run_as_script
from models.real_keys import STEPS, Head, capture


def measure(head: Head, method: str, budget: int | float, steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield attention mass, output error and tokens attended of each step."""
    query, keys, values = (head[of].float()[None] for of in ("queries", "keys", "values"))
    keys, values, scale = keys[:, None], values[:, None], float(head["scale"])
    cache = KVCache(Settings(resolve(method), budget=budget), [2], 3)
    chosen: list[Choice | None] = []
    cache.streams.observers.append(lambda layer, query, choice: chosen.append(choice))
    (layer,) = cache.offloaded
    assert isinstance(layer, OffloadedLayer)
    prompt = keys.shape[2] - STEPS
    for start, stop in ((0, prompt), *((at, at + 1) for at in range(prompt, prompt + steps))):
        q, k, v = (x[:, :, start:stop] for x in (query, keys, values))
        out = cache.attend(layer, q, k, v, AttentionParams(scale))[0]
        if start == 0:
            continue
        scores = query[0, :, start].double() @ keys[0, 0, :stop].double().T * scale
        weights = torch.softmax(scores, dim=1)
        seen = torch.zeros(stop, dtype=torch.bool)
        assert layer.plan is not None
        seen[: layer.plan.regions.sink] = True
        seen[layer.indexed(0) :] = True
        if chosen and chosen[-1] is not None:
            rows = chosen[-1].selection.rows[0, 0]
            seen[rows[rows >= 0].long()] = True
        full = weights @ values[0, 0, :stop].double()
        error = (out[:, 0].double() - full).norm(dim=1) / full.norm(dim=1)
        yield float(weights[:, seen].sum(1).mean()), float(error.mean()), float(seen.sum())


def main() -> None:
    """Measure, a JSON line a method and budget."""
    given = options(
        __doc__, model=str, layers="3,8,13,18,23,28", length="3000", text=Path, method="all", budget="64,256,1024", steps=4,
        commit=str, out=Path,
    )  # fmt: skip
    text = read_asset("book.txt") if given.text is None else words(given.text) or ""
    layers, report = [int(one) for one in given.layers.split(",")], Report(given.out, given.commit)
    heads = capture(given.model, layers, text, tokens_of(given.length))
    about = {"model": Path(given.model).stem, "layers": layers, "heads": len(heads), "length": tokens_of(given.length)}
    names = [name for name in METHODS if name != "full"] if given.method == "all" else given.method.split(",")
    for name in names:
        for budget in listed([given.budget], budget_of, "--budget"):
            torch.manual_seed(0)
            found: list[Any] = [step for head in heads.values() for step in measure(head, name, budget, given.steps)]
            mass, error, attended = (fmean(column) for column in zip(*found, strict=True))
            measures = {"attention_mass": round(mass, 4), "output_error": round(error, 4), "attended": round(attended, 1)}
            report({**about, "steps": given.steps, "method": name, "budget": budget, **measures})


if __name__ == "__main__":
    run_as_script(main)
