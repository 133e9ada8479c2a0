"""What indexing costs beside the model: its share of a prefill (ClusterKV, section V-C) and for PRKV of a decode step (figure
23).

`python -m lab.indexing --out indexing.jsonl`: a JSON line a method.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.engine.graph_runner import ElasticGraph, capturable
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.machine import now, where
from kvthaw.index.hybrid import HybridIndex
from kvthaw.index.units import UnitIndex
from kvthaw.methods import resolve
from lab.bench.shapes import build
from lab.script import Report, options, run_as_script

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEPS = 24


def lines(shape: str, length: int, methods: Sequence[str], *, budget: int = 1024, runs: int = 3) -> Iterator[dict[str, Any]]:
    """Yield a line a method. Raises ConfigError for a method whose index is not one of pages or clusters on the device, CacheError
    where an index that was built beside the prefill is not what it is alone."""
    for name in methods:
        resolve(name)  # a wrong name or option costs no prefill
    device, _ = where()
    model = build(shape, device)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
    with torch.no_grad():
        full = statistics.median([_prefill(model, Cache(model, "full"), ids)[0] for _ in range(runs + 1)][1:])
        for name in methods:
            found = measure(model, name, ids, full, budget=budget, runs=runs)
            yield {"shape": shape, "length": length, "prefill_full_s": full, **found}


def measure(
    model: PreTrainedModel, method: str, ids: Tensor, full: float, *, budget: int = 1024, runs: int = 3
) -> dict[str, Any]:
    """prefill_s: the method's, its offloading and indexing beside it, until all of it is done. indexing_s: the indexes of all
    layers made once more, alone, from the same keys; indexing_share: of full attention's prefill, `full` seconds. beside_share: how
    much longer than that the method's own took. For PRKV also the refresh: of all layers, and its share of `interval` steps."""
    cache = Cache(model, method, budget=budget)
    if not cache.kv.offloaded:
        raise ConfigError(f"dense_layers is {cache.settings.dense_layers}; that leaves no layer to {method}")
    times = [_prefill(model, cache, ids)[0]]
    for _ in range(runs):
        cache = Cache(model, method, budget=budget)
        seconds, token = _prefill(model, cache, ids)
        times.append(seconds)
    indexes = []
    for layer in cache.kv.offloaded:
        index = None if layer.retriever is None else layer.retriever.index
        if not isinstance(index, UnitIndex):
            raise ConfigError(f"method is {method!r}; this benchmark is for pages and clusters on the device")
        indexes.append(index)
    alone = sum(again(cache, number, index) for number, index in enumerate(indexes))
    own = statistics.median(times[1:])
    line: dict[str, Any] = {"method": method, "budget": budget, "prefill_s": own, "prefill_runs_s": times}
    line |= {"indexing_s": alone, "indexing_share": alone / full, "beside_share": own / full - 1}
    if isinstance(indexes[0], HybridIndex):
        step = _step_time(model, cache, token, ids.shape[1])
        refresh = sum(_refresh(index) for index in indexes if isinstance(index, HybridIndex))
        line |= {"refresh_s": refresh, "interval": indexes[0].interval, "step_s": step}
        line |= {"refresh_of_one_step": refresh / step, "refresh_share": refresh / indexes[0].interval / step}
    return line


def _prefill(model: PreTrainedModel, cache: Cache, ids: Tensor) -> tuple[float, Tensor]:
    """Seconds until the prompt is there, on the host and in the index too; and the token that follows."""
    gc.collect()  # a cache refers to itself; its host rows go before the next one's come
    begin = now(ids.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    cache.wait()
    return now(ids.device) - begin, logits[:, -1:].argmax(dim=-1)


def again(cache: Cache, number: int, index: UnitIndex) -> float:
    """Seconds to index a layer once more, alone, the second of two times; and the check that it comes to the same."""
    layer = cache.kv.offloaded[number]
    rows = layer.read(0, index.first, layer.indexed(0)).to(index.context.device)
    keys, values = rows[:, :, 0].contiguous(), rows[:, :, 1].contiguous()
    before, took = {name: table.clone() for name, table in _tables(index).items()}, 0.0
    for _ in range(2):
        took = _timed(keys, lambda: _build(index, keys, values, layer.recent_queries[0]))
    for name, table in _tables(index).items():
        if not torch.equal(table, before[name]):
            raise CacheError(f"layer {layer.number}: {name}, made beside the prefill, is not what it is alone")
    return took


def _build(index: UnitIndex, keys: Tensor, values: Tensor, recent_queries: Tensor) -> None:
    index.build(0, index.first, keys, values, recent_queries)
    index.join()


def _tables(index: UnitIndex) -> dict[str, Tensor]:
    """What select() reads of the one sequence, as far as it is filled."""
    index.join()
    host = index.seqs[0]
    found = {"digests": index.digests[0, :, : host.units], "stops": index.stops[0, :, : host.units + 1]}
    return found | {"order": index.order[0, :, : host.tokens]} if index.mapped else found


def _refresh(index: HybridIndex) -> float:
    """Seconds for the work of a refresh of a layer, the second of two times: keys from the host, static set, pages."""
    took = 0.0
    for _ in range(2):
        took = _timed(index.digests, lambda: index.reorderings([0], index.read(0, index.seqs[0].tokens), *index.windows([0])))
    return took


def _step_time(model: PreTrainedModel, cache: Cache, token: Tensor, position: int) -> float:
    """Seconds of a decode step, the median: captured where that is possible."""
    replay = ElasticGraph(model.forward, cache) if token.is_cuda and capturable(cache) is None else None
    times = []
    for i in range(_STEPS):
        begin = now(token.device)
        if replay is None:
            logits = model(token, past_key_values=cache).logits
        else:
            logits = replay(token, torch.full_like(token, position + i))
        token = logits[:, -1:].argmax(dim=-1)
        times.append(now(token.device) - begin)
    return statistics.median(times[_STEPS // 3 :])


def _timed(on: Tensor, call: Callable[[], object]) -> float:
    begin = now(on.device)
    call()
    return now(on.device) - begin


def main() -> None:
    """Measure methods at one length."""
    given = options(
        __doc__, shape="llama-3.1-8b", length=32768, method="clusterkv,clusterkv-plus,prkv", budget=1024, out=Path, commit=str
    )
    report = Report(given.out, given.commit, bench="indexing")
    for line in lines(given.shape, given.length, given.method.split(","), budget=given.budget):
        report(line)


if __name__ == "__main__":
    run_as_script(main)
