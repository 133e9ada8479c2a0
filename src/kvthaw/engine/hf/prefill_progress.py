"""Report how far a prompt is through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.chunks import columns_of, drafted

Tell = Callable[[int, int], None]
"""Called with the tokens of a prompt that are through the model, and the tokens of the prompt."""


class PrefillProgress:
    """Call tell(done, total), in tokens, when a prompt begins and after every layer of every forward over a part of it."""

    def __init__(self, model: PreTrainedModel, tell: Tell) -> None:
        self._tell, self.done, self.total = tell, 0, 0
        self._layers = list(getattr(model.get_decoder(), "layers", []))  # if the model has them in the usual place

    def begin(self, total: int) -> None:
        """Begin a prompt of `total` tokens."""
        self.done, self.total = 0, total
        self._tell(0, total)

    @contextmanager
    def part(self, tokens: int) -> Iterator[None]:
        """Context in which the next `tokens` tokens go through the model."""

        def hook(at: int) -> Callable[..., None]:
            return lambda *_: self._tell(self.done + tokens * at // len(self._layers), self.total)

        hooks = [layer.register_forward_hook(hook(at)) for at, layer in enumerate(self._layers[:-1], 1)]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()
        self.done += tokens
        self._tell(self.done, self.total)

    def prompts(self, take: Callable[..., Any], cache_of: Callable[[Any], Cache | None]) -> Callable[..., Any]:
        """Wrap a forward that takes whole prompts by name. Candidates of assisted decoding do not count as prompt."""

        def begun(**given: Any) -> Any:
            cache, tokens = cache_of(given.get(CACHE)), _tokens(given)
            total = 0 if cache is None or tokens == 1 else tokens - drafted(given, cache)
            if total > 1:
                self.begin(total)
            try:
                return take(**given)
            finally:
                self.done = self.total = 0

        return begun

    def parts(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward that `prompts` calls for each part of a prompt."""

        def told(*args: Any, **given: Any) -> Any:
            if self.done == self.total:
                return forward(*args, **given)
            with self.part(min(_tokens(given), self.total - self.done)):
                return forward(*args, **given)

        return told


def _tokens(given: dict[str, Any]) -> int:
    """Count the new tokens among a forward's arguments."""
    return max((given[name].shape[1] for name in ("input_ids", "inputs_embeds") if name in columns_of(given)), default=0)
