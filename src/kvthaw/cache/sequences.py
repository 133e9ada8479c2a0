"""The sequences of a cache: lengths that are counted once for all layers, on the host and on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.step import Held, Known, Moves, Step, bucket, roomier
from kvthaw.kernels.gpu import upload
from kvthaw.regions import Regions

_COUNTED = (
    "padded_length", "left_pad", "idle", "ring_start", "decoded", "dense_tokens", "prompted", "prompt_only", "held",
)  # fmt: skip
"""Fields that a commit changes."""
WHOLE = Regions(0, 1 << 60, 1)
"""Regions of sequences that are not divided: every token is in the window."""


class DeviceLengths:
    """Per-sequence counters of a step on the device, [B] int32 each. The host knows their values and writes only changes.

    Their addresses change only with the number of sequences.

    lengths: tokens, the newest included.
    starts: first position in the ring.
    live: 1 for sequences that get a token in this step.
    """

    _known: tuple[Any, ...]  # lengths, starts, live, device

    def __init__(self) -> None:
        self.lengths = self.starts = self.live = torch.empty(0, dtype=torch.int32)
        self.forget()

    def set(self, lengths: Sequence[int], starts: Sequence[int], live: Sequence[int], device: torch.device) -> None:
        """Set all values. If every live sequence only gained one token, this is a single addition on the device."""
        want = tuple(lengths), tuple(starts), tuple(live), device
        if want == self._known:
            return
        one_less, known = tuple(n - new for n, new in zip(lengths, live, strict=True)), self._known
        self.forget()  # a write that fails may have changed some values
        if (one_less, *want[1:]) == known:
            self.lengths.add_(self.live)
        else:
            if self.lengths.shape != (len(lengths),) or self.lengths.device != device:
                self.lengths = torch.empty(len(lengths), dtype=torch.int32, device=device)
                self.starts, self.live = torch.empty_like(self.lengths), torch.empty_like(self.lengths)
            for tensor, values in zip(self.tensors(), want[:3], strict=True):
                tensor.copy_(upload(values, torch.int32, device))
        self._known = want

    def advance(self) -> None:
        """Record that a replayed step has added a token to every live sequence."""
        lengths, starts, live, device = self._known
        self._known = tuple(n + new for n, new in zip(lengths, live, strict=True)), starts, live, device

    def forget(self) -> None:
        """Mark the values as unknown after a replayed step failed."""
        self._known = (), (), (), None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""
        return [self.lengths, self.starts, self.live]


@dataclass(eq=False)
class Sequences:
    """The sequences of one cache: their lengths on the host, and on the device for kernels and captured steps.

    Position p of a sequence is its p-th token after its padding.

    padded_length: length of the longest sequence, padding included.
    left_pad: padding tokens of each sequence.
    idle: sequences that get no token in steps of the others: empty ones and paused ones.
    paused: sequences whose prompt has come in part.
    ring_start: where each ring began at its last prefill. Later starts follow from the length (`Regions.indexed`).
    regions: WHOLE before the first prompt, and if all layers keep all KV on the device.
    capacity: tokens per sequence that every layer has device memory for.
    room: a fixed capacity; 0 if capacity grows.
    opened: number of sequences given to open().
    positions: the model's maximum length.
    planned: minimum length for bucket(), for warm-up.
    undropped: longest cleared sequence whose layer state is not freed yet, for bucket().
    version: changes with everything but decoded tokens.
    commits: number of committed steps.
    prefills: how many of them attended densely.
    step: the step under way, or one that failed.
    most_decoded: the most new tokens that one step decodes one by one.
    verifying: a step of any number of tokens decodes them one by one: candidates of assisted decoding.
    decoded: tokens decoded so far.
    dense_tokens: tokens after the first prompt that attended to everything.
    cached_tokens: prompt tokens that came from a prefix cache.
    prompted: whether the first prompt has come.
    prompt_only: whether nothing has come since.
    on_device: the lengths for kernels and captured steps.
    """

    room: int = 0
    opened: int = 0
    planned: int = 0
    undropped: int = 0
    positions: int | None = None
    regions: Regions = WHOLE
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
    prefills: int = 0
    step: Step | None = None
    held: Held = field(default_factory=Held)
    on_device: DeviceLengths = field(default_factory=DeviceLengths)

    @property
    def limit(self) -> int | None:
        """The most tokens that a sequence can have; None if unknown."""
        return self.room or self.positions

    def __post_init__(self) -> None:
        self.known = Known()
        self.filling: dict[int, int] = {}
        """Where the announced prompts of single sequences end, by sequence. It is empty if the prompt belongs to all."""
        self.ends: dict[int, int] = {}
        """The most tokens that a sequence will have, by sequence, where that is known."""
        self._end: int | None = None  # of a prompt of all sequences
        self._committed: tuple[Step | None, dict[str, Any]] = None, {}  # the latest step, and the counts before it

    def reset(self) -> None:
        """Drop all sequences."""
        self.regions, self.padded_length, self.left_pad, self.idle, self.paused = WHOLE, 0, [], frozenset(), frozenset()
        self.ring_start, self.capacity, self.decoded, self.dense_tokens, self.cached_tokens, self.undropped = [], 0, 0, 0, 0, 0
        self.prompted = self.prompt_only = False
        self.step, self.held, self._committed = None, Held(), (None, {})
        self._end, self.filling, self.ends = None, {}, {}
        self.changed()

    def copy_from(self, other: Sequences) -> None:
        """Count the same tokens as another cache. What its device knows is not copied."""
        own = {name: copy(value) for name, value in vars(other).items() if name not in ("known", "on_device")}
        self.__dict__.update(own)
        self.changed()

    def changed(self) -> None:
        """Count a change other than decoded tokens. What layers and captured steps knew is void."""
        self.version += 1
        self.known = Known()

    def open(self, count: int, capacity: int) -> None:
        """Hold `count` idle sequences with room for `capacity` tokens each."""
        self.reset()
        self.room, self.opened, self.left_pad, self.ring_start = capacity, count, [0] * count, [0] * count
        self.idle = frozenset(range(count))

    def narrow(self, count: int) -> None:
        """Keep only the first `count` sequences; the others must be empty."""
        self.left_pad, self.ring_start = self.left_pad[:count], self.ring_start[:count]
        self.idle &= frozenset(range(count))
        self.changed()

    def widen(self) -> None:
        """Return to the number of sequences given to open(); all are empty."""
        self.left_pad, self.ring_start = [0] * self.opened, [0] * self.opened
        self.idle = frozenset(range(self.opened))
        self.changed()

    def divide(self, regions: Regions, most_decoded: int) -> None:
        """Set the regions of token positions. Called with the first prompt, and with WHOLE once all sequences are gone."""
        self.regions, self.most_decoded = regions, most_decoded
        self.ring_start = [regions.first_indexed(self.length(seq)) for seq in range(self.count)]
        self.changed()

    @property
    def divided(self) -> bool:
        """Whether the regions are set."""
        return self.regions != WHOLE

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.left_pad)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, without padding."""
        return self.padded_length - min(self.left_pad, default=0)

    def bucket(self, count: int) -> int:
        """Return a bucket of lengths that holds each of the first `count` sequences with its next token; 0 if capacity grows.

        It is the same in all steps that a capture serves. Kernels also read paused sequences, and cleared ones until layers
        drop them, so both count.
        """
        longest = self.padded_length - min(self.left_pad[:count], default=0) + 1
        return bucket(max(longest, self.planned, self.undropped), self.room) if self.room else 0

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence, without padding."""
        return self.padded_length - self.left_pad[seq]

    def indexed(self, seq: int, length: int | None = None) -> int:
        """Return where the ring begins: positions from the end of the sink to here are in the retrieval region.

        length: at this length of the sequence; None: its current length.
        """
        return self.regions.indexed(self.ring_start[seq], self.length(seq) if length is None else length)

    def held_at(self, seq: int, length: int) -> int:
        """Return how many tokens sink and ring hold at a length."""
        return min(length, self.regions.sink) + max(0, length - self.indexed(seq, length))

    def full(self, taken: int = 0) -> bool:
        """Return whether any ring is full after `taken` more tokens."""
        at = self.padded_length + taken
        if self.known.full < self.padded_length:
            self.known.full = self._next_full()
        return at == self.known.full or (at > self.known.full and bool(self.leaving(taken)))

    def leaving(self, taken: int = 0) -> list[tuple[int, int, int]]:
        """Return (sequence, start, stop) of the tokens that leave rings with the next token, after `taken` more tokens."""
        regions, found = self.regions, []
        for seq, (start, left) in enumerate(zip(self.ring_start, self.left_pad, strict=True)):
            length = self.padded_length + taken - left
            if seq not in self.idle and regions.full(start, length):
                begin = regions.indexed(start, length)
                found.append((seq, begin, begin + regions.buffer))
        return found

    def _next_full(self) -> int:
        """Return the padded length at which the next ring becomes full."""
        regions, waits = self.regions, []
        for seq, (start, left) in enumerate(zip(self.ring_start, self.left_pad, strict=True)):
            if seq not in self.idle:
                over = self.padded_length - left - start - regions.ring
                waits.append(-over if over < 0 else -over % regions.buffer)
        return self.padded_length + min(waits, default=1 << 60)

    # Steps

    @contextmanager
    def prompt(self, tokens: int) -> Iterator[None]:
        """Treat the next `tokens` tokens of all sequences, padding included, as one prompt in chunks."""
        self._end = self.padded_length + tokens if tokens else None
        try:
            yield
        finally:
            self._end = None

    @contextmanager
    def prompts(self, tokens: Mapping[int, int]) -> Iterator[None]:
        """Treat the next tokens as prompts of some sequences of a batch.

        tokens: of each prompt, by sequence.

        The prompt of one sequence may come in chunks. Several prompts come whole, one after the other in one step, in
        sequences without tokens.
        """
        self.filling = {seq: self.length(seq) + own for seq, own in tokens.items()}
        try:
            yield
        finally:
            self.filling = {}

    @property
    def announced(self) -> bool:
        """Whether an announced prompt has not ended yet."""
        return self._end is not None or bool(self.filling)

    def ends_with(self, step: Step) -> bool:
        """Return whether an announced prompt ends with a step."""
        return self.announced and not step.remaining

    @property
    def past(self) -> int:
        """Tokens before the next step, as transformers counts them: with padding, or of the sequence being prefilled."""
        return self.length(next(iter(self.filling))) if self.filling else self.padded_length

    def lacks(self) -> dict[int, int]:
        """Return how many tokens the announced prompts of single sequences lack, by sequence."""
        return {seq: max(0, end - self.length(seq)) for seq, end in self.filling.items()}

    @property
    def prefill_remaining(self) -> int:
        """Tokens of the announced prompt that are still to be prefilled."""
        if self.filling:
            return sum(self.lacks().values())
        return 0 if self._end is None else max(0, self._end - self.padded_length)

    def decodes(self, tokens: int) -> bool:
        """Return whether a step of `tokens` new tokens decodes them one by one, if every sequence has earlier tokens."""
        return self.verifying or (tokens <= self.most_decoded and not self.announced)

    def begin(self, tokens: int, left_pad: Sequence[int] | None = None, *, dense: bool = True) -> Step:
        """Start a step. If the step before was not committed, it failed, and its tokens do not count.

        left_pad: padding of each sequence; None: unchanged.
        dense: see Step.
        """
        filling = self.filling
        pads = self.left_pad if left_pad is None else left_pad
        parts = tuple(filling.items()) if len(filling) > 1 else tuple((seq, tokens) for seq in filling)
        assert not parts or sum(own for _, own in parts) == tokens
        start = self.past
        step = Step(start, tokens, tuple(pads), self.idle, parts, dense, max(0, self.prefill_remaining - tokens))
        if self.capacity == 0:
            self.capacity = self.room or roomier(0, start + tokens + step.remaining)
        elif step.longest > self.capacity:
            self.capacity = roomier(self.capacity, step.longest)
        self.step = step
        return step

    def commit(self, step: Step) -> None:
        """Count the tokens of the step, which `begin` returned last."""
        self.step = None
        self._committed = step, {name: copy(getattr(self, name)) for name in _COUNTED}
        self.commits += 1
        self.prefills += step.dense
        if step.parts:
            for row in step.rows():
                self.set_length(row.seq, row.length)
                self.ring_start[row.seq] = self.regions.first_indexed(row.length)
        elif step.dense:
            self._count_dense(step)
        else:
            self.count_decoded(step.tokens)
            for _ in range(step.tokens):
                self._advance()

    @property
    def latest(self) -> Step | None:
        """The step under way, or else the last committed one."""
        return self._committed[0] if self.step is None else self.step

    def uncommit(self) -> None:
        """Undo the latest commit, because the forward of its step failed."""
        (self.step, before), self._committed = self._committed, (None, {})
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
        """Count the tokens in sink and ring that the next `tokens` tokens attend to, for statistics."""
        held = self.held
        held.tokens += tokens
        for seq, left in enumerate(self.left_pad):
            for t in range(tokens if seq not in self.idle else 0):
                n = self.held_at(seq, self.padded_length - left + t + 1)
                held.steps += 1
                held.total += n
                held.most = max(held.most, n)

    # Changes from outside

    def set_length(self, seq: int, length: int) -> None:
        """Set the length of one sequence, with as little padding as possible. At length 0 it is idle."""
        pads, before = self.left_pad, self.left_pad[seq]
        pads[seq] = self.padded_length - length
        if pads[seq] < 0 or 0 not in pads:
            pads[seq] = before
            self._set_lengths({seq: length})
            return
        self.idle = self.idle | {seq} if not length or seq in self.paused else self.idle - {seq}
        self.prompt_only = False
        self.changed()

    def _set_lengths(self, new: Mapping[int, int]) -> None:
        """Set the lengths of sequences, as set_length() does."""
        lengths = [new.get(seq, self.padded_length - pad) for seq, pad in enumerate(self.left_pad)]
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

    def move(self, moves: Moves) -> None:
        """Move sequences to empty slots."""
        lengths = dict[int, int]()
        for seq, to in moves.slots.items():
            lengths[seq], lengths[to] = 0, self.length(seq)
            self.ring_start[seq], self.ring_start[to] = self.regions.sink, self.ring_start[seq]
            if seq in self.ends:
                self.ends[to] = self.ends.pop(seq)
        self._set_lengths(lengths)

    def clear(self, seq: int) -> None:
        """Drop the tokens of one sequence, which is idle from then on."""
        self.paused -= {seq}
        self.set_length(seq, 0)
        self.ring_start[seq] = self.regions.sink

    def ring_after_crop(self, seq: int, length: int) -> int:
        """Return where a sequence's ring begins after a crop to `length`: as early as in a prompt of that length."""
        return self.regions.indexed(min(self.ring_start[seq], self.regions.first_indexed(length)), length)

    def crop(self, drop: int) -> None:
        """Drop the last `drop` tokens of every sequence; see ring_after_crop."""
        firsts = [self.regions.first_indexed(max(0, self.length(seq) - drop)) for seq in range(self.count)]
        self.ring_start = [min(pair) for pair in zip(self.ring_start, firsts, strict=True)]
        self.padded_length = max(0, self.padded_length - drop)
        self.left_pad = [min(pad, self.padded_length) for pad in self.left_pad]
        self.prompt_only = False
        self.changed()

    def reorder(self, sequences: Collection[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.left_pad = [self.left_pad[seq] for seq in sequences]
        self.ring_start = [self.ring_start[seq] for seq in sequences]
        self.changed()

    def adopt(self, lengths: Sequence[int]) -> None:
        """Set the lengths of all sequences."""
        self.padded_length = max(lengths)
        self.left_pad = [self.padded_length - n for n in lengths]
        self.ring_start = [self.regions.first_indexed(n) for n in lengths]
        self.capacity = self.room or roomier(0, self.padded_length)
        self.changed()

    def forget_prompt(self) -> None:
        """Reset the sizes that a failed first prompt has set."""
        self.regions, self.capacity, self.step, self.ring_start = WHOLE, 0, None, []
        self.changed()

    # On the device

    def place(self, step: Step, token: int, device: torch.device) -> None:
        """Set the device's lengths to token `token` of the step, counted from 0."""
        self._set(step.lengths(token + 1), device)
        self.known.placed = step, token

    def place_before_step(self, device: torch.device) -> None:
        """Set the device's lengths to the committed ones, which a captured step advances, and ring starts as of the next token."""
        if self.known.placed != (self.padded_length, device):
            self._set(self._live_lengths(), device, coming=1)
            self.known.placed = self.padded_length, device

    def place_again(self, step: Step, device: torch.device) -> None:
        """Set the device's lengths as after the latest step's last token, for layers that share another layer's keys."""
        if self.step is step:
            self.place(step, step.tokens - 1, device)
        else:
            self._set(self._live_lengths(), device)

    def count_replay(self) -> None:
        """Record that a replayed step has advanced the device's lengths by a token."""
        self.on_device.advance()
        self.known.placed = None

    def forget_device(self) -> None:
        """Mark the device's lengths as unknown after a replayed step failed."""
        self.on_device.forget()
        self.known.placed = None

    def _live_lengths(self) -> list[int]:
        return [0 if seq in self.idle else self.length(seq) for seq in range(self.count)]

    def _set(self, lengths: list[int], device: torch.device, coming: int = 0) -> None:
        live = [int(seq not in self.idle) for seq in range(len(lengths))]
        starts = [0] * len(lengths)
        if self.ring_start:
            starts = [self.indexed(seq, n + coming * new) for seq, (n, new) in enumerate(zip(lengths, live, strict=True))]
        self.on_device.set(lengths, starts, live, device)
        self.known.placed = None
