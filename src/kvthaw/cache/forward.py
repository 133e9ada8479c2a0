"""The steps that all layers of a cache take together: begun by the first, committed by the last, repeated if they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor

from kvthaw.cache import passes
from kvthaw.cache.checkpoints import Checkpoints
from kvthaw.cache.chooser import Chooser, Layer, make_layers, offloaded_numbers
from kvthaw.cache.device_layers import DenseLayer, WindowLayer
from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.finite import FiniteCheck, check_prompts
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.layer_base import AttentionParams, LayerKV, PrefillKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.sequences import WHOLE, Sequences
from kvthaw.cache.step import Known, Step, roomier
from kvthaw.cache.streams import Streams
from kvthaw.errors import CacheError
from kvthaw.kernels.local import Span

_CLEARS = 8
"""Layers that drop a cleared sequence during one step; see KVCache.clear."""


class Forward:
    """The steps of a cache's layers.

    A step goes through all layers in order, by attend(). The first layer begins the step and the last one commits it, so a
    step that fails in between is never counted. Before the next step, layers roll back to the committed lengths.
    """

    def __init__(
        self, settings: Settings, numbers: Sequence[int], depth: int, windows: Mapping[int, Span] = MappingProxyType({})
    ) -> None:
        offloaded, self._made_of = offloaded_numbers(settings, numbers, depth), (numbers, depth, windows)
        self.settings, self.sequences = settings, Sequences()
        host, device = (
            HostMemory(settings.host_bytes, settings.ranks),
            DeviceMemory(settings.device_memory, offloaded, settings.ranks),
        )
        self.streams = Streams(depth, host, device)
        self.finite = FiniteCheck()
        self._checkpoints = Checkpoints(self.sequences)
        self.origin: Callable[[], str] | None = None
        self.reads_masks = True
        layers = make_layers(settings, numbers, depth, windows, self.sequences, self.streams)
        self._capacity = -1  # for which the layers' fixed bytes are known
        self._looked = 0  # decoded tokens when it looked ahead last
        self._in_forward = self._prefilled = False  # _prefilled: a prompt was counted that may yet prove to have failed
        self._cleared = dict[tuple[LayerKV, int], None]()  # what is to drop, the earliest first
        self._ended = False  # whether a sequence has ended since
        self._unstored: list[tuple[OffloadedLayer, PrefillKV]] = []  # of the prefill under way
        self._places = {layer.number: i for i, layer in enumerate(layers)}
        self.chooser = Chooser(layers, settings, self.sequences, self.streams)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in force."""
        return self.chooser.layers

    @property
    def offloaded(self) -> list[OffloadedLayer]:
        """The layers in force whose KV is offloaded."""
        return self.chooser.offloaded

    def layer(self, number: int) -> Layer:
        """Return the layer in force with this number; see Chooser."""
        return self.chooser.layers[self._places[number]]

    # Steps

    def attend(
        self,
        layer: LayerKV,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: AttentionParams,
        left_pad: Sequence[int] | None = None,
    ) -> Tensor:
        """Append new tokens to a layer and attend with them to all tokens before each, or to the tokens that the method
        selects.

        query: [B, Hq, T, D]. B is 1 for a prompt of one sequence.
        key, value: [B, H, T, D].
        left_pad: known padding of each sequence; None: unchanged.

        Returns [B, Hq, T, D], 0 for padding.
        """
        place = self._places[layer.number]
        if place == 0:
            self.streams.follow(query.device)
            self._begin(query.shape[0], query.shape[2], left_pad)
        layer = self.chooser.layers[place]  # the one that the step has in force
        step = self.sequences.step
        if step is None:
            raise CacheError(f"layer {layer.number} was given tokens that the first layer was not")
        if step.tokens == 1 and not step.dense:
            if self.sequences.known.placed != (step, 0):  # by the first layer, or after one that shares another's keys
                self.sequences.place(step, 0, query.device)
            out = layer.decode(step, 0, query[:, :, 0], (key[:, :, 0], value[:, :, 0]), attention)[:, :, None]
        elif isinstance(layer, OffloadedLayer) and not step.dense:
            self._checkpoints.save(layer, step, (query, key, value), attention)
            out = passes.decode(layer, step, query, key, value, attention)
        else:
            out, new = layer.prefill(step, query, key, value, attention)
            self._store(layer, new)
        if place == len(self._places) - 1:
            self._commit(step)
        return out

    def append_stored_prompt(
        self, tokens: int, left_pad: Sequence[int] | None, fill: Callable[[OffloadedLayer | DenseLayer, Step], PrefillKV | None]
    ) -> None:
        """Start with a prompt whose rows exist already. fill(layer, step) adds them to each layer in order, as prefill() does."""
        step = self._begin(1, tokens, left_pad)
        for layer in self.layers:
            assert not isinstance(layer, WindowLayer)
            self._store(layer, fill(layer, step))
        self._commit(step)

    def _store(self, layer: LayerKV, new: PrefillKV | None) -> None:
        """Store the KV of a layer's prefill. Short prompts wait for other layers, to be stored in few launches."""
        if new is not None and isinstance(layer, OffloadedLayer):
            self._unstored.append((layer, new))
        if layer is self.layers[-1] or (self._unstored and not passes.wait(self._unstored)):
            passes.store(self._unstored)
            self._unstored.clear()
        self.streams.device.fixed[layer.number] = layer.fixed_bytes()

    def attend_again(self, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """Attend with the queries of another layer that shares this layer's keys, from the last tokens of the latest step."""
        step = self.sequences.latest
        if step is None:
            raise CacheError(f"another layer shares the KV of layer {layer.number}, which has no tokens")
        if self.sequences.step is None and not step.parts:
            layer.rollback(None)
        return layer.attend_again(step, query, key, value, attention)

    def _begin(self, rows: int, tokens: int, left_pad: Sequence[int] | None) -> Step:
        self.finish_clear()
        self._reset_failed_prompt()
        sequences, failed = self.sequences, self.sequences.step
        pads = left_pad if left_pad is not None else sequences.left_pad or [0] * rows
        if failed is None:
            self._checkpoints.drop()
            if tokens > 1 or not sequences.padded_length or sequences.filling:
                self.chooser.before_prompt(tokens, pads)
            else:
                self.chooser.before_step()
        if not sequences.divided:
            self._divide(tokens, pads)
        decodes = not sequences.filling and sequences.padded_length >= max(1, *pads) and sequences.decodes(tokens)
        step = sequences.begin(tokens, pads, dense=not decodes)
        if failed is not None:
            self._rollback(failed, ahead=not step.dense or bool(step.parts))
            sequences.step = step
        elif step.dense and not step.parts:  # tokens that ran ahead in sequences other than the prefilled one stay
            for layer in self.layers:
                layer.rollback(None)
        if not step.dense and self.streams.graph is None:  # else that was seen to, and nothing may move
            self.before_step()
        return step

    def _divide(self, tokens: int, pads: Sequence[int]) -> None:
        """Set the regions from the first prompt's length."""
        if not self.offloaded:
            return
        lengths = {max(tokens, self.sequences.prefill_remaining) - pad for pad in pads}
        if self.settings.fraction is not None and len(lengths) > 1:
            raise CacheError(f"the limit is {self.settings.fraction} of the length, but the rows' prompts differ in theirs")
        regions = self.settings.plan(max(lengths), self.sequences.limit).regions
        self.sequences.divide(regions, self.settings.sparse_queries)

    def _reset_failed_prompt(self) -> None:
        """Reset everything if a first prompt failed. No step is under way then."""
        if self.sequences.step is not None and not self.sequences.count:
            self._unstored.clear()
            for layer in self.layers:
                layer.reset()
            self.chooser.reset()
            self.sequences.forget_prompt()

    def _rollback(self, failed: Step, *, ahead: bool) -> None:
        """Roll back a failed step."""
        self.sequences.known = Known()
        self.sequences.step = failed
        self._unstored.clear()
        self._checkpoints.restore(failed)
        self._checkpoints.drop()
        for layer in self.layers:
            layer.rollback(failed, ahead=ahead)
        self.sequences.step = None

    def rollback_failed_step(self, *, ahead: bool = False) -> None:
        """Roll back every layer to the committed lengths if a step failed.

        ahead: see LayerKV.rollback.
        """
        self._reset_failed_prompt()
        if self.sequences.step is not None:
            self._rollback(self.sequences.step, ahead=ahead)
        passes.note_lost(self.offloaded, self.streams.deferred.lost)

    def _commit(self, step: Step) -> None:
        self.sequences.commit(step)
        self._prefilled = step.dense
        if step.dense:
            passes.follow_blocks(self.offloaded)  # while the device is busy; else the next step would wait for it
        else:
            self.after_step()
            self._checkpoints.commit(step)
        self._continue_host_work()

    @contextmanager
    def counted_forward(self) -> Iterator[None]:
        """Wrap a model's forward: if it raises after the last layer has attended, its step is not counted."""
        before, outer, self._in_forward = self.sequences.commits, self._in_forward, True
        try:
            yield
        except BaseException:
            if self.sequences.commits != before:
                self.sequences.uncommit()
            raise
        finally:
            self._in_forward = outer
        self._continue_host_work()

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Context in which layers ignore masks, because they know their padding."""
        self.reads_masks = False
        try:
            yield
        finally:
            self.reads_masks = True

    # Between steps

    def needs_host(self) -> bool:
        """Return whether the next decode step needs work on the host first."""
        sequences, known = self.sequences, self.sequences.known
        return (
            known.prepared != (sequences.capacity, self.streams.device.spills)
            or bool(self.streams.deferred.lost)
            or sequences.capacity <= sequences.longest
            or self.chooser.due()
            or (sequences.full() and known.flushed != sequences.padded_length)
            or (sequences.room > 0 and self.streams.device.spills and passes.lack_blocks(self.offloaded, sequences.idle))
        )

    def before_step(self) -> None:
        """Run all host-side work of the next decode step. Idempotent. A graph-safe step then runs on the device alone."""
        if not self.needs_host():
            return
        self.finish_clear()
        self.chooser.before_step()
        sequences = self.sequences
        if sequences.capacity <= sequences.longest:
            sequences.capacity = roomier(sequences.capacity, sequences.longest + 1)
        passes.note_lost(self.offloaded, self.streams.deferred.lost)
        passes.renew(self.offloaded, sequences, self.streams)
        passes.flush(self.offloaded, sequences.leaving())
        self.streams.deferred.flush()
        for layer in self.layers:
            layer.before_step()
            if self._capacity != sequences.capacity:
                self.streams.device.fixed[layer.number] = layer.fixed_bytes()
        self._capacity = sequences.capacity
        sequences.known.prepared = sequences.capacity, self.streams.device.spills
        sequences.known.flushed = sequences.padded_length

    def run_ahead(self, *, certain: bool = False) -> None:
        """Run the host-side work of the next decode step while the device is busy.

        certain: the next step is a decode step, so run the work of all layers. Else only layers that can undo it exactly
            take part.
        """
        if self.sequences.full():
            self._run_ahead([layer for layer in self.offloaded if certain or layer.can_run_ahead])

    def _continue_host_work(self) -> None:
        """Once the step is committed, start work of indexes on the host, and publish the prepared changes of other indexes."""
        if self._in_forward or self.sequences.step is not None or not (self._prefilled or self.sequences.full()):
            return
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive the caller's mode
            for _, updater in passes.updaters(self.offloaded) if self._prefilled else ():
                updater.commit()
            self._prefilled = False
            if self._checkpoints.candidates is None and self.sequences.full():
                passes.take_effect(self.offloaded, self.sequences.leaving())
                ahead = [layer for layer in self.offloaded if layer.on_host and layer.can_run_ahead]
                if ahead and self.streams.graph is None:  # else queued work waits: a first token is drawn before clusters form
                    self._run_ahead(ahead)

    def _run_ahead(self, layers: Sequence[OffloadedLayer]) -> None:
        try:
            done = passes.flush(layers, self.sequences.leaving())
        except Exception:  # the step may not come; if it does, it flushes again and raises the error
            done = False
        self.streams.deferred.flush()
        for layer in layers:
            layer.storage.update_table()
        if done and len(layers) == len(self.offloaded):
            self.sequences.known.flushed = self.sequences.padded_length

    @property
    def allocated(self) -> list[OffloadedLayer]:
        """Offloaded layers that have had tokens: all or none, except after a first prompt that failed between layers."""
        return [layer for layer in self.offloaded if layer.plan is not None]

    def after_step(self) -> None:
        """Pin host memory for coming tokens, move blocks, and continue work that is spread over steps."""
        layers = self.allocated
        if not layers or (layers[0].store.pinned and torch.cuda.is_current_stream_capturing()):
            return  # where a step is captured nothing can be pinned; afterwards this is called again
        passes.look_ahead(layers, self.sequences, self._looked)
        self._looked = self.sequences.decoded
        self.streams.aux.advance()

    def finish_clear(self, *, all: bool = True) -> None:
        """Free the state that layers hold of cleared sequences. In one layer that takes the host 10 us, with an index 80 us.

        all: False: free half of it, at least _CLEARS layers' of a sequence. The rest waits for later calls.
        """
        count = len(self._cleared)
        self._drop(list(islice(self._cleared, count if all else max(_CLEARS, count // 2))))

    def _drop(self, cleared: Sequence[tuple[LayerKV, int]]) -> None:
        """Free the state that layers hold of cleared sequences, some of those in `_cleared`."""
        if not cleared:
            return
        for one in cleared:
            layer, seq = one
            layer.clear(seq)
            del self._cleared[one]
        if not self._cleared:
            self.sequences.undropped = 0
            self.finite.zero(self.layers)
            passes.follow_blocks(self.offloaded)  # no step may be captured before
            ended, self._ended = self._ended, False
            if ended and not self.sequences.padded_length and self.chooser.returns:
                self.streams.device.reset()
                self.sequences.divide(WHOLE, self.sequences.most_decoded)
                self.chooser.reset()

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.finish_clear()
        check_prompts(self.offloaded)
        for layer in self.offloaded:
            layer.wait()

    @torch.inference_mode(False)  # tensors made here outlive the caller's mode
    @torch.no_grad()
    def built(self, seq: int, timeout: float | None = 0.0, *, build: bool = True) -> bool:
        """Build indexes of a paused sequence. Returns whether all are built, so that resume() does not wait.

        timeout: seconds to wait for indexes that are built concurrently with other sequences' steps; None: without limit.
            With 0, the others wait for indexes on the device, so one call builds at most BUILT_AT_ONCE layers.
        build: False: only report.
        """
        every = passes.updaters(self.offloaded)
        most = (len(every) if timeout is None or timeout > 0 else passes.BUILT_AT_ONCE) if build else 0
        left = [own for _, own in every if own.is_stale(seq) and not own.retriever.index.traits.on_host]
        for updater in left[:most]:
            updater.rebuild(seq, self.sequences.indexed(seq))
        return bool(self.settings.ranks.least(len(left) <= most and all(own.built(seq, timeout) for _, own in every)))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""
        return [*self.sequences.on_device.tensors(), *(tensor for layer in self.layers for tensor in layer.tensors())]
