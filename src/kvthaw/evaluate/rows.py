"""Samples that share their steps: how many at once, and one cache whose rows they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_ROWS = 32
"""Rows of one cache, where nobody asks for another number."""
MOST_BYTES = 5 << 30
"""Bytes of KV that their prompts take; 25 prompts of 32k of the model that ships."""


class Rows:
    """How many samples a model takes through a step at once.

    asked: so many; None: 32, or fewer where prompts are long, or 1 where the model has layers that transformers serves itself.
    Raises ConfigError for less than 1, and for more than 1 of a model that takes only one.
    """

    def __init__(self, model: PreTrainedModel, asked: int | None) -> None:
        if asked is not None and asked < 1:
            raise ConfigError(f"batch is {asked}; it must be at least 1")
        empty = Cache(model, "full")
        alone = len(empty.kv_layers) != len(empty.layers)
        if alone and asked is not None and asked > 1:
            raise ConfigError(
                f"batch is {asked}; {type(model).__name__} has layers that transformers serves itself, so only 1 works"
            )
        self._asked = 1 if alone else asked
        config = model.config.get_text_config(decoder=True)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._token_bytes = 2 * len(empty.layers) * heads * dim * model.dtype.itemsize

    def at(self, length: int) -> int:
        """Of prompts of so many tokens."""
        return self._asked or max(1, min(MOST_ROWS, MOST_BYTES // (self._token_bytes * length)))


def spread(count: int, rows: int) -> list[tuple[int, int]]:
    """Even spans of `count` samples, of no more than `rows` each."""
    parts = -(-count // rows)
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def joined(model: PreTrainedModel, bases: list[Cache]) -> Cache:
    """One cache whose rows are those of several, each of full attention, which are empty afterwards."""
    if len(bases) == 1:
        return bases[0]
    whole = Cache(model, "full")
    for i, layer in enumerate(whole.layers):
        layer.kv.join([base.layers[i].kv for base in bases])
        layer.know(bases[0].layers[i].module())
        for base in bases:
            base.layers[i].reset()  # nothing is held twice but one layer
    for base in bases:
        base.layers.clear()  # a cache refers to itself
    return whole
