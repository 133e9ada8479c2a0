"""Lockstep of a split model's processes: rank 0 decides, and all ranks serve the same requests in the same steps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.engine.grammar import ComingGrammars, Grammars, Source
from kvthaw.engine.request import Request, RequestSpec
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.errors import CacheError, KvthawError


def _shallow(one: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


@dataclass(frozen=True, slots=True)
class Change:
    """What rank 0 sends to the other ranks. A change whose fields are no JSON overrides plain() and read()."""

    def plain(self) -> dict[str, Any]:
        """Return a form that JSON can represent."""
        return _shallow(self)

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Self:
        """Return the change that plain() described."""
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Submit(Change):
    """A request is submitted.

    number: identifies it in later changes.
    spec: what is asked for, without tokenizer and grammar.
    decodes: it needs text and stop strings.
    grammar: the source of its grammar.
    priority: as for `Scheduler.submit`.
    """

    number: int
    spec: RequestSpec
    decodes: bool
    grammar: Source | None
    priority: int

    @classmethod
    def of(cls, number: int, request: Request, priority: int) -> Submit:
        """Describe a request that has not been submitted."""
        spec, grammar = request.spec, request.spec.sampling.grammar
        plain = replace(spec, tokenizer=None, sampling=replace(spec.sampling, grammar=None))
        return cls(number, plain, spec.tokenizer is not None, None if grammar is None else grammar.source, priority)

    def plain(self) -> dict[str, Any]:
        spec = self.spec
        how = _shallow(spec.sampling) | {"logit_bias": list(spec.sampling.logit_bias.items())}  # JSON's keys are no numbers
        given = {"ids": spec.ids.tolist(), "stop": sorted(spec.stop), "sampling": how}
        return _shallow(self) | {"spec": _shallow(spec) | given}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Self:
        spec = dict(plain["spec"])
        spec["sampling"] = Sampling(**spec["sampling"] | {"logit_bias": dict(spec["sampling"]["logit_bias"])})
        spec["ids"], spec["stop"] = torch.tensor(spec["ids"], dtype=torch.int64), frozenset(spec["stop"])
        spec["text_after"] = tuple(spec["text_after"])
        return cls(**plain | {"spec": RequestSpec(**spec)})


@dataclass(frozen=True, slots=True)
class Cancel(Change):
    """A request is cancelled, unless it has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget(Change):
    """A named prompt of a salt is forgotten, if there is one."""

    salt: str
    name: str


@dataclass(frozen=True, slots=True)
class Compile(Change):
    """Rank 0 starts to compile a grammar. Other ranks compile it at the same time, on threads, so that no step waits for it
    later."""

    source: Source


_KINDS: dict[str, type[Change]] = {kind.__name__: kind for kind in (Submit, Cancel, Forget, Compile)}


def write(changes: Sequence[Change] | None) -> bytes:
    """Return changes as JSON, so that reading them runs no code."""
    return json.dumps(changes if changes is None else [[type(each).__name__, each.plain()] for each in changes]).encode()


def read(data: bytes) -> list[Change] | None:
    """Return the changes that write() wrote."""
    found = json.loads(data)
    return None if found is None else [_KINDS[kind].read(plain) for kind, plain in found]


class Lockstep:
    """Synchronize the schedulers of all processes of a split model.

    Before each step rank 0 sends the changes, and every process applies them and takes the step. With the next changes, all
    processes compare the results of their steps, and raise CacheError if they differ. All processes must create their
    Lockstep together. For a model that is not split, it does nothing.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.size = ranks.size
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None
        self._digest = 0

    def submits(self, numbers: Sequence[int], requests: Sequence[Request], priorities: Sequence[int]) -> list[Change]:
        """Return the changes that rank 0 sends for submitted requests."""
        return [Submit.of(*each) for each in zip(numbers, requests, priorities, strict=True)] if self.size > 1 else []

    def note(self, told: Sequence[Request]) -> None:
        """Record the requests that the latest step returned."""
        if self.size > 1:
            self._digest = zlib.crc32(repr([(one.tokens[-1:], one.finished) for one in told]).encode(), self._digest)

    def send(self, changes: Sequence[Change] | None) -> None:
        """On rank 0: send the changes before the next step to the other processes. None: there is no next step."""
        if self.size > 1:
            self._exchange(b"" if changes == [] else write(changes))

    def receive(self) -> Sequence[Change] | None:
        """On other ranks: wait for rank 0's changes."""
        data = self._exchange(b"")
        return read(data) if data else []

    def follow(self, scheduler: Scheduler, tokenizer: Any) -> None:
        """On other ranks: repeat rank 0's steps until it ends."""
        requests = dict[int, Request]()
        grammars = ComingGrammars(lambda: Grammars(tokenizer, scheduler.batch.vocabulary))
        prefix = scheduler.batch.prefix_cache
        while (changes := self.receive()) is not None:
            for change in changes:
                match change:
                    case Submit(number, spec, decodes, grammar, priority):
                        if grammar is not None:
                            spec = replace(spec, sampling=replace(spec.sampling, grammar=grammars.get(grammar)))
                        request = Request(replace(spec, tokenizer=tokenizer if decodes else None))
                        try:
                            requests[number] = scheduler.submit(request, priority=priority)
                        except KvthawError:  # rank 0 reports it to the client
                            requests.pop(number, None)
                    case Cancel(number):
                        if number in requests:  # ended requests are dropped with the step
                            scheduler.cancel(requests.pop(number))
                    case Compile(source):
                        grammars.begin(source)
                    case Forget(salt, name):
                        if prefix is not None and (salt, name) in prefix.entries:
                            prefix.forget(name, salt)
            if scheduler.busy:
                self.note(scheduler.step())
            requests = {number: request for number, request in requests.items() if request.finished is None}

    def _exchange(self, data: bytes) -> bytes:
        """Return rank 0's data in every process. Takes one small collective, and a second one if there is data."""
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
