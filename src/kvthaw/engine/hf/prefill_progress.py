"""Report how far a prompt is through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

Tell = Callable[[int, int], None]
"""Called with the tokens of a prompt that are through the model, and the tokens of the prompt."""


class PrefillProgress:
    """Call tell(done, total), in tokens, when a prompt begins and after every layer of every forward over a part of it.

    tell: None: calls nothing.
    """

    def __init__(self, model: PreTrainedModel, tell: Tell | None) -> None:
        self._tell, self.done, self.total = tell, 0, 0
        self._layers = list(getattr(model.get_decoder(), "layers", []))  # if the model has them in the usual place

    def begin(self, total: int) -> None:
        """Begin a prompt of `total` tokens."""
        if self._tell is not None:
            self.done, self.total = 0, total
            self._tell(0, total)

    @contextmanager
    def part(self, tokens: int) -> Iterator[None]:
        """Context in which the next `tokens` tokens go through the model. Tokens behind the prompt do not count."""
        tell, tokens = self._tell, min(tokens, self.total - self.done)
        if tell is None or not tokens:
            yield
            return

        def hook(at: int) -> Callable[..., None]:
            return lambda *_: tell(self.done + tokens * at // len(self._layers), self.total)

        hooks = [layer.register_forward_hook(hook(at)) for at, layer in enumerate(self._layers[:-1], 1)]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()
        self.done += tokens
        tell(self.done, self.total)

    @contextmanager
    def prompt(self, total: int) -> Iterator[None]:
        """Context in which a prompt of `total` tokens goes through the model in parts. A single token is no prompt."""
        if total > 1:
            self.begin(total)
        try:
            yield
        finally:
            self.done = self.total = 0
