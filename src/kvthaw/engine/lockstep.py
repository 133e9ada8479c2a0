"""The processes of a split model serve the same requests in the same steps: the first decides, the others follow."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.engine.grammar import Grammars, Source
from kvthaw.engine.request import Request
from kvthaw.engine.scheduler import Scheduler
from kvthaw.errors import CacheError, KvthawError


@dataclass(frozen=True, slots=True)
class Submit:
    """A request is submitted, without its tokenizer and grammar; number: how later changes name it; decodes: it has text and stop
    strings; grammar: the source of its grammar."""

    number: int
    request: Request
    decodes: bool
    grammar: Source | None

    @classmethod
    def of(cls, number: int, request: Request) -> Submit:
        """Describe a request that has not been submitted."""
        how, grammar = replace(request.sampling, grammar=None), request.sampling.grammar
        plain = replace(request, decoded=None, sampling=how)
        return cls(number, plain, request.decoded is not None, None if grammar is None else grammar.source)


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is cancelled, unless it has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The prompt that is kept under a name is forgotten, if there is one."""

    name: str


Change = Submit | Cancel | Forget


class Lockstep:
    """Connects the schedulers of all processes that a model is split over.

    Before each step rank 0 sends what changes, and every process makes these changes and takes the step. With the next changes all
    processes compare what their steps gave, and raise CacheError where they differ. All of them make a Lockstep at the same time.
    A model that is not split has one too, which does nothing.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.size = ranks.size
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None
        self._digest = 0

    def note(self, told: Sequence[Request]) -> None:
        """Note the requests that the latest step told."""
        if self.size > 1:
            self._digest = zlib.crc32(repr([(one.tokens[-1:], one.finished) for one in told]).encode(), self._digest)

    def send(self, changes: Sequence[Change] | None) -> None:
        """Rank 0: tell the other processes what changes before the next step; None: there is none."""
        if self.size > 1:
            self._exchange(b"" if changes == [] else pickle.dumps(changes))

    def receive(self) -> Sequence[Change] | None:
        """Other ranks: wait for what rank 0 sends."""
        data = self._exchange(b"")
        changes: Sequence[Change] | None = pickle.loads(data) if data else []
        return changes

    def follow(self, scheduler: Scheduler, tokenizer: Any) -> None:
        """Other ranks: do what rank 0 does until it ends."""
        requests, grammars = dict[int, Request](), None
        prefix = scheduler.batch.prefix_cache
        while (changes := self.receive()) is not None:
            for change in changes:
                match change:
                    case Submit(number, request, decodes, grammar):
                        if grammar is not None:
                            grammars = grammars or Grammars(tokenizer, scheduler.batch.vocabulary)
                            how = replace(request.sampling, grammar=grammars.compile(grammar))
                            request = replace(request, sampling=how)
                        if decodes:
                            request.decode(tokenizer)
                        try:
                            requests[number] = scheduler.submit(request)
                        except KvthawError:  # rank 0 tells the client
                            requests.pop(number, None)
                    case Cancel(number):
                        if number in requests:  # those that end are dropped with the step
                            scheduler.cancel(requests.pop(number))
                    case Forget(name):
                        if prefix is not None and name in prefix.entries:
                            prefix.forget(name)
            if scheduler.busy:
                self.note(scheduler.step())
            requests = {number: request for number, request in requests.items() if request.finished is None}

    def _exchange(self, data: bytes) -> bytes:
        """Return what rank 0 gave, in every process. One small collective, two where rank 0 gave something."""
        head = torch.tensor([len(data), self._digest])
        heads = [torch.empty_like(head) for _ in range(self.size)]
        dist.all_gather(heads, head, group=self._group)
        if any(int(other[1]) != self._digest for other in heads):
            raise CacheError("the processes of a split model took different steps")
        length = int(heads[0][0])
        if length == 0:
            return b""
        sent = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
        dist.broadcast(sent, 0, group=self._group)
        return sent.numpy().tobytes()
