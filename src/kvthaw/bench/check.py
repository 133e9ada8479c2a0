"""What a decode benchmark must have right before it reports a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.bench.fill import Tokens, fill
from kvthaw.bench.settings import HF, Setting
from kvthaw.bench.steps import Decoder
from kvthaw.cache.dense import padded
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPT, _LENGTH = 480, 512
_FEW = 20  # steps that show whether a filled cache goes on, past an update of a ring, whose kernels are compiled then


class Checks:
    """Compares with transformers' own logits, once a method and way to take steps, for one model.

    forwards: of the ways in STEPS that are not eager. Tolerance: as near as transformers' two ways to attend (sdpa and eager)
    give each other's; rounding alone moves those of a deep bfloat16 model of random weights by 8 %.
    """

    def __init__(self, model: PreTrainedModel, forwards: dict[str, Callable[..., Any]]) -> None:
        self.model, self.forwards = model, forwards
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, model.config.vocab_size, (1, _LENGTH), generator=generator)
        self.ids = ids.to(model.device)
        self._passed: set[tuple[object, ...]] = set()
        self._reference: tuple[Tensor, float] | None = None

    def __call__(self, setting: Setting) -> None:
        """Check what a setting relies on, where that was not done yet. Raises CacheError where it does not hold."""
        if setting.method not in HF:
            self._once((setting.method, setting.dense_layers, setting.steps), lambda: self._equals_full(setting))
            if setting.prompt != "run":
                self._once((setting.method, setting.dense_layers), lambda: self._goes_on(setting))
        elif setting.method != HF[0] or setting.prompt != "run":
            self._once((setting.method, setting.prompt), lambda: self._same_cache(setting))

    def _once(self, what: tuple[object, ...], check: Callable[[], None]) -> None:
        if what not in self._passed:
            check()
            self._passed.add(what)

    def _equals_full(self, setting: Setting) -> None:
        """With a budget above the length a method attends to everything."""
        cache = self._cache(setting, 4 * _LENGTH)
        self._near(self._decode(cache, setting.steps), setting, "transformers at a budget above the length")

    def _goes_on(self, setting: Setting) -> None:
        """A filled cache decodes as after a prefill of the same keys and values."""
        run, filled = (self._cache(setting, _LENGTH // 4) for _ in range(2))
        self.model(self.ids[:, :_PROMPT], past_key_values=run)
        fill(filled, lambda number: taken(run, number))
        theirs, ours = (self._decode(cache, "eager", _FEW) for cache in (run, filled))
        self._near(ours, setting, "itself after a prefill of the same keys", theirs)

    def _cache(self, setting: Setting, budget: int) -> Cache:
        sizes = {**setting.sizes(), "budget": None if setting.dense else budget, "retrieved": None}
        return Cache(self.model, setting.resolved(), **sizes)

    def _same_cache(self, setting: Setting) -> None:
        cache = hf_cache(self.model, setting.method)
        if setting.prompt != "run":
            run = Cache(self.model, "full")
            self.model(self.ids[:, :_PROMPT], past_key_values=run)
            fill(cache, lambda number: taken(run, number))
        with attention(self.model, "sdpa"):
            self._near(self._decode(cache, "eager"), setting, "transformers' DynamicCache")

    def _decode(self, cache: DynamicCache, steps: str, count: int = _LENGTH - _PROMPT) -> Tensor:
        """Logits [count, V] of tokens after the prompt, which is processed before them if the cache is empty."""
        if cache.get_seq_length() == 0:
            self.model(self.ids[:, :_PROMPT], past_key_values=cache, logits_to_keep=1)
        decoder = Decoder(self.model, cache, forward=self.forwards.get(steps), compiled=steps == "compiled")
        return torch.stack([decoder.logits(self.ids[:, i : i + 1])[0].float() for i in range(_PROMPT, _PROMPT + count)])

    def _near(self, ours: Tensor, setting: Setting, what: str, theirs: Tensor | None = None) -> None:
        if self._reference is None:
            found = []
            for name in ("sdpa", "eager"):
                with attention(self.model, name):
                    found.append(self._decode(DynamicCache(config=self.model.config), "eager"))
            self._reference = found[0], float((found[1] - found[0]).norm() / found[0].norm())
        reference, rounding = self._reference
        reference = reference if theirs is None else theirs
        error = float((ours - reference).norm() / reference.norm())
        if not error <= max(rounding, 1e-4):
            raise CacheError(
                f"{setting.method}, {setting.steps}, differs from {what} by {error:.4f} of the logits' norm, more than "
                f"transformers' eager attention does from its sdpa ({rounding:.4f})"
            )


def taken(cache: Cache, number: int) -> Tokens:
    """A layer's tokens, of a cache that has only had a prompt of one row."""
    kv = cache.kv_layers[number]
    queries, keys, values = padded(kv)
    return Tokens(number, torch.stack((keys, values), dim=3), queries, kv.scale)


def hits_as_asked(setting: Setting, found: float | None) -> None:
    """Raise CacheError where steps of a script did not find the share of their rows on the device that it gives them, to a row.
    What a method does not keep (`keep=0`) it never finds."""
    if setting.hits is None:
        return
    expected = setting.hits if setting.resolved().keep else 0.0
    rows = setting.budget if isinstance(setting.budget, int) else setting.retrieved
    if found is None or abs(found - expected) > 0.02 + (1 / rows if rows else 0):
        raise CacheError(f"{setting.method} found {found} of its rows on the device; hits is {setting.hits}")


def hf_cache(model: PreTrainedModel, method: str) -> DynamicCache:
    """One of transformers' own caches."""
    return DynamicCache(config=model.config, offloading=method == "hf-offloaded")


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model attends by another function within."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
