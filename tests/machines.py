"""State machines that use caches and batches in any order: each row must get what it gets alone.

`tests/engine/test_machines.py` runs a few sequences of operations, `lab/fuzz.py` as many as there is time for.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import indexed
import kvthaw
import owners
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.errors import CacheError
from sampled import sample
from zoo import build, multiply_in_float64, prompt

AMPLE = 512
"""A budget of more tokens than any row here has."""
LONGEST = 300
"""Tokens after which a row gets no more."""
TIGHTLY = ("llama", "qwen3")
"""Architectures of which rows alone round as rows of a batch do, so that a tight budget selects the same tokens."""
ROUTED = ("gemma3n", "gpt_oss")
"""Those that choose experts, or the like, by numbers that bfloat16 does not keep apart."""
AMPLY = (*TIGHTLY, "gpt2", "gemma3", *ROUTED)


# Models


@dataclass(frozen=True)
class Pair:
    """A model that kvthaw serves and its twin that transformers serves."""

    model: PreTrainedModel
    plain: PreTrainedModel
    handle: kvthaw.Handle | None

    @classmethod
    @functools.cache
    def of(cls, architecture: str, dtype: torch.dtype, device: str, attach: bool) -> Pair:
        """attach: steps given to the model with a cache are captured where they can be."""
        layers = {"num_hidden_layers": 3} if architecture in TIGHTLY else {}
        model, plain = (build(architecture, attention=how, **layers).to(device, dtype) for how in (None, "eager"))
        plain.load_state_dict(model.state_dict())
        for one in (model, plain):
            multiply_in_float64(one)
        return cls(model, plain, kvthaw.attach(model, "full") if attach else None)


def error(found: Tensor, expected: Tensor) -> float:
    """The worst relative error of a token's logits, in parts of what is allowed: half of the digits that the dtype has."""
    away = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    worst = float(away.max())
    return worst / math.sqrt(torch.finfo(found.dtype).eps)


# What happens to a row


@dataclass(frozen=True)
class Feed:
    """Tokens that are given in some calls, announced as one prompt or not."""

    chunks: tuple[tuple[int, ...], ...]
    announced: bool = False


@dataclass(frozen=True)
class Crop:
    """The last tokens are forgotten."""

    tokens: int


@dataclass(frozen=True)
class Fork:
    """Another method and budget take over."""

    method: str
    budget: int


History = tuple[Feed | Crop | Fork, ...]


def feed(model: PreTrainedModel, cache: Any, chunks: Sequence[Tensor], pads: Sequence[int], announced: bool) -> Tensor:
    """Logits [B, T, V] of the tokens of some calls, [B, n] each, that follow what a cache holds."""
    device, before, logits = model.device, cache.get_seq_length(), []
    left = torch.tensor(pads, device=device)[:, None]
    with cache.prompt(sum(ids.shape[1] for ids in chunks)) if announced else nullcontext():
        for ids in chunks:
            places = torch.arange(before + ids.shape[1], device=device) - left
            mask = (places >= 0).long() if any(pads) else None
            where = places[:, before:].clamp(min=0)
            logits.append(model(ids.to(device), attention_mask=mask, position_ids=where, past_key_values=cache).logits)
            before += ids.shape[1]
    return torch.cat(logits, dim=1)


class Alone:
    """What rows get that have a cache for themselves, by their histories.

    nudge: which embeddings differ in their last bit, and how. A tight budget may then select other tokens, and a router other
    experts, or not.
    """

    def __init__(self, model: PreTrainedModel, fresh: Callable[[], Any], nudge: int = 0) -> None:
        self._model, self._fresh, self._nudge = model, fresh, nudge
        self._known: dict[History, tuple[Any, Tensor]] = {}  # a cache that has such a history, and the last logits it gave
        self._others = [] if nudge else [Alone(model, fresh, other) for other in range(1, 9)]

    @torch.no_grad()
    def logits(self, history: History) -> Tensor:
        """Logits [T, V] of the last tokens of a history."""
        if history not in self._known:
            start = next((n for n in range(len(history) - 1, 0, -1) if history[:n] in self._known), 0)
            cache = self._known.pop(history[:start])[0] if start else self._fresh()
            logits, hook = torch.empty(0), self._model.get_input_embeddings().register_forward_hook(self._nudged)
            for event in history[start:]:
                if isinstance(event, Feed):
                    ours = isinstance(cache, kvthaw.Cache)  # the other has one way to take tokens
                    chunks = [torch.tensor([chunk]) for chunk in (event.chunks if ours else [sum(event.chunks, ())])]
                    logits = feed(self._model, cache, chunks, [0], event.announced and ours)[0]
                elif isinstance(event, Crop):
                    cache.crop(-event.tokens)
                elif isinstance(cache, kvthaw.Cache):
                    cache = cache.fork(event.method, budget=event.budget)
            hook.remove()
            self._known[history] = cache, logits
        return self._known[history][1]

    def hangs_on_a_bit(self, history: History) -> bool:
        """Whether logits of a history change with the last bits of the embeddings, so that nothing can be said of them."""
        expected = self.logits(history)
        return any(error(other.logits(history), expected) > 1 for other in self._others)

    def _nudged(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if not self._nudge:
            return None
        wave = torch.cos(self._nudge * torch.arange(out.shape[-1], device=out.device))
        return out * (1 + torch.finfo(out.dtype).eps * wave).to(out.dtype)


class InjectedError(RuntimeError):
    """A failure that a machine put in the way of a forward."""


def failing(model: PreTrainedModel, at: int) -> Any:
    """Make a module of a model fail when it is next called; returns the hook."""

    def fail(*_: object) -> None:
        raise InjectedError

    modules = [module for module in model.modules() if not list(module.children())]
    return modules[at % len(modules)].register_forward_pre_hook(fail)


# Caches


@dataclass
class Subject:
    """A cache, and the history and padding of each of its rows.

    ample: it has always attended to all tokens. exact: its rows are what they are alone to the last bit on a CPU, which steps of
    dense layers are not. born: how its rows' histories begin.
    """

    cache: kvthaw.Cache
    method: str
    budget: int
    ample: bool
    exact: bool
    born: History = ()
    rows: list[History] = field(default_factory=list)
    pads: list[int] = field(default_factory=list)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row."""
        length: int = self.cache.get_seq_length()
        return length - max(self.pads)


Mode = type[torch.no_grad] | type[torch.inference_mode]
MODES: tuple[Mode, ...] = (torch.no_grad, torch.inference_mode)


@dataclass(frozen=True)
class Setting:
    """How a first cache is made, and the modes that operations take in turn."""

    architecture: str
    method: str
    budget: int
    ample: bool
    dtype: torch.dtype
    modes: tuple[Mode, ...]
    dense_layers: int
    sparse_queries: int
    block_size: int
    seed: int

    def make(self, model: PreTrainedModel) -> kvthaw.Cache:
        """Make an empty cache of this kind."""
        names = ("budget", "dense_layers", "sparse_queries", "block_size", "seed")
        return kvthaw.Cache(model, self.method, **{name: getattr(self, name) for name in names})


@st.composite
def first_settings(draw: st.DrawFn) -> Setting:
    ample = draw(st.booleans())
    architecture = draw(st.sampled_from(AMPLY if ample else TIGHTLY))
    return Setting(
        architecture,
        draw(a_method(ample, architecture)),
        draw(budgets(ample)),
        ample,
        torch.float32 if architecture in ROUTED else draw(st.sampled_from((torch.float32, torch.bfloat16))),
        draw(st.sampled_from((MODES[:1], MODES[1:], MODES))),
        draw(st.integers(0, 1)) if ample else 0,
        draw(st.sampled_from((16, 1, 4))),
        draw(st.sampled_from((16, 1024))),
        draw(st.integers(0, 3)),
    )


@st.composite
def forks(draw: st.DrawFn) -> Fork:
    architecture = draw(st.runner()).setting.architecture
    ample = draw(st.booleans()) or architecture not in TIGHTLY
    return Fork(draw(a_method(ample, architecture)), draw(budgets(ample)))


def a_method(ample: bool, architecture: str) -> st.SearchStrategy[str]:
    """One of the machine's: at a tight budget one that has a budget, and one that works with the architecture."""
    refused = {"full"} if not ample else {"shadowkv"} if architecture == "gemma3n" else set()
    return st.runner().flatmap(lambda machine: st.sampled_from([name for name in machine.methods if name not in refused]))


def budgets(ample: bool) -> st.SearchStrategy[int]:
    """One that covers every row, or one that most rows outgrow."""
    return st.just(AMPLE) if ample else st.sampled_from((16, 32, 48, 64))


which = st.integers(0, 5)
samplings = st.just(GREEDY) | st.builds(Sampling, temperature=st.just(1.0), top_k=st.just(20), seed=st.integers(0, 3))
lengths = st.lists(st.integers(1, 140), min_size=1, max_size=3)
cuts = st.lists(st.integers(1, 140), max_size=3, unique=True).map(sorted)


class Caches(RuleBasedStateMachine):
    """Caches of one model, each of any number of rows, in any order of operations.

    Where every budget covers all tokens a row must get what it gets alone from transformers' DynamicCache, else what it gets alone
    from a cache that was never copied, reordered or interrupted.
    """

    methods: ClassVar[Sequence[str]] = tuple(kvthaw.METHODS)
    device: ClassVar[str] = "cpu"

    @initialize(setting=first_settings(), lengths=lengths, cuts=cuts, announced=st.booleans())
    def begin(self, setting: Setting, lengths: list[int], cuts: list[int], announced: bool) -> None:
        pair = Pair.of(setting.architecture, setting.dtype, self.device, True)
        self.setting, self.model, self.handle, self.given, self.called = setting, pair.model, pair.handle, 0, 0
        self.as_ours = Alone(pair.model, functools.partial(setting.make, pair.model))
        self.as_theirs = Alone(pair.plain, lambda: DynamicCache(config=pair.plain.config))
        with self.mode():
            cache = setting.make(pair.model)
        subject = Subject(cache, setting.method, setting.budget, setting.ample, setting.dense_layers == 0)
        self.subjects = [subject]
        self.prompt(subject, lengths, cuts, announced)

    def mode(self) -> torch.no_grad | torch.inference_mode:
        self.called += 1
        return self.setting.modes[self.called % len(self.setting.modes)]()

    # What happens

    @invariant()
    def indexes_are_in_order(self) -> None:
        for subject in getattr(self, "subjects", ()):
            indexed.check(subject.cache.kv)

    def teardown(self) -> None:
        gc.collect()  # a cache refers to itself, and shares blocks with its copies and forks
        caches = {subject.cache.kv for subject in getattr(self, "subjects", ())}
        if caches and self.handle is not None:
            caches.add(self.handle.cache.kv)  # the handle holds the latest call's, whether it is a subject yet or not
        owners.check(owners.held(caches))

    @rule(which=which, n=st.integers(1, 8))
    def step(self, which: int, n: int) -> None:
        """One token at a time."""
        subject = self.subject(which)
        self.feed(subject, self.tokens(subject, n).split(1, dim=1))

    @rule(which=which, n=st.integers(2, 20))
    def several(self, which: int, n: int) -> None:
        """Several tokens in one call, which short ones decode one by one."""
        subject = self.subject(which)
        self.feed(subject, [self.tokens(subject, n)])

    @precondition(lambda self: self.croppable)
    @rule(which=which, drop=st.integers(1, 200))
    def crop(self, which: int, drop: int) -> None:
        subject = self.subject(which)
        drop = min(drop, subject.shortest - 1)
        if drop == 0:
            return
        with self.mode():
            subject.cache.crop(-drop)
        subject.pads = [min(pad, subject.cache.get_seq_length()) for pad in subject.pads]
        subject.rows = [(*row, Crop(drop)) for row in subject.rows]

    @rule(which=which, rows=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def reorder(self, which: int, rows: list[int]) -> None:
        subject = self.subject(which)
        rows = [row % len(subject.rows) for row in rows]
        with self.mode():
            subject.cache.reorder_cache(torch.tensor(rows, device=self.device))
        self.move(subject, rows)

    @rule(which=which, times=st.integers(1, 2))
    def repeat(self, which: int, times: int) -> None:
        subject = self.subject(which)
        if times * len(subject.rows) > 4:
            return
        with self.mode():
            subject.cache.batch_repeat_interleave(times)
        self.move(subject, [row for row in range(len(subject.rows)) for _ in range(times)])

    @rule(which=which, kept=st.lists(st.booleans(), min_size=4, max_size=4), by_mask=st.booleans())
    def select(self, which: int, kept: list[bool], by_mask: bool) -> None:
        subject = self.subject(which)
        mask = torch.tensor(kept[: len(subject.rows)], device=self.device)
        rows = mask.nonzero()[:, 0]
        if len(rows) == 0:
            return
        with self.mode():
            subject.cache.batch_select_indices(mask if by_mask else rows)
        self.move(subject, rows.tolist())

    @rule(which=which)
    def copied(self, which: int) -> None:
        subject = self.subject(which)
        with self.mode():
            cache = copy.deepcopy(subject.cache)
        self.add(replace(subject, cache=cache, rows=list(subject.rows), pads=list(subject.pads)))

    @rule(which=which, to=forks())
    def fork(self, which: int, to: Fork) -> None:
        subject = self.subject(which)
        if to.budget < AMPLE and not subject.exact:
            return
        with self.mode():
            try:
                cache = subject.cache.fork(to.method, budget=to.budget)
            except CacheError:
                assert to.method == "h2o", "which scores by all queries of the prompt"
                return
        rows = [(*row, to) for row in subject.rows]
        ample = subject.ample and to.budget == AMPLE
        self.add(Subject(cache, to.method, to.budget, ample, subject.exact, (to,), rows, list(subject.pads)))

    @precondition(lambda self: len(self.subjects) > 1)
    @rule(which=which)
    def drop(self, which: int) -> None:
        del self.subjects[which % len(self.subjects)]

    @rule(which=which, lengths=lengths, cuts=cuts, announced=st.booleans())
    def reset(self, which: int, lengths: list[int], cuts: list[int], announced: bool) -> None:
        """Another prompt."""
        subject = self.subject(which)
        self.forget(subject)
        self.prompt(subject, lengths, cuts, announced)

    @rule(which=which, at=st.integers(0, 100), n=st.sampled_from((1, 1, 5, 20)))
    def fail(self, which: int, at: int, n: int) -> None:
        """A forward fails somewhere. It is taken again."""
        subject = self.subject(which)
        before, ids = subject.cache.get_seq_length(), self.tokens(subject, n)
        hook = failing(self.model, at)
        try:
            self.feed(subject, [ids])
        except InjectedError:
            pass
        else:
            return
        finally:
            hook.remove()
        try:
            if subject.cache.get_seq_length() == before:
                self.feed(subject, [ids])
            else:  # it failed after the last layer
                self.taken(subject, [ids])
                self.feed(subject, [self.tokens(subject, 1)])
        except CacheError:
            assert not self.croppable, "only layers that transformers serves itself count a step that failed"
            self.again(subject)

    # How it is done

    @property
    def croppable(self) -> bool:
        return self.setting.architecture in ("llama", "qwen3", "gpt2")

    def subject(self, which: int) -> Subject:
        return self.subjects[which % len(self.subjects)]

    def tokens(self, subject: Subject, n: int) -> Tensor:
        """New tokens [B, n], fewer where a row would become too long."""
        self.given += 1
        n = max(1, min(n, LONGEST - subject.cache.get_seq_length()))
        return prompt(len(subject.rows), n, seed=self.given)

    def add(self, subject: Subject) -> None:
        self.subjects = [*self.subjects, subject][-3:]

    def move(self, subject: Subject, rows: list[int]) -> None:
        subject.rows, subject.pads = [subject.rows[i] for i in rows], [subject.pads[i] for i in rows]

    def forget(self, subject: Subject) -> None:
        with self.mode():
            subject.cache.reset()
        subject.ample, subject.exact = subject.budget == AMPLE, self.setting.dense_layers == 0

    def again(self, subject: Subject) -> None:
        """Begin with another prompt, after what cannot go on."""
        self.forget(subject)
        self.prompt(subject, [60, 20], [], False)

    def prompt(self, subject: Subject, lengths: list[int], cuts: list[int], announced: bool) -> None:
        """A prompt of rows of such lengths, in calls that end at the cuts."""
        longest = max(lengths)
        self.given += 1
        subject.pads, subject.rows = [longest - n for n in lengths], [subject.born] * len(lengths)
        if not announced and not subject.ample:  # a short call is decoded one by one, unless a row has no tokens yet
            cuts = [cut for cut in cuts if cut > max(subject.pads)]
        ends = [0, *(cut for cut in cuts if cut < longest), longest]
        ids = prompt(len(lengths), longest, seed=self.given)
        self.feed(subject, [ids[:, start:stop] for start, stop in pairwise(ends)], announced)

    def feed(self, subject: Subject, chunks: Sequence[Tensor], announced: bool = False) -> None:
        """Give all rows tokens, [B, n] in each call, and compare what comes."""
        before = subject.cache.get_seq_length()
        with self.mode():
            logits = feed(self.model, subject.cache, chunks, subject.pads, announced)
        self.taken(subject, chunks, announced, before)
        subject.exact &= before == 0 or subject.method != "full"
        alone = self.as_theirs if subject.ample else self.as_ours
        may_hang = not subject.ample or self.setting.architecture in ROUTED
        for row, (history, pad) in enumerate(zip(subject.rows, subject.pads, strict=True)):
            found = logits[row, max(0, pad - before) :].clone()
            off = error(found, alone.logits(history))
            if off > 1 and may_hang and alone.hangs_on_a_bit(history):
                self.again(subject)
                return
            assert off <= 1, f"row {row}"
        stats = subject.cache.stats()
        assert stats.tokens == before + sum(ids.shape[1] for ids in chunks)
        assert stats.attended_max is None or stats.attended_max <= subject.budget

    def taken(self, subject: Subject, chunks: Sequence[Tensor], announced: bool = False, before: int = AMPLE) -> None:
        """Rows have been given tokens, of which those that are padding are no one's."""
        for row, pad in enumerate(subject.pads):
            given, at = [], before
            for ids in chunks:
                own = tuple(ids[row, max(0, pad - at) :].tolist())
                given += [own] if own else []
                at += ids.shape[1]
            subject.rows[row] = (*subject.rows[row], Feed(tuple(given), announced))


# Batches


@dataclass
class Asked:
    """A request and how it was asked for."""

    request: kvthaw.Request
    prompt: Tensor
    sampling: Sampling


class Batches(RuleBasedStateMachine):
    """A batch that requests join and leave, and in which forwards fail: each gets the tokens that it gets alone."""

    methods: ClassVar[Sequence[str]] = tuple(kvthaw.METHODS)
    device: ClassVar[str] = "cpu"

    @initialize(
        architecture=st.sampled_from(TIGHTLY),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        method=a_method(True, "llama"),
        budget=st.sampled_from((16, 32, 48, 64, AMPLE)),
        seqs=st.integers(1, 3),
        chunk=st.sampled_from((400, 32)),
        block_size=st.sampled_from((16, 1024)),
    )
    def begin(
        self, architecture: str, dtype: torch.dtype, method: str, budget: int, seqs: int, chunk: int, block_size: int
    ) -> None:
        if method == "full":  # two logits may be alike in bfloat16, and steps of dense layers are not alone's to the last bit
            dtype = torch.float32
        self.model = Pair.of(architecture, dtype, self.device, False).model
        self.twin = Pair.of(architecture, dtype, self.device, True).model
        settings: dict[str, Any] = {"method": method, "budget": budget, "block_size": block_size}
        self.alone = Alone(self.twin, lambda: kvthaw.Cache(self.twin, **settings))
        self.batch = kvthaw.Batch(self.model, max_seqs=seqs, capacity=400, prefill_chunk=chunk, **settings)
        self.chunk = chunk
        self.asked: list[Asked] = []
        self.given = 0

    @precondition(lambda self: self.batch.free)
    @rule(length=st.integers(1, 200), new=st.integers(1, 100), sampling=samplings)
    def join(self, length: int, new: int, sampling: Sampling) -> None:
        ids = self.prompt(length)
        self.asked.append(Asked(self.batch.join(ids, max_new_tokens=new, stop=(), sampling=sampling), ids, sampling))

    @precondition(lambda self: self.batch.free)
    @rule(length=st.integers(1, 200), at=st.integers(0, 100))
    def join_fails(self, length: int, at: int) -> None:
        before, request = self.state(), self.batch.join(self.prompt(length), stop=())
        hook = failing(self.model, at)
        try:
            self.batch.prefill(request, length)
            self.batch.leave(request)
        except InjectedError:
            assert self.state() == before
        finally:
            hook.remove()

    @rule(n=st.integers(1, 30))
    def step(self, n: int) -> None:
        for _ in range(n):
            counts = [len(one.request.tokens) for one in self.asked]
            here, coming = self.batch.decoding, self.batch.prefilling
            told = self.batch.step()
            assert told[: len(here)] == here
            assert set(told[len(here) :]) <= set(coming)
            for one, count in zip(self.asked, counts, strict=True):
                assert len(one.request.tokens) == count + (one.request in told)

    @rule(n=st.integers(1, 30))
    def steps_ahead(self, n: int) -> None:
        """Each step is launched before the tokens of the one before are read."""
        for _ in range(n):
            self.batch.launch()
            self.batch.read(ahead=True)
            for request in self.batch.prefilling[:1]:
                self.batch.prefill(request)
        self.batch.read()

    @rule(at=st.integers(0, 100))
    def step_fails(self, at: int) -> None:
        """Requests stay, with the tokens that they had."""
        here = self.batch.requests
        had = [list(request.tokens) for request in here]
        hook = failing(self.model, at)
        try:
            self.batch.decode()
        except InjectedError:
            assert [request.tokens for request in here] == had
            assert self.batch.requests == here
        finally:
            hook.remove()

    @precondition(lambda self: self.batch.requests)
    @rule(which=which)
    def leave(self, which: int) -> None:
        self.batch.leave(self.batch.requests[which % len(self.batch.requests)])

    @invariant()
    def those_that_finished_got_what_they_get_alone(self) -> None:
        for one in [one for one in getattr(self, "asked", ()) if one.request.finished]:
            self.check(one)
            self.asked.remove(one)

    @invariant()
    def indexes_are_in_order(self) -> None:
        if hasattr(self, "batch"):
            indexed.check(self.batch.cache.kv)

    def teardown(self) -> None:
        for one in getattr(self, "asked", ()):
            if not one.request.finished:
                self.batch.leave(one.request)
        self.those_that_finished_got_what_they_get_alone()
        if hasattr(self, "batch"):
            assert self.batch.stats().kv_host_bytes == 0
            owners.check(owners.held([self.batch.cache.kv]))

    def prompt(self, length: int) -> Tensor:
        self.given += 1
        return prompt(1, length, seed=self.given)[0]

    def state(self) -> tuple[Any, ...]:
        """What a refused request leaves as it was."""
        return self.batch.free, self.batch.requests, self.batch.stats().kv_host_bytes

    def check(self, one: Asked) -> None:
        """A request's tokens, against those drawn from what a cache gives that has nothing else."""
        tokens = one.request.tokens
        if not tokens:
            return
        prefill = Feed(tuple(tuple(ids.tolist()) for ids in one.prompt.split(self.chunk)), True)
        steps = Feed(tuple((token,) for token in tokens[:-1]))
        history: History = (prefill, steps) if steps.chunks else (prefill,)
        logits = [self.alone.logits((prefill,))[-1:], *([self.alone.logits(history)] if steps.chunks else [])]
        places = len(one.prompt) + torch.arange(len(tokens), device=self.device)
        drawn = sample(torch.cat(logits), [one.sampling] * len(tokens), places).tolist()
        assert drawn == tokens or self.alone.hangs_on_a_bit(history)


MACHINES: dict[str, type[RuleBasedStateMachine]] = {"caches": Caches, "batches": Batches}
