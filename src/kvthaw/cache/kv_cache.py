"""The KV cache of a model: its sequences, which are cleared, moved, cropped, forked and copied between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from kvthaw.cache import passes
from kvthaw.cache.chooser import Layer
from kvthaw.cache.device_layers import DenseLayer, WindowLayer
from kvthaw.cache.finite import FiniteCheck, check_prompts
from kvthaw.cache.forward import Forward
from kvthaw.cache.layer_base import LayerKV, LayerShape, LayerState, SequenceState
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.stats import Stats, collect
from kvthaw.cache.step import Moves, Step
from kvthaw.errors import CacheError


class KVCache(Forward):
    """The layers of one cache, their sequences and streams.

    numbers: the model's full-attention layers that this cache serves, of `depth` layers in all.
    windows: its layers that attend only to recent tokens, with their spans.
    origin: returns an identity of the model that the KV belongs to; None if these layers are not all of its KV. Caches of
        equal origins share prefixes.
    reads_masks: whether layers learn their padding from the mask of a forward. False in steps of a graph runner.
    """

    def open(self, count: int, capacity: int) -> None:
        """Hold `count` idle sequences with room for `capacity` tokens each, for a running batch."""
        self.reset()
        self.sequences.open(count, capacity)

    def clear(self, seq: int, *, later: bool = False) -> None:
        """Drop one sequence, which is idle from then on. No tensor moves.

        later: queue the layers' part until finish_clear(), after coming replays.
        """
        self.rollback_failed_step(ahead=True)  # the others are decoded next
        self.sequences.undropped = max(self.sequences.undropped, self.sequences.length(seq))
        with self._for_one():
            self.sequences.clear(seq)
        self._ended = True
        self._leave(seq)
        if not later:
            self.finish_clear()

    def reuse(self, seq: int) -> None:
        """Prepare an empty slot for a new sequence, since steps of other sequences wrote to it. Its prompt does most of that."""
        self.rollback_failed_step(ahead=True)
        if self._ended and not self.sequences.padded_length:
            self.finish_clear()  # full attention may apply again
        self._leave(seq)

    def _leave(self, seq: int) -> None:
        """Queue what layers hold of a slot for finish_clear()."""
        self.finite.forget(seq)
        self._cleared |= dict.fromkeys((layer, seq) for layer in self.layers)

    def pause(self, seq: int) -> None:
        """Exclude a decoding sequence from coming steps. No tensor moves."""
        with self._for_one():
            self.sequences.pause(seq)

    def resume(self, seq: int) -> None:
        """Include a paused sequence in steps again. If its index failed to build, wait() and the next step raise the error."""
        for _, updater in passes.updaters(self.offloaded):
            updater.take_built(seq)
        self.sequences.resume(seq)

    @contextmanager
    def _for_one(self) -> Iterator[None]:
        """Context in which one sequence changes. What is known of the next step holds for the others and stays."""
        before, length = self.sequences.known, self.sequences.padded_length
        yield
        self.sequences.known.prepared = before.prepared
        if before.flushed == length:
            self.sequences.known.flushed = self.sequences.padded_length

    @torch.inference_mode(False)  # what is made here outlives the caller's mode
    @torch.no_grad()
    def export(self, seq: int) -> SequenceState:
        """Return a decoding sequence in host memory. Waits for the device.

        Raises HostMemoryError, or CacheError if the method's index cannot be exported, with nothing changed.
        """
        self.rollback_failed_step(ahead=True)
        self.finish_clear()
        layers = list[LayerState]()
        with ExitStack() as undo:
            for layer in self.layers:
                layers.append(layer.export(seq, self.streams.memory))
                undo.callback(layers[-1].release)
            undo.pop_all()
        for device in {tensor.device for layer in self.layers for tensor in layer.tensors()[:1]}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        nonfinite = self.finite.export(seq, self.layers)
        return SequenceState(self.sequences.length(seq), self.sequences.ring_start[seq], layers, self.layers, nonfinite)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, seq: int, state: SequenceState) -> None:
        """Load an exported sequence into an empty slot.

        Raises CacheError if the cache was reset or other layers are in force, or torch.OutOfMemoryError. The slot is then
        empty.
        """
        self.rollback_failed_step(ahead=True)
        self.finish_clear()  # or a later call would drop what is loaded here
        try:
            if state.home is not self.layers:
                raise CacheError("the cache has changed its layers since the sequence left it")
            self.sequences.set_length(seq, state.length)
            self.sequences.ring_start[seq] = state.ring_start
            for layer, own in zip(self.layers, state.layers, strict=True):
                layer.load(seq, own, self.sequences.indexed(seq))
            self.finite.load(seq, self.layers, state.nonfinite)
        except BaseException:
            self.clear(seq)
            raise

    @property
    def moves(self) -> bool:
        """Whether sequences can move between slots: no layer has an index, which a move would build again."""
        return all(layer.updater is None and layer.retriever is None for layer in self.offloaded)

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, moves: Moves) -> None:
        """Move decoding sequences to empty slots. Blocks stay where they lie, and the host does not wait for the device.

        If device memory is short, nothing has moved, and torch.OutOfMemoryError is raised.
        """
        self.rollback_failed_step(ahead=True)
        taken = set(moves.slots.values())
        self._drop([one for one in self._cleared if one[1] in taken])
        try:
            for layer in self.layers:
                layer.copy_slots(moves)
        except BaseException:
            passes.forget_blocks(self.offloaded)
            raise
        for layer in self.layers:
            layer.move(moves)
        with self._for_one():
            self.sequences.move(moves)
        self.finite.move(moves.slots)
        self.finite.zero(self.layers)
        passes.follow_blocks(self.offloaded)

    def _take_back(self, step: Step, drop: int) -> int:
        """Undo the last `drop` tokens of a step exactly, or all of its tokens if `drop` is more. Returns how many."""
        sequences, kept = self.sequences, max(0, step.tokens - drop)
        sequences.uncommit()
        sequences.step = None
        self._checkpoints.restore(step)
        for layer in self.layers:
            if isinstance(layer, DenseLayer):
                layer.crop(0, 0, 0)
        if kept:
            again = sequences.begin(kept, dense=False)
            self.before_step()
            self._checkpoints.repeat(again)
            self._commit(again)
        self._checkpoints.drop()
        return step.tokens - kept

    def check_crop(self, drop: int) -> None:
        """Raise CacheError if crop(drop) needs tokens that a sliding-window layer has overwritten."""
        if drop and ((step := self._checkpoints.restorable(self.offloaded)) is None or drop > step.tokens):
            for layer in self.layers:
                if not layer.keeps_all:
                    layer.crop(0, 0, 0)

    def crop(self, drop: int) -> None:
        """Drop the last `drop` tokens of every sequence. Raises CacheError, before any layer has changed, if a layer cannot."""
        sequences = self.sequences
        if drop <= 0 or not sequences.padded_length:
            return
        self.check_crop(drop)
        self.rollback_failed_step()
        self.finite = FiniteCheck()  # a copy of flags may be of the tokens that go
        if drop >= sequences.padded_length:
            self.reset()
            return
        step, exactly = self._checkpoints.restorable(self.offloaded), self._checkpoints.candidates is not None
        if step is not None:
            drop -= self._take_back(step, drop)
        if not drop:
            return
        for layer in self.layers:
            layer.rollback(None)
        for seq in range(sequences.count):
            length = max(0, sequences.length(seq) - drop)
            start = sequences.ring_after_crop(seq, length)
            for layer in self.layers:
                layer.crop(seq, start, length, exactly=exactly)
        sequences.crop(drop)

    def reorder(self, order: Sequence[int]) -> None:
        """Replace sequence i by the former sequence order[i]. Sequences may repeat, and their number may change."""
        self.rollback_failed_step()
        for part in (*self.layers, self.sequences):
            part.reorder(order)

    def clone(self, sequences: Sequences, layers: Iterable[Layer]) -> None:
        """Copy the tokens of `layers`, which belong to another cache, into this empty one as its prompt, layer by layer."""
        others = iter(layers)

        def fill(layer: OffloadedLayer | DenseLayer, step: Step) -> None:
            _clone(layer, step, next(others))

        if sequences.padded_length:
            self.append_stored_prompt(sequences.padded_length, list(sequences.left_pad), fill)

    def join(self, others: Sequence[KVCache]) -> None:
        """Move the tokens of other dense caches, which are then empty, into this empty one. At most one layer is there twice."""
        rows = [(other, seq) for other in others for seq in range(other.sequences.count)]
        self.sequences.adopt([other.sequences.length(seq) for other, seq in rows])
        step = Step(0, self.sequences.padded_length, tuple(self.sequences.left_pad), frozenset())
        for i, layer in enumerate(self.layers):
            layer.prepare(step, LayerShape.of(others[0].layers[i], 0, None))
            for seq, (other, own) in enumerate(rows):
                layer.take(seq, other.layers[i], own)  # type: ignore[arg-type]  # both are of one kind
            for other in others:
                other.layers[i].reset()
        for other in others:
            other.reset()

    def reset(self) -> None:
        """Drop all sequences."""
        for layer in self.layers:
            layer.reset()
        self._cleared.clear()
        self._unstored.clear()
        self._checkpoints.drop()
        self.streams.deferred.clear()
        self.streams.device.reset()
        self.chooser.reset()
        self.sequences.reset()
        self.finite = FiniteCheck()

    @torch.inference_mode(False)
    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        """Return a cache with the same tokens. Blocks are shared until either cache writes. A failed step is rolled back first."""
        failed = self.sequences.step
        self.rollback_failed_step()
        self.finish_clear()
        twin = memo[id(self)] = KVCache(self.settings, *self._made_of)
        twin.origin, twin.reads_masks, twin._looked = self.origin, self.reads_masks, self._looked
        twin.streams.device.copy_from(self.streams.device)
        twin.sequences.copy_from(self.sequences)
        twin.chooser.copy_from(self.chooser)
        for mine, its in zip(twin.layers, self.layers, strict=True):
            mine.copy_from(its)  # type: ignore[arg-type]  # both are of one kind
        self.sequences.step = twin.sequences.step = failed  # layers of other kinds may have counted it
        return twin

    def stats(self) -> Stats:
        """Return statistics of the cache's content and work. Waits for the device."""
        self.finish_clear()
        return collect(self.settings, self.sequences, self.layers, self.chooser.reason)


def _clone(layer: OffloadedLayer | DenseLayer, step: Step, other: Layer) -> None:
    """Copy the tokens of another cache's layer, which are the step's. Shares its rows on the host, and an equal index."""
    if isinstance(other, WindowLayer):
        raise CacheError(f"layer {other.number} keeps {other.span.size} tokens, so its cache cannot be forked")
    if isinstance(other, OffloadedLayer):
        check_prompts([other])
        other.wait()
        if isinstance(layer, OffloadedLayer) and _can_reuse(layer, other):
            layer.prepare(step, LayerShape.of(other, 0, None))
            layer.clone_from(other)
            return
    if isinstance(layer, OffloadedLayer):
        _check_queries(layer, other)
        layer.prepare(step, LayerShape.of(other, 0, None))
        own = layer.store
        lent = other.offloaded(own.block_size, own.format) if isinstance(other, DenseLayer) else other.store
        for seq in range(lent.seqs if isinstance(other, DenseLayer) or other.storage.lends(layer.storage) else 0):
            own.adopt(seq, lent.blocks(seq), lent.length(seq))
    passes.take_over(layer, other, step)


def _check_queries(layer: OffloadedLayer, other: LayerKV) -> None:
    """Raise CacheError if the index needs all queries of a prompt and the other layer has kept fewer."""
    for seq in range(other.sequences.count) if layer.settings.method.prompt_queries is None else ():
        known, tokens = other.queries(seq).shape[1], other.sequences.length(seq)
        if known < tokens:
            name = layer.settings.method.name
            raise CacheError(
                f"{name} is built with the queries of all {tokens} tokens, and the cache that it is forked from has kept {known}; "
                f"fork {name} from a cache of full:queries=None, or fork {name}:queries={known}"
            )


def _can_reuse(layer: OffloadedLayer, other: OffloadedLayer) -> bool:
    """Return whether this layer can copy the other layer's index.

    Both must have the same method, whose index serves any budget, and equal regions; and no token has come after the prompt.
    """
    mine, its, plan = layer.settings, other.settings, other.plan
    known = "method", "seed", "block_size", "kv_dtype"
    same = all(getattr(mine, name) == getattr(its, name) for name in known) and mine.method is its.method
    sequences = other.sequences
    if not same or not mine.method.any_budget or not sequences.prompt_only or plan is None:
        return False
    return mine.plan(sequences.longest, layer.sequences.limit).regions == plan.regions
