"""The layers of a cache: full attention while it is faster, then the method."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvthaw.cache.device_layers import DenseLayer, WindowLayer
from kvthaw.cache.host_memory import beyond
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.passes import take_over
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.sparse_attention import FullAttention, HeldAttention
from kvthaw.cache.step import Held, Step, roomier
from kvthaw.cache.streams import Streams
from kvthaw.config import Crossing
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.formatting import counted, human
from kvthaw.kernels.local import Span
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import row_format

_log = logging.getLogger(__name__)


class FullLayer(OffloadedLayer):
    """Sink and ring in a slab, and all other rows in blocks, where attention reads them; see LayerKV.

    A DenseLayer reserves every sequence's capacity. A FullLayer allocates blocks as tokens come, so a running batch of
    short sequences with a large capacity may attend to everything. If the device is full, a block lies on the host and
    attention reads it over the bus.
    """

    attends_to_all = True

    def _sizes(self, step: Step) -> Plan:
        return replace(super()._sizes(step), rows=0)

    def _attention(self, storage: LayerStorage, plan: Plan, query: Tensor, key: Tensor) -> HeldAttention:
        storage.place_on_device(self.number)
        storage.tabled = True
        return FullAttention(storage, self.sequences)

    def balance(self, needed: int) -> None:
        super().balance(0)  # attention reads all blocks, so none makes room for coming ones

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        return self.sparse.attend(step, t, query, newest, attention)[0]  # no observer: nothing is selected


Layer = OffloadedLayer | DenseLayer | WindowLayer


class Chooser:
    """Switch a cache from full attention to its method once that is faster, or once full attention's KV does not fit the
    device.

    Full attention applies up to `Settings.full_below` tokens. The method applies from the next step on, until reset().
    Without full_below the method applies from the first token on.

    Full attention holds KV in tensors with room for every sequence's capacity. If a running batch lacks room for these, it
    holds KV of all layers in blocks (FullLayer), provided that one sequence fits. A request for which
    block_room() is too small then waits for admission.

    layers: the layers in force, as a tuple that is replaced, never modified.
    offloaded: the layers in force that are OffloadedLayers.
    by_method: the method's layers by their index in `layers`, in force or not.
    every: these and the layers that attend to everything under the method too. In blocks, FullLayers serve in their place.
    full: whether full attention is in force.
    reason: why, as text for Stats.
    seq_bytes: returns the device bytes that a sequence of a running batch takes under the method, without its rows. None:
        unknown.
    """

    def __init__(self, layers: Sequence[Layer], settings: Settings, sequences: Sequences, streams: Streams) -> None:
        self.settings, self.sequences, self.streams = settings, sequences, streams
        self.crossing = settings.full_below or Crossing(((1, 0),))
        self.layers: tuple[Layer, ...] = tuple(layers)
        self._put({})
        self.by_method = {i: layer for i, layer in enumerate(layers) if isinstance(layer, OffloadedLayer)}
        dense = {i: layer for i, layer in enumerate(layers) if isinstance(layer, DenseLayer)}
        self.every: dict[int, OffloadedLayer | DenseLayer] = {**self.by_method, **dense}  # in this order they change
        self.full, self.reason = False, ""
        self.seq_bytes: Callable[[], int] | None = None
        self._short = False  # of host memory
        self.reset()

    def _put(self, others: Mapping[int, Layer]) -> None:
        """Replace the layers in force at these indexes."""
        self.layers = tuple(others.get(i, layer) for i, layer in enumerate(self.layers))
        self.offloaded = [layer for layer in self.layers if isinstance(layer, OffloadedLayer)]

    def reset(self) -> None:
        """Start over with an empty cache."""
        self._put({})  # a sequence that was exported cannot return
        self._short = False
        if self.sequences.count < self.sequences.opened:
            self.sequences.widen()
            for layer in self.layers:
                layer.reset()
        if self.settings.full_below is None or (self.full and not self.in_blocks) or not self.by_method:
            return
        self.full = True
        self.reason = (
            f"full attention is faster up to {self.crossing.total(1):,} tokens of one sequence ({self.crossing.source})"
        )
        if self.settings.kv_dtype is not None:
            self.reason += f"; until then all KV lies on the device in the model's dtype, not in {self.settings.kv_dtype}"
        most = self.settings.method.prompt_queries
        for layer in self.every.values():
            layer.reset()
        own = self.sequences, self.streams.device, most
        self._put(self.every | {i: DenseLayer(layer.number, *own) for i, layer in self.by_method.items()})
        self._share_among(self.by_method)

    def copy_from(self, other: Chooser) -> None:
        """Put the kinds of layers in force that are in force in a cache of equal settings."""
        if other.in_blocks:
            self._use_blocks()
        elif not other.full:
            self._put(self.every)
        for i, layer in self.by_method.items():
            layer.rotary = other.by_method[i].rotary
        self.full, self.reason, self._short, self.seq_bytes = other.full, other.reason, other._short, other.seq_bytes

    @property
    def in_blocks(self) -> bool:
        """Whether full attention is in force with its KV in blocks."""
        return any(layer.attends_to_all for layer in self.offloaded)

    @property
    def returns(self) -> bool:
        """Whether full attention applies again once the cache is empty.

        It does not for sequences of fixed capacity whose KV never fits: every first request would then move the tensors
        that captured steps read.
        """
        changed = self.settings.full_below is not None and not self.full
        return changed and not (self.sequences.room and self._too_large(0) and self._too_many_blocks())

    def before_prompt(self, tokens: int, pads: Sequence[int]) -> None:
        """Switch if needed, before a step of several tokens or the first step."""
        if not self.full:
            return
        sequences, new = self.sequences, max(tokens, self.sequences.prefill_remaining)
        lengths = [new - pad for pad in pads] if not sequences.count else self._lengths(sequences.lacks() or new)
        self._choose(lengths)

    def _lengths(self, new: int | Mapping[int, int]) -> list[int]:
        """Return the lengths of all sequences after `new` more tokens in each sequence that is not idle, or only in some."""
        sequences = self.sequences
        lengths = [0 if one in sequences.idle else sequences.length(one) for one in range(sequences.count)]
        if isinstance(new, int):
            return [length + new if length else 0 for length in lengths]
        for seq, tokens in new.items():
            lengths[seq] += tokens
        return lengths

    def due(self) -> bool:
        """Return whether the next decode step may switch to the method."""
        sequences = self.sequences
        if not self.full or self._short:
            return False
        if sequences.known.crossing is None:
            live = [sequences.length(seq) for seq in range(sequences.count) if seq not in sequences.idle]
            left = self.crossing.total(len(live)) - sum(live)
            sequences.known.crossing = sequences.padded_length + max(0, left // max(1, len(live)))
        spills = self.settings.ranks.size == 1 and self._spills()  # processes agree with the next prompt
        return spills or sequences.padded_length >= sequences.known.crossing or sequences.capacity <= sequences.longest

    def before_step(self) -> None:
        """Switch if needed, before a decode step."""
        if self.due():
            self._choose(self._lengths(1))

    def narrows(self, prompt: Mapping[int, int] | None = None) -> tuple[str, int] | None:
        """Return why the method applies from the next decode step on, and how many sequences device_memory then holds.

        Returns None if it does not apply yet, or if all sequences fit.

        prompt: a sequence and the tokens that its prompt lacks; asks about this prompt's next tokens instead of a decode
            step.
        """
        if not self.full or self._short or self.sequences.step is not None or not (prompt or self.due()):
            return None
        most, lengths = self.most(), self._lengths(prompt or 1)
        reason = self._reason(lengths) if most < self.sequences.count else None
        return None if reason is None or self._fits_in_blocks(lengths) else (reason, most)

    def most(self) -> int:
        """Return how many sequences device_memory holds under the method, wherever their rows lie; all if that is unknown."""
        sequences, memory = self.sequences, self.streams.device
        if self.seq_bytes is None or self.settings.full_below is None:
            return sequences.count
        memory.resolve(self.crossing.device)
        return max(1, min(sequences.count, memory.bytes // self.seq_bytes())) if memory.bytes else sequences.count

    def _reason(self, lengths: Sequence[int]) -> str | None:
        """Return why sequences of these lengths need other layers than the ones in force, else None."""
        if (reason := self._too_many(lengths)) is not None or not self.in_blocks:
            return reason or self._too_large(max(lengths))
        if self.settings.ranks.least(not self._spills()):  # which may differ between processes
            return None
        return f"device_memory is {human(self.streams.device.bytes)}, which has no room for all blocks of full attention"

    def _fits_in_blocks(self, lengths: Sequence[int]) -> bool:
        """Return whether full attention can continue in blocks where its tensors do not fit; only before the first token."""
        return not (self.in_blocks or self.sequences.padded_length or self._too_many(lengths) or self._too_many_blocks())

    def _choose(self, lengths: Sequence[int]) -> None:
        """Switch to the method, or to blocks, if sequences of these lengths require it."""
        if (reason := self._reason(lengths)) is None:
            return
        if self._fits_in_blocks(lengths):
            self._use_blocks()
            self.reason += "; KV lies in blocks on the device"
            _log.info("full attention: %s", self.reason)
        elif not self._short:
            self.try_change(reason)

    def try_change(self, reason: str, seqs: int | None = None) -> None:
        """Switch as change() does, or stay with full attention if host memory is short."""
        try:
            self.change(reason, seqs)
        except HostMemoryError as error:
            self._short = True
            _log.warning("full attention goes on, host memory is short: %s", error)

    def _too_many(self, lengths: Sequence[int]) -> str | None:
        crossing, live = self.crossing, [n for n in lengths if n]
        limit = crossing.total(len(live))
        if sum(live) <= limit:
            return None
        return (
            f"{counted(sum(live), 'token')} in {counted(len(live), 'sequence')}; full attention is faster up to "
            f"{limit:,} ({crossing.source})"
        )

    def _spills(self) -> bool:
        """Return whether blocks of full attention lie on the host because the device is full."""
        layers = (layer for layer in self.offloaded if layer.attends_to_all)
        return any(one.store.table.some_on_host and not one.store.room for one in layers)

    def _too_large(self, longest: int) -> str | None:
        """Return a reason if the KV of all sequences at their capacity does not fit the device, else None."""
        sequences, memory, crossing = self.sequences, self.streams.device, self.crossing
        memory.resolve(crossing.device)
        if memory.limit is None or (memory.limit == "auto" and crossing.device.type == "cpu"):
            return None
        capacity = sequences.room or sequences.capacity
        if capacity < longest:
            capacity = roomier(capacity, longest)
        need = max(1, sequences.opened, sequences.count) * capacity * crossing.token_bytes * len(self.every)
        if need <= memory.bytes:
            return None
        return f"the KV of all layers takes {human(need)} of the device; device_memory is {human(memory.bytes)}"

    def block_room(self) -> int | None:
        """Return the most tokens of all sequences, each rounded up to whole blocks, that full attention can hold on the device.

        Returns None if full attention is not in force, or has a tensor with room for every sequence's capacity.
        """
        in_blocks = self.full and (self.in_blocks or self._fits_in_blocks([]))
        return self._block_room() if in_blocks and (self.in_blocks or self._too_large(0)) else None

    def _block_room(self) -> int:
        """Return how many tokens fit besides the sinks and rings of all sequences."""
        sequences, settings, device = self.sequences, self.settings, self.streams.device
        device.resolve(self.crossing.device)
        held = sequences.opened * settings.plan(0, sequences.limit).regions.held
        return device.bytes // (self.crossing.token_bytes * len(self.every)) - held

    def _too_many_blocks(self) -> bool:
        """Return whether full attention cannot keep its KV in blocks.

        The device then lacks room for one sequence under full attention, capacity grows, or rows have another dtype.
        """
        sequences, settings = self.sequences, self.settings
        if not sequences.room or settings.kv_dtype is not None:
            return True
        most = min(sequences.room, self.crossing.total(1)) + settings.block_size  # one begun
        return self._block_room() < most

    def _use_blocks(self) -> None:
        """Put layers in force that hold KV in blocks. The cache must be empty."""
        own = self.settings, self.streams, self.sequences
        self._put({i: FullLayer(layer.number, *own) for i, layer in self.every.items()})
        self._share_among(self.every)

    def _share_among(self, layers: Mapping[int, Layer]) -> None:
        """Divide the device memory for blocks among these layers."""
        self.streams.device.offloaded = frozenset(layer.number for layer in layers.values())

    def change(self, reason: str, seqs: int | None = None) -> None:
        """Put the method's layers in force, with the tokens that the cache has. Raises HostMemoryError, with nothing changed.

        seqs: hold only the first `seqs` sequences until the cache is empty; the others have no tokens.
        """
        sequences, settings = self.sequences, self.settings
        seqs = sequences.count if seqs is None else seqs
        lengths = [sequences.length(seq) for seq in range(seqs)]
        if any(lengths):
            self._check_memory(lengths)
        if seqs < sequences.count:
            reason += f"; device_memory is {human(self.streams.device.bytes)}, which holds {seqs} sequences under it"
            sequences.narrow(seqs)
        if any(lengths):
            plan = settings.plan(max(lengths), sequences.limit)
            sequences.divide(plan.regions, min(settings.sparse_queries, plan.regions.window))
            sequences.held = Held()
        self.full, self.reason = False, reason
        sequences.changed()
        _log.info("%s from here on: %s", settings.method.name, reason)
        self._share_among(self.by_method)
        device = self.streams.device
        device.leave_pool()
        step = Step(0, sequences.padded_length, tuple(sequences.left_pad), sequences.idle)
        for i, layer in self.every.items():
            before = self.layers[i]
            if before is layer:
                continue
            try:
                take_over(layer, before, step)
            except BaseException:  # this layer and all later ones continue with full attention
                layer.reset()
                raise
            self._put({i: layer})
            before.reset()
            if any(lengths):
                device.trim(self.crossing.device)

    def _check_memory(self, lengths: Sequence[int]) -> None:
        """Raise HostMemoryError if blocks for these tokens fit neither the host nor the device without full attention's KV."""
        settings, device = self.settings, self.streams.device
        blocks, short = sum(-(-n // settings.block_size) for n in lengths), 0
        for i, layer in self.by_method.items():
            room = device.share(layer.number) + device.fixed.get(layer.number, 0) if device.bytes else 0
            short += beyond(blocks, room, self.block_bytes(i), pinned=self.layers[i].read(0, 0, 0).is_cuda)
        self.streams.memory.check(lambda: short)

    def block_bytes(self, place: int) -> int:
        """Return the bytes of one block of a layer under the method.

        place: index of the layer in `layers`.
        """
        settings, crossing, layer = self.settings, self.crossing, self.layers[place]
        if not isinstance(layer, DenseLayer) or not layer.token_bytes():
            return settings.block_size * crossing.token_bytes  # if rows are of 8 bits it will be less
        own = layer.read(0, 0, 0)
        return settings.block_size * len(own) * row_format(settings.kv_dtype, own.shape[3], own.dtype).row_bytes


def offloaded_numbers(settings: Settings, numbers: Sequence[int], depth: int) -> list[int]:
    """Return the numbers of the full-attention layers that the method serves. Raises ConfigError if there are none."""
    found = [] if settings.method.dense else [i for i in numbers if i >= settings.dense_layers]
    if not found and not settings.method.dense:
        raise ConfigError(
            f"dense_layers is {settings.dense_layers}; that leaves no layer to {settings.method.name}, of {depth}: it must be at "
            f"most {max(numbers)}"
        )
    return found


def make_layers(
    settings: Settings, numbers: Sequence[int], depth: int, windows: Mapping[int, Span], sequences: Sequences, streams: Streams
) -> list[Layer]:
    """Return the layers of a cache in order. An anchor leads to the next one, the first layer of a window's span all others."""
    method, offloaded = settings.method, offloaded_numbers(settings, numbers, depth)
    layers, leader, leaders = list[Layer](), None, dict[Span, WindowLayer]()
    for i in sorted((*numbers, *windows)):
        if i in windows:
            local = WindowLayer(i, sequences, windows[i], leaders.get(windows[i]))
            leaders.setdefault(windows[i], local)
            layers.append(local)
        elif i in offloaded:
            anchor = method.index is None or settings.selects(i, offloaded, depth)
            if not anchor and leader is None:
                raise ConfigError(f"anchors is {method.anchors}; layer {i} comes before the first and has nothing to follow")
            layer = OffloadedLayer(i, settings, streams, sequences, None if anchor else leader)
            leader = layer if anchor else leader
            layers.append(layer)
        else:
            layers.append(DenseLayer(i, sequences, streams.device, method.prompt_queries))
    return layers
