"""Lengths of the sequences of a cache, counted once for all layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from kvthaw.cache.buckets import bucket, roomier
from kvthaw.cache.device_lengths import DeviceLengths
from kvthaw.cache.step import Held, Step
from kvthaw.regions import Regions

_COUNTED = (
    "padded_length", "left_pad", "idle", "ring_start", "decoded", "dense_tokens", "prompted", "prompt_only", "held",
)  # fmt: skip
"""Fields that a commit changes."""


@dataclass(eq=False)
class Sequences:
    """Lengths of the sequences of one cache.

    padded_length: length of the longest sequence with its padding. left_pad: what of it is padding, by sequence; position p of a
    sequence is its p-th token after that. idle: sequences that steps of the others give no token: those without tokens, and paused
    ones, whose prompt has come in part. ring_start: where each ring began at its last prefill; later starts follow from the length
    (`Regions.indexed`). capacity: tokens per sequence that every layer has device memory for; room: a fixed capacity, 0 for one
    that grows; opened: how many sequences open() was given; positions: the most that the model has. planned: tokens that steps are
    taken for at least, undropped: the most of a cleared sequence that layers have yet to drop, see bucket().
    version: changes with everything but decoded tokens. step: the step under way, or one that failed. most_decoded: the most
    new tokens that are decoded one by one; verifying: any number is (the candidates of assisted decoding). decoded: tokens
    decoded so far; dense_tokens: those after the first prompt that attended to everything; cached_tokens: those that a prefix
    cache held; prompted: the first prompt has come; prompt_only: and nothing else.

    on_device: the same for kernels and captured steps.
    """

    room: int = 0
    opened: int = 0
    planned: int = 0
    undropped: int = 0
    positions: int | None = None
    regions: Regions | None = None
    version: int = 0
    padded_length: int = 0
    left_pad: list[int] = field(default_factory=list)
    idle: frozenset[int] = frozenset()
    paused: frozenset[int] = frozenset()
    ring_start: list[int] = field(default_factory=list)
    capacity: int = 0
    most_decoded: int = 1
    verifying: bool = False
    decoded: int = 0
    dense_tokens: int = 0
    cached_tokens: int = 0
    prompted: bool = False
    prompt_only: bool = False
    commits: int = 0
    step: Step | None = None
    held: Held = field(default_factory=Held)
    on_device: DeviceLengths = field(default_factory=DeviceLengths)

    @property
    def limit(self) -> int | None:
        """The most tokens that a sequence can have, None where that is not known."""
        return self.room or self.positions

    def __post_init__(self) -> None:
        self.known: dict[object, Any] = {}
        """Memo of values that hold for the sequences as they are, by user. Every change but decoded tokens clears it."""
        self.filling: int | None = None
        """The sequence that an announced prompt goes to, None for all."""
        self._end: int | None = None  # of the announced prompt
        self._committed: tuple[Step, dict[str, Any]] | None = None  # the latest step, and the counts before it

    def reset(self) -> None:
        """Forget every sequence."""
        self.regions, self.padded_length, self.left_pad, self.idle, self.paused = None, 0, [], frozenset(), frozenset()
        self.ring_start, self.capacity, self.decoded, self.dense_tokens, self.cached_tokens, self.undropped = [], 0, 0, 0, 0, 0
        self.prompted = self.prompt_only = False
        self.step, self.held, self._committed = None, Held(), None
        self.announce(0)
        self.changed()

    def changed(self) -> None:
        """Count a change other than decoded tokens, and clear the memo that layers and captured steps rely on."""
        self.version += 1
        self.known.clear()

    def open(self, count: int, capacity: int) -> None:
        """Hold `count` idle sequences with room for `capacity` tokens each."""
        self.reset()
        self.room, self.opened, self.left_pad, self.ring_start = capacity, count, [0] * count, [0] * count
        self.idle = frozenset(range(count))

    def narrow(self, count: int) -> None:
        """Hold the first `count` sequences only; the others have no tokens."""
        self.left_pad, self.ring_start = self.left_pad[:count], self.ring_start[:count]
        self.idle &= frozenset(range(count))
        self.changed()

    def widen(self) -> None:
        """Hold all that open() was given again; none has tokens."""
        self.left_pad, self.ring_start = [0] * self.opened, [0] * self.opened
        self.idle = frozenset(range(self.opened))
        self.changed()

    def divide(self, regions: Regions, most_decoded: int) -> None:
        """Set the regions of the token positions; called with the first prompt."""
        self.regions, self.most_decoded = regions, most_decoded
        self.ring_start = [regions.first_indexed(self.length(seq)) for seq in range(self.count)]
        self.changed()

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return len(self.left_pad)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, padding not counted."""
        return self.padded_length - min(self.left_pad, default=0)

    def bucket(self, count: int) -> int:
        """Return how many tokens none of the first `count` sequences exceeds with the next one, the same in all steps that a
        capture serves; 0 where capacity grows. Paused sequences count, cleared ones until layers drop them: kernels see both."""
        longest = self.padded_length - min(self.left_pad[:count], default=0) + 1
        return bucket(max(longest, self.planned, self.undropped), self.room) if self.room else 0

    @property
    def live_count(self) -> int:
        """Sequences that a step gives a token."""
        return self.count - len(self.idle)

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence, padding not counted."""
        return self.padded_length - self.left_pad[seq]

    def indexed(self, seq: int, length: int | None = None) -> int:
        """Return where the ring begins at the sequence's length, or at another length: positions [sink, this) are in the retrieval
        region."""
        assert self.regions is not None
        return self.regions.indexed(self.ring_start[seq], self.length(seq) if length is None else length)

    def rings(self) -> dict[int, int]:
        """Return where the rings of the sequences that are not idle begin."""
        return {} if self.regions is None else {seq: self.indexed(seq) for seq in range(self.count) if seq not in self.idle}

    def held_at(self, seq: int, length: int) -> int:
        """Return the number of tokens in sink and ring at a length."""
        assert self.regions is not None
        return min(length, self.regions.sink) + max(0, length - self.indexed(seq, length))

    def full(self, taken: int = 0) -> bool:
        """Return whether any ring is full after `taken` more tokens."""
        if self.regions is None:
            return False
        at = self.padded_length + taken
        next_full: int = self.known.get("full", -1)
        if next_full < self.padded_length:
            next_full = self.known["full"] = self._next_full()
        return at == next_full or (at > next_full and bool(self.leaving(taken)))

    def leaving(self, taken: int = 0) -> list[tuple[int, int, int]]:
        """Return (sequence, start, stop) for every ring that is full after `taken` more tokens: the positions that leave it with
        the next token."""
        regions = self.regions
        if regions is None:
            return []
        found = []
        for seq, (start, left) in enumerate(zip(self.ring_start, self.left_pad, strict=True)):
            length = self.padded_length + taken - left
            if seq not in self.idle and regions.full(start, length):
                begin = regions.indexed(start, length)
                found.append((seq, begin, begin + regions.buffer))
        return found

    def _next_full(self) -> int:
        """Return the padded length at which the next ring becomes full."""
        regions = self.regions
        assert regions is not None
        waits = []
        for seq, (start, left) in enumerate(zip(self.ring_start, self.left_pad, strict=True)):
            if seq not in self.idle:
                over = self.padded_length - left - start - regions.ring
                waits.append(-over if over < 0 else -over % regions.buffer)
        return self.padded_length + min(waits, default=1 << 60)

    # Steps

    def announce(self, tokens: int, seq: int | None = None) -> None:
        """Treat the next tokens, padding included, as one prompt of a sequence or of all, in any number of steps; 0 ends it."""
        self.filling = seq if tokens else None
        self._end = (self.padded_length if seq is None else self.length(seq)) + tokens if tokens else None

    @contextmanager
    def prompt(self, tokens: int, seq: int | None = None) -> Iterator[None]:
        """Treat the next `tokens` tokens, padding included, as one prompt in chunks: of every sequence, or of one of a batch."""
        self.announce(tokens, seq)
        try:
            yield
        finally:
            self.announce(0)

    @property
    def announced(self) -> bool:
        """Whether an announced prompt has not ended."""
        return self._end is not None

    @property
    def prefill_remaining(self) -> int:
        """Tokens of the announced prompt that are still to be prefilled."""
        if self._end is None:
            return 0
        return max(0, self._end - (self.padded_length if self.filling is None else self.length(self.filling)))

    def decodes(self, tokens: int) -> bool:
        """Return whether a step of `tokens` new tokens decodes them one by one, if every sequence has earlier tokens."""
        return self.verifying or (tokens <= self.most_decoded and not self.announced)

    def begin(self, tokens: int, left_pad: Sequence[int] | None = None, *, dense: bool = True) -> Step:
        """Begin a step. left_pad: padding of each sequence, None if unchanged. If the step before was not committed, it failed and
        its tokens do not count."""
        failed, seq = self.step, self.filling
        pads = self.left_pad if left_pad is None else left_pad
        start = self.padded_length if seq is None else self.length(seq)
        step = Step(start, tokens, tuple(pads), self.idle, seq, dense, max(0, self.prefill_remaining - tokens))
        step.retaken = failed is not None and step.repeats(failed)
        if self.capacity == 0:
            self.capacity = self.room or roomier(0, start + tokens + step.remaining)
        elif step.longest > self.capacity:
            self.capacity = roomier(self.capacity, step.longest)
        self.step = step
        return step

    def commit(self) -> None:
        """Count the tokens of the step."""
        step, self.step = self.step, None
        assert step is not None
        self._committed = step, {name: copy(getattr(self, name)) for name in _COUNTED}
        self.commits += 1
        if step.seq is not None:
            self.set_length(step.seq, step.start + step.tokens)
            if self.regions is not None:
                self.ring_start[step.seq] = self.regions.first_indexed(self.length(step.seq))
        elif step.dense:
            self._count_dense(step)
        else:
            self.count_decoded(step.tokens)
            for _ in range(step.tokens):
                self._advance()

    @property
    def latest(self) -> Step | None:
        """The step under way, or else the one that was counted last."""
        return self.step if self.step is not None or self._committed is None else self._committed[0]

    def uncommit(self) -> None:
        """Undo the latest commit: the forward that the step belongs to failed."""
        assert self._committed is not None
        self.step, before = self._committed
        self._committed = None
        for name, value in before.items():
            setattr(self, name, value)
        self.commits -= 1
        self.changed()

    def _count_dense(self, step: Step) -> None:
        self.changed()
        self.prompt_only = step.start == 0 and step.remaining == 0
        self.dense_tokens += step.tokens if self.prompted else 0
        self.prompted = self.prompted or step.remaining == 0
        self.left_pad, self.padded_length = list(step.left_pad), step.start + step.tokens
        if self.regions is not None:
            self.ring_start = self.ring_start or [self.regions.sink] * self.count
            for row in step.rows():
                self.ring_start[row.seq] = self.regions.first_indexed(self.length(row.seq))

    def _advance(self) -> None:
        """Add a token to every sequence that is not idle."""
        self.padded_length += 1
        self.decoded += 1
        self.prompt_only = False
        if self.idle:
            self.left_pad = [pad + (seq in self.idle) for seq, pad in enumerate(self.left_pad)]

    def count_decoded(self, tokens: int) -> None:
        """Count what the next tokens attend to in sink and ring."""
        if self.regions is None:
            return
        held = self.held
        held.tokens += tokens
        for seq, left in enumerate(self.left_pad):
            for t in range(tokens if seq not in self.idle else 0):
                n = self.held_at(seq, self.padded_length - left + t + 1)
                held.steps += 1
                held.total += n
                held.most = max(held.most, n)

    # On the device

    def place(self, step: Step, token: int, device: torch.device) -> None:
        """Set the device's lengths to a token of the step, counted from 0. Every layer calls this; the first does it."""
        if self.known.get("placed") != (step, token, device):
            self._set(step.lengths(token + 1), device)
            self.known["placed"] = step, token, device

    def place_before_step(self, device: torch.device) -> None:
        """Set the device's lengths to the committed ones, unless they are, with the rings as they are at the next token: a captured
        step advances the lengths itself."""
        if self.known.get("placed") != (self.padded_length, device):
            self._set(self._live_lengths(), device, coming=1)
            self.known["placed"] = self.padded_length, device

    def place_committed(self, device: torch.device) -> None:
        """Set the device's lengths to the committed ones, for queries that come again."""
        self._set(self._live_lengths(), device)

    def count_replay(self) -> None:
        """Note that a replayed step has advanced the device's lengths by a token."""
        self.on_device.advance()
        self.known.pop("placed", None)

    def forget_device(self) -> None:
        """Note that a replayed step failed, so that the device's lengths are not known."""
        self.on_device.forget()
        self.known.pop("placed", None)

    def _live_lengths(self) -> list[int]:
        return [0 if seq in self.idle else self.length(seq) for seq in range(self.count)]

    def _set(self, lengths: list[int], device: torch.device, coming: int = 0) -> None:
        live = [int(seq not in self.idle) for seq in range(len(lengths))]
        starts = [0] * len(lengths)
        if self.regions is not None and self.ring_start:
            starts = [self.indexed(seq, n + coming * new) for seq, (n, new) in enumerate(zip(lengths, live, strict=True))]
        self.on_device.set(lengths, starts, live, device)
        self.known.pop("placed", None)

    # Changes from outside

    def set_length(self, seq: int, length: int) -> None:
        """Set the length of one sequence, which is idle at length 0, with as little padding as possible."""
        lengths = [self.length(other) for other in range(self.count)]
        lengths[seq] = length
        self.padded_length = max(lengths)
        self.left_pad = [self.padded_length - n for n in lengths]
        self.idle = self.paused | {other for other, n in enumerate(lengths) if n == 0}
        self.prompt_only = False
        self.changed()

    def pause(self, seq: int) -> None:
        """Exclude a sequence from the steps of the others."""
        self.paused |= {seq}
        self.set_length(seq, self.length(seq))

    def resume(self, seq: int) -> None:
        """Include a paused sequence in steps again."""
        self.paused -= {seq}
        self.set_length(seq, self.length(seq))

    def clear(self, seq: int) -> None:
        """Drop the tokens of one sequence, which is idle from then on."""
        self.paused -= {seq}
        self.set_length(seq, 0)
        self.ring_start[seq] = 0 if self.regions is None else self.regions.sink

    def ring_after_crop(self, seq: int, length: int) -> int:
        """Return where the ring of a sequence begins after a crop to a length: as far back as in a prompt of that length."""
        if self.regions is None:
            return 0
        return self.regions.indexed(min(self.ring_start[seq], self.regions.first_indexed(length)), length)

    def crop(self, drop: int) -> None:
        """Drop the last `drop` tokens of every sequence; see ring_after_crop."""
        if self.regions is not None:
            firsts = [self.regions.first_indexed(max(0, self.length(seq) - drop)) for seq in range(self.count)]
            self.ring_start = [min(pair) for pair in zip(self.ring_start, firsts, strict=True)]
        self.padded_length = max(0, self.padded_length - drop)
        self.left_pad = [min(pad, self.padded_length) for pad in self.left_pad]
        self.prompt_only = False
        self.changed()

    def reorder(self, sequences: Collection[int]) -> None:
        """Sequence i becomes what sequence sequences[i] was."""
        self.left_pad = [self.left_pad[seq] for seq in sequences]
        self.ring_start = [self.ring_start[seq] for seq in sequences] if self.ring_start else []
        self.changed()

    def adopt(self, lengths: Sequence[int]) -> None:
        """Set the lengths of all sequences."""
        self.padded_length = max(lengths)
        self.left_pad = [self.padded_length - n for n in lengths]
        self.capacity = self.room or roomier(0, self.padded_length)
        self.changed()

    def forget_prompt(self) -> None:
        """Reset the sizes set by a first prompt that failed."""
        self.regions, self.capacity, self.step, self.ring_start = None, 0, None, []
        self.changed()
