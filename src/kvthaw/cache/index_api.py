"""What a method gives kvthaw: an index and its optional capabilities, a transfer, and the settings of both.

Letters used in shapes: B sequences, Hq query heads, H KV heads, G = Hq // H, D head_dim, T tokens, M rows selected, C pool slots,
W the width of an observation window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from kvthaw.cache.aux_stream import AuxStream
from kvthaw.cache.deferred_batch import DeferredBatch
from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.cache.rotary import Rotary
from kvthaw.cache.sequences import Sequences
from kvthaw.errors import ConfigError, at_least
from kvthaw.kernels.merge import Partial
from kvthaw.regions import Regions


@dataclass(frozen=True, slots=True)
class Selection:
    """What one layer attends to this step, besides sink, window and buffer. No row twice.

    rows: [B, H, M] int32 token positions (a sequence's own, its left padding not counted), -1 padded; M fixed by the budget.
    counts: [B, H] int32, how many of the M are rows.
    log_weight: [B, Hq, M] float32 added to the logits, per query head; -inf: not drawn by this head.
    partial: attention the index did itself, over tokens disjoint from rows.
    """

    rows: Tensor
    counts: Tensor
    log_weight: Tensor | None = None
    partial: Partial | None = None


@dataclass(frozen=True, slots=True)
class IndexContext:
    """What an index must know of the layer it serves.

    store holds the layer's rows on the host; an index that works on the CPU reads keys from it, by position, and copies none.
    rows: how many rows select() will be asked for, 0 where that is not known.
    device is where queries come from and where a graph-safe index keeps its metadata. scale multiplies q.k before the softmax.
    slab and sequences: the tokens that stand in sink and ring, for an index that weighs what it brings against them; None without a
    layer. aux: where an index works beside the model; deferred: where it puts off what other layers have to do too; both of all
    layers of a cache, None: it makes its own. rotary: the turns that the layer's keys were given, for a Method that asks for it;
    None where the model has none.
    """

    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    store: HostStore
    regions: Regions
    scale: float
    seed: int = 0
    rows: int = 0
    slab: Slab | None = None
    sequences: Sequences | None = None
    aux: AuxStream | None = None
    deferred: DeferredBatch | None = None
    rotary: Rotary | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.q_heads // self.kv_heads


class Index(Protocol):
    """Finds the tokens a query needs. One per layer group. Owns no KV; maps its units (pages, clusters, tokens) to rows.

    Positions are a sequence's own. An index holds the positions [first, length) that it was given, where first is the end of the
    sink; it never returns a row outside them. Everything random derives from (seed, layer, head, position), never from the
    sequence."""

    graph_safe: bool
    """select() has static shapes and never syncs the host."""
    grows: bool
    """A long append() serves as well as a build() of the whole: a prompt that comes in chunks is indexed chunk by chunk. Else it is
    built once, with the last chunk."""
    on_host: bool
    """It works on the CPU and reads keys from the store: build() and append() are called on a worker thread, once the rows are
    there, with keys and values of the right length and no columns; select() gets its query on the CPU."""

    def make_room(self, seqs: int, tokens: int) -> None:
        """For so many sequences and so many positions of each: until there are more, no tensor of a graph-safe index moves."""

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Index a sequence anew. keys, values: [H, T, D], positions first .. first + T; queries: the prompt's last, [Hq, W, D]."""

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Add the next n positions of some sequences, in place. keys, values: [R, H, n, D] for the R sequences; queries: None or
        [R, Hq, W, D]."""

    def select(self, query: Tensor, budget: int) -> Selection:
        """The rows for one query a head, at most budget a KV head. query: [B, Hq, D], after RoPE, unscaled."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget positions >= length; 0 clears the sequence, of which nothing stays."""

    def reorder(self, seqs: Sequence[int]) -> None:
        """Sequence i becomes what sequence seqs[i] was; sequences may repeat and may be more or fewer than before."""

    def tensors(self) -> list[Tensor]:
        """The tensors on the device that select() reads or writes, those of helper objects included. A captured step is captured
        again once one of them has moved; the cache adds its own (store, slab, sequences)."""

    def clone_from(self, other: Self) -> None:
        """Hold what another index of the same kind and settings holds, and go on as that one would. Neither changes the other."""


@runtime_checkable
class Rebuilds(Protocol):
    """An index that makes keys of its own for rows that were fetched."""

    def rebuild(self, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Put them in the place of those that came, in the layer's own slab. fetch and slots: see Transfer; both on the device.
        Static work there, after the transfer and on its stream."""


@runtime_checkable
class Reversible(Protocol):
    """An index that can take back an append() of tokens without queries, so that it may be given them before it is sure that they
    leave the ring."""

    @property
    def reversible(self) -> bool:
        """Whether it could take back the next one."""

    def undo(self, seq: int, length: int) -> None:
        """Be as before the last append() to a sequence, which began at position `length`: to the bit, as if it had not been."""


@runtime_checkable
class WorksBeside(Protocol):
    """An index that does some of its work beside the current stream."""

    def join(self) -> None:
        """What follows on the current stream sees that work; the host does not wait."""


@runtime_checkable
class ReadsStore(Protocol):
    """An index whose select() reads keys from the host, on the device."""

    def searched_bytes(self) -> int:
        """Bytes that one select() of all sequences reads there."""


@runtime_checkable
class Attends(Protocol):
    """An index whose selections may hold attention of its own (`Selection.partial`), which knows no softcap."""

    @property
    def attends(self) -> bool:
        """Whether they do."""


class Transfer(Protocol):
    """Brings rows from the host to the device."""

    graph_safe: bool

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Write row fetch[b, h, m] of sequence b, head h into pool slot slots[b, h, m]. Both [B, H, M] int32; fetch -1 skips."""


@dataclass(frozen=True)
class Method:
    """How a layer group finds its rows. A method is one file in kvthaw.methods and one line in METHODS.

    name: as in METHODS. paper: where it comes from. unit: what it selects (token, page, cluster, or - for none).
    index: makes the index of a layer group; None means that nothing is retrieved.
    dense: every layer keeps all of its KV on the device and attends to all of it.
    regions: the paper's sink, window and update buffer.
    evicts: tokens that leave the window are dropped for good instead of offloaded.
    keep: of how many steps, this one included, the selected rows stay on the device (ClusterKV's R); 0: each step brings its own.
    transfer: how rows come to a GPU; None: a kernel there reads them (UvaGather). On a CPU they are copied (BulkCopy).
    anchors: the layers that select, by number, or every how manieth of the layers that are not dense; the layers between follow the
    anchor before them. Floats are shares of the model's depth, and the first layer that is not dense then selects too.
    any_budget: what its index keeps of the prompt depends on the regions, but not on how many rows it will be asked for, so a fork
    with another budget takes it over (a copy: not for tables that are larger than what it takes to make them).
    rotary: the index needs the turns of the model's rotary positions. prefetches: it is asked with the query that the layer would
    have if its attention were given the input of the layer before.
    """

    name: str
    paper: str
    unit: str
    index: Callable[[IndexContext], Index] | None
    regions: Regions = None  # type: ignore[assignment]  # left out, it is refused by name
    dense: bool = False
    evicts: bool = False
    keep: int = 1
    transfer: Callable[[], Transfer] | None = None
    anchors: int | tuple[int, ...] | tuple[float, ...] = 1
    any_budget: bool = False
    rotary: bool = False
    prefetches: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.regions, Regions):
            raise ConfigError(f"regions is {self.regions!r}; a Method needs Regions(sink, window, buffer), of kvthaw.regions")
        at_least(0, keep=self.keep)
        if isinstance(self.anchors, int):
            at_least(1, anchors=self.anchors)
