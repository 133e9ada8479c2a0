"""The processes of a split model serve the same requests in the same steps: the first decides, the others follow."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.engine.grammar import ComingGrammars, Grammars, Source
from kvthaw.engine.request import Request
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.errors import CacheError, ConfigError, KvthawError


@dataclass(frozen=True, slots=True)
class Submit:
    """A request is submitted, without its tokenizer and grammar; number: how later changes name it; decodes: it has text and stop
    strings; grammar: the source of its grammar; priority: as for `Scheduler.submit`."""

    number: int
    request: Request
    decodes: bool
    grammar: Source | None
    priority: int

    @classmethod
    def of(cls, number: int, request: Request, priority: int) -> Submit:
        """Describe a request that has not been submitted. Raises ConfigError for one with embeddings."""
        if request.embeddings is not None:
            raise ConfigError("embeddings are given; the processes of a split model tell each other token ids alone")
        how, grammar = replace(request.sampling, grammar=None), request.sampling.grammar
        plain = replace(request, decoded=None, sampling=how)
        return cls(number, plain, request.decoded is not None, None if grammar is None else grammar.source, priority)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        request = self.request
        how = {field.name: getattr(request.sampling, field.name) for field in fields(Sampling) if field.name != "grammar"}
        how["logit_bias"] = list(request.sampling.logit_bias.items())  # JSON's names are no numbers
        given = {name: getattr(request, name) for name in ("limit", "salt", "name", "about", "text_after")}
        given |= {"ids": request.ids.tolist(), "stop": sorted(request.stop), "sampling": how}
        said = {"number": self.number, "decodes": self.decodes, "grammar": self.grammar, "priority": self.priority}
        return said | {"request": given}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Submit:
        """Return what plain() described."""
        given = dict(plain["request"]) | {"text_after": tuple(plain["request"]["text_after"])}
        how = dict(given.pop("sampling"))
        sampling = Sampling(**how | {"logit_bias": dict(how["logit_bias"])})
        ids, stop = torch.tensor(given.pop("ids"), dtype=torch.int64), frozenset(given.pop("stop"))
        grammar = plain["grammar"]
        source = None if grammar is None else (grammar[0], grammar[1])
        request = Request(ids=ids, stop=stop, sampling=sampling, **given)
        return cls(plain["number"], request, plain["decodes"], source, plain["priority"])


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is cancelled, unless it has ended."""

    number: int

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"number": self.number}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Cancel:
        """Return what plain() described."""
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Forget:
    """The prompt that is kept under a name of a salt is forgotten, if there is one."""

    salt: str
    name: str

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"salt": self.salt, "name": self.name}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Forget:
        """Return what plain() described."""
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Compile:
    """Rank 0 begins to compile a grammar. Other ranks do so at the same time, in threads, so that no step waits for it later."""

    source: Source

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"source": list(self.source)}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Compile:
        """Return what plain() described."""
        schema, strict = plain["source"]
        return cls((schema, strict))


Change = Submit | Cancel | Forget | Compile
_KINDS: tuple[type[Change], ...] = Submit, Cancel, Forget, Compile


def write(changes: Sequence[Change] | None) -> bytes:
    """Return changes as JSON, by which nobody who reads them runs code."""
    return json.dumps(changes if changes is None else [[type(each).__name__, each.plain()] for each in changes]).encode()


def read(data: bytes) -> list[Change] | None:
    """Return what write() wrote."""
    kinds = {kind.__name__: kind for kind in _KINDS}
    found = json.loads(data)
    return None if found is None else [kinds[kind].read(plain) for kind, plain in found]


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

    def submits(self, numbers: Sequence[int], requests: Sequence[Request], priorities: Sequence[int]) -> list[Change]:
        """Return what rank 0 sends of requests that it submits. Raises ConfigError where it has to send embeddings."""
        return [Submit.of(*each) for each in zip(numbers, requests, priorities, strict=True)] if self.size > 1 else []

    def note(self, told: Sequence[Request]) -> None:
        """Note the requests that the latest step told."""
        if self.size > 1:
            self._digest = zlib.crc32(repr([(one.tokens[-1:], one.finished) for one in told]).encode(), self._digest)

    def send(self, changes: Sequence[Change] | None) -> None:
        """Rank 0: tell the other processes what changes before the next step; None: there is none."""
        if self.size > 1:
            self._exchange(b"" if changes == [] else write(changes))

    def receive(self) -> Sequence[Change] | None:
        """Other ranks: wait for what rank 0 sends."""
        data = self._exchange(b"")
        return read(data) if data else []

    def follow(self, scheduler: Scheduler, tokenizer: Any) -> None:
        """Other ranks: do what rank 0 does until it ends."""
        requests = dict[int, Request]()
        grammars = ComingGrammars(lambda: Grammars(tokenizer, scheduler.batch.vocabulary))
        prefix = scheduler.batch.prefix_cache
        while (changes := self.receive()) is not None:
            for change in changes:
                match change:
                    case Submit(number, request, decodes, grammar, priority):
                        if grammar is not None:
                            how = replace(request.sampling, grammar=grammars.get(grammar))
                            request = replace(request, sampling=how)
                        if decodes:
                            request.decode(tokenizer)
                        try:
                            requests[number] = scheduler.submit(request, priority=priority)
                        except KvthawError:  # rank 0 tells the client
                            requests.pop(number, None)
                    case Cancel(number):
                        if number in requests:  # those that end are dropped with the step
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
