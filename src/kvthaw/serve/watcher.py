"""What the server records of steps: what single requests recalled, and how much attention mass sampled steps cover."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.batch import Batch
from kvthaw.engine.request import Request
from kvthaw.evaluate.probe import attention_mass, exact_scores, stored_rows
from kvthaw.inspect.recorder import ExactTopK, Recorder, Recording

EVERY = 256
"""One of this many steps is compared with exact attention, in one layer and request in turn."""
KEPT = 8
"""Recordings that are kept; the oldest go first."""
MOST_TOKENS = 256
"""Tokens of an answer that are recorded."""


@dataclass(eq=False)
class Recall:
    """What a request's tokens recalled.

    pieces: texts of the prompt's tokens before the question; empty until a client asks for passages.
    """

    request: Request
    exact: bool
    recording: Recording = field(default_factory=Recording)
    pieces: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return self.request.finished is None and len(self.recording.selected) < MOST_TOKENS

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return list(self.request.spec.ids.tolist())

    @property
    def answer(self) -> list[int]:
        """The answer's first tokens, one for each step that is recorded."""
        return self.request.tokens[: len(self.recording.selected)]


class Watcher:
    """Watches the steps of a batch. Only the worker's thread uses it, except record() and recalls, which the event loop uses.

    told_mass: called with the attention mass of a sampled step.
    """

    def __init__(self, batch: Batch, told_mass: Callable[[float], object]) -> None:
        self._batch, self._told_mass = batch, told_mass
        self.recalls: OrderedDict[str, Recall] = OrderedDict()
        self._recorder = Recorder(batch.cache.kv)
        self._exact: ExactTopK | None = None
        self._steps = 0

    def record(self, name: str, request: Request, *, exact: bool) -> None:
        """Record a request, which the caller submits next. The latest KEPT recordings stay."""
        self.recalls[name] = Recall(request, exact)
        while len(self.recalls) > KEPT:
            self.recalls.popitem(last=False)

    @property
    def recording(self) -> bool:
        """Whether a running request is recorded: its tokens must be read before the next step."""
        return any(recall.open and recall.request.seq >= 0 for recall in list(self.recalls.values()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap a step."""
        kv, decoding = self._batch.cache.kv, self._batch.decoding
        recalls = list(self.recalls.values())
        ranked = [recall.request.seq for recall in recalls if recall.exact and recall.open and recall.request in decoding]
        self._exact = ExactTopK(kv, ranked) if ranked else None
        self._steps += bool(decoding)
        sample = self._sample if decoding and self._steps % EVERY == 0 and kv.offloaded and not kv.chooser.full else None
        if sample is not None:
            kv.streams.observers.append(sample)
        try:
            yield
        finally:
            if sample is not None:
                kv.streams.observers.remove(sample)
            if self._exact is not None:
                self._exact.detach()

    def take(self, told: Sequence[Request]) -> None:
        """Add the step to the recordings of the requests that got a token."""
        for recall in list(self.recalls.values()):
            request, recording = recall.request, recall.recording
            if request not in told or request.error is not None or len(recording.selected) == MOST_TOKENS:
                continue
            if len(request.tokens) == 1:
                recording.skip()  # the prefill chose it
            else:
                recording.take(request.seq, self._recorder, self._exact if recall.exact else None)

    def _sample(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Compare one layer and request with exact attention."""
        layers, idle = self._batch.cache.kv.offloaded, self._batch.cache.kv.sequences.idle
        decoding = [request for request in self._batch.decoding if request.seq not in idle]
        turn = self._steps // EVERY
        if layer is not layers[turn % len(layers)]:
            return
        seq = decoding[turn // len(layers) % len(decoding)].seq
        rows = stored_rows(layer, seq, query.device)
        if rows is not None:
            self._told_mass(float(attention_mass(layer, seq, exact_scores(layer, query[seq], rows), choice).mean()))
