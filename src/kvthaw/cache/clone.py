"""Copy the tokens of one cache into another, layer by layer, for forks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvthaw.cache.device_layers import DenseLayer, WindowLayer
from kvthaw.cache.finite import check_prompts
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV, LayerShape
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.passes import take_over
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step
from kvthaw.errors import CacheError


def clone(kv: KVCache, sequences: Sequences, layers: Iterable[LayerKV]) -> None:
    """Copy the tokens of `layers`, which belong to another cache, into the empty cache `kv` as its prompt, layer by layer."""
    others = iter(layers)

    def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
        clone_layer(layer, step, next(others))

    if sequences.padded_length:
        kv.append_stored_prompt(sequences.padded_length, list(sequences.left_pad), fill)


def join(kv: KVCache, others: Sequence[KVCache]) -> None:
    """Move the tokens of other dense caches into the empty cache `kv`, their sequences in order.

    At most one layer is in memory twice. The other caches are empty afterwards.
    """
    rows = [(other, seq) for other in others for seq in range(other.sequences.count)]
    kv.sequences.adopt([other.sequences.length(seq) for other, seq in rows])
    step = Step(0, kv.sequences.padded_length, tuple(kv.sequences.left_pad), frozenset())
    for i, layer in enumerate(kv.layers):
        layer.prepare(step, LayerShape.of(others[0].layers[i], 0, None))
        for seq, (other, own) in enumerate(rows):
            layer.load(seq, other.layers[i].state(own), 0)
        for other in others:
            other.layers[i].reset()
    for other in others:
        other.reset()


def clone_layer(layer: OffloadedLayer | DenseLayer, step: Step, other: LayerKV) -> None:
    """Copy the tokens of another cache's layer, which are the step's tokens.

    Rows that the other layer has on the host are shared. An index that would be the same is copied instead of built.
    """
    if isinstance(other, WindowLayer):
        raise CacheError(f"layer {other.number} keeps {other.span.size} tokens, so its cache cannot be forked")
    if isinstance(other, OffloadedLayer):
        check_prompts([other])
        other.wait()
        if isinstance(layer, OffloadedLayer) and can_reuse(layer, other):
            layer.prepare(step, LayerShape.of(other, 0, None))
            layer.clone_from(other)
            return
    if isinstance(layer, OffloadedLayer):
        _check_queries(layer, other)
        if isinstance(other, DenseLayer):
            layer.prepare(step, LayerShape.of(other, 0, None))
            layer.store.share(other.offloaded(layer.settings.block_size, layer.store.format))
    take_over(layer, other, step)


def _check_queries(layer: OffloadedLayer, other: LayerKV) -> None:
    """Raise CacheError if the index needs all queries of a prompt and the other layer has kept fewer."""
    for seq in range(other.sequences.count) if layer.settings.method.prompt_queries is None else ():
        known, tokens = other.queries(seq).shape[1], other.sequences.length(seq)
        if known < tokens:
            name = layer.settings.method.name
            raise CacheError(
                f"{name} is built with the queries of all {tokens} tokens, and the cache that it is forked from has kept {known}; "
                f"fork {name} from a cache of full:queries=None, or fork {name}:queries={known}"
            )


def can_reuse(layer: OffloadedLayer, other: OffloadedLayer) -> bool:
    """Return whether this layer can copy the other layer's index.

    Both must have the same method object, whose index serves any budget, and equal regions. The other index must be built
    from a single prompt with nothing appended since.
    """
    mine, its, plan = layer.settings, other.settings, other.plan
    known = "method", "seed", "block_size", "kv_dtype"
    same = all(getattr(mine, name) == getattr(its, name) for name in known) and mine.method is its.method
    sequences = other.sequences
    if not same or not mine.method.any_budget or not sequences.prompt_only or plan is None:
        return False
    return mine.plan(sequences.longest, layer.sequences.limit).regions == plan.regions
