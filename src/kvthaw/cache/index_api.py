"""What a method gives kvthaw: an index and its optional capabilities, a transfer, and the settings of both.

Letters used in shapes: B sequences, Hq query heads, H KV heads, G = Hq // H, D head_dim, T tokens, M rows selected, C pool slots,
W the width of an observation window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from kvthaw.cache.aux_stream import AuxStream
from kvthaw.cache.deferred_batch import DeferredBatch
from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.cache.rotary import Rotary
from kvthaw.cache.sequences import Sequences
from kvthaw.errors import ConfigError, at_least
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.row_format import KvDtype
from kvthaw.regions import Regions

RECENT_QUERIES = 128
"""How many of a prompt's last queries are kept, where a method asks for no other number."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that one layer attends to in this step, besides sink, window and buffer. No row twice.

    rows: [B, H, M] int32 token positions in the sequence (left padding not counted), padded with -1; the budget fixes M.
    counts: [B, H] int32, the number of rows among the M.
    log_weight: [B, Hq, M] float32, added to the logits of each query head; -inf: this head did not draw the row.
    partial: attention that the index computed itself, over tokens that are not in rows.
    """

    rows: Tensor
    counts: Tensor
    log_weight: Tensor | None = None
    partial: Partial | None = None


@dataclass(frozen=True, slots=True)
class IndexContext:
    """The layer that an index serves.

    device: where queries come from and where a graph-safe index keeps its metadata. store: the layer's rows on the host; an
    index on the CPU reads keys there by position. scale: multiplies q.k before the softmax. rows: how many rows select() will
    be asked for, 0 if not known. slab, sequences: the tokens in sink and ring, for an index that weighs its rows against them;
    None without a layer. aux: stream for work beside the model; deferred: queue of work that runs once for all layers; shared
    by the layers of a cache, and if None the index makes its own. rotary: the layer's rotary embedding, if the Method asks for
    it and the model has one. ranks: the processes that have the other heads of the layer; q_heads and kv_heads are this one's.
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
    ranks: Ranks = ALONE

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.q_heads // self.kv_heads

    @property
    def heads(self) -> range:
        """The numbers of the KV heads in the model, from which random choices derive."""
        return self.ranks.heads(self.kv_heads)

    def looked_at(self, counts: Sequence[int], room: int, most: Callable[[int], int] = int) -> int:
        """Return how many entries of a table select() looks at: on a CPU as many as any sequence has; on a GPU as many in all
        steps of a bucket (Sequences.bucket), so that one that was captured may be replayed.

        counts: entries of the sequences that a step computes, which are the first of the batch; room: entries that the table has
        room for; most: how many a sequence of so many tokens has at most."""
        longest = max(counts, default=0)
        if self.device.type == "cpu":
            return longest
        bucket = 0 if self.sequences is None else self.sequences.bucket(len(counts))
        return room if not bucket or most(bucket) < longest else min(room, most(bucket))


class Index(Protocol):
    """Selects the rows that a query needs. One per layer group. Owns no KV; maps its units (pages, clusters, tokens) to rows.

    Positions count from the start of a sequence. An index holds the positions [first, length) that it was given, where first is
    the end of the sink, and never returns a row outside them. Random choices derive from (seed, layer, head, position), the
    head's number in the model, never from the place of the sequence in the batch.
    """

    graph_safe: bool
    """select() has static shapes and never syncs the host."""
    grows: bool
    """append() of a long chunk is as good as build() of all tokens, so a chunked prompt is indexed chunk by chunk. If False,
    the index is built once, with the last chunk."""
    on_host: bool
    """The index works on the CPU and reads keys from the store. A worker thread calls build() and append() once the rows are
    there, with keys and values of D = 0; select() gets its query on the CPU."""

    def make_room(self, seqs: int, tokens: int) -> None:
        """Allocate for `seqs` sequences of `tokens` positions. Until there are more, no tensor of a graph-safe index moves."""

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Index a sequence from scratch. keys, values [H, T, D]: positions first .. first + T; queries [Hq, W, D]: the prompt's
        last, at most `Method.prompt_queries`."""

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Add the next n positions of some sequences, in place; one that was never built begins after the sink. keys, values:
        [R, H, n, D] for the R sequences; queries: None or [R, Hq, W, D]. If it raises, they are truncated to where they were."""

    def select(self, query: Tensor, budget: int) -> Selection:
        """Select at most `budget` rows per KV head for one query per head. query: [B, Hq, D], after RoPE, unscaled."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget positions >= length of a sequence; 0 clears it."""

    def reorder(self, seqs: Sequence[int]) -> None:
        """Replace sequence i by the former sequence seqs[i]; sequences may repeat, and their number may change."""

    def tensors(self) -> list[Tensor]:
        """Return the device tensors that select() reads or writes, those of helper objects included. When one has moved, a
        captured step is captured again. The cache adds its own (store, slab, sequences)."""

    def clone_from(self, other: Self) -> None:
        """Copy the state of another index with the same settings. Later changes of either do not affect the other."""


@runtime_checkable
class Rebuilds(Protocol):
    """An index that replaces fetched keys by keys that it computes."""

    def rebuild(self, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Overwrite the fetched keys in the layer's slab, on the transfer's stream and with static shapes. fetch and slots
        are on the device, see Transfer."""


@runtime_checkable
class Reversible(Protocol):
    """An index that can undo an append() of tokens without queries, so that it can run before it is certain that the tokens
    leave the ring."""

    @property
    def reversible(self) -> bool:
        """Whether the next append() could be undone."""

    def undo(self, seq: int, length: int) -> None:
        """Undo the last append() to a sequence, which began at position `length`, bit for bit."""


@runtime_checkable
class Prepared(Protocol):
    """An index that prepares changes beside the steps, which take effect whole between two of them."""

    def take_effect(self, seqs: Sequence[int]) -> None:
        """Publish prepared changes of `seqs`, whose tokens leave the ring with the next step, before their append.

        Irreversible.
        """


@runtime_checkable
class Foresees(Protocol):
    """An index that begins its work on tokens before they leave the ring."""

    def foreseen(self, seq: int) -> int:
        """Return the number of tokens behind the indexed ones whose work the index would begin now; 0: none."""

    def foresee(self, seqs: Sequence[int], keys: Tensor) -> None:
        """Begin the work on the next tokens of some sequences, as many as foreseen() said, keys [R, H, n, D]. The next appends
        bring them, unless truncate() or undo() takes back a token before them."""


@runtime_checkable
class Remembers(Protocol):
    """An index whose select() changes what it selects later."""

    @property
    def remembers(self) -> bool:
        """Whether it does."""


@runtime_checkable
class Unasks(Protocol):
    """An index that counts the queries that it was given."""

    def unask(self) -> None:
        """Take the last select() back: its step failed, and others may decode before the same queries come again."""


@runtime_checkable
class Snapshots(Protocol):
    """An index that is slow to build and quick to share."""

    def snapshot(self, seq: int) -> Any:
        """Return what the index holds of a sequence; later changes of either leave the other as it is."""

    def state(self, snapshot: Any) -> Mapping[str, Tensor]:
        """Return a snapshot as tensors on the host, from which another process can make it over the same keys."""

    def take(self, seq: int, snapshot: Any, end: int) -> None:
        """Load positions before `end` from a snapshot of an index with equal settings, or from what state() returned of one.

        Raises CacheError for tensors that are no snapshot, whatever they hold; the sequence is as it was then.
        """


@runtime_checkable
class Swaps(Protocol):
    """An index whose sequences can wait in host memory while others take their places."""

    def swap_out(self, seq: int) -> Any:
        """Return all that the index holds of a sequence, in host memory; the next change of the sequence leaves it as it is."""

    def swap_in(self, seq: int, held: Any) -> None:
        """Load what swap_out() returned into an empty sequence. Selections continue unchanged."""


@runtime_checkable
class WorksBeside(Protocol):
    """An index that does some of its work on another stream."""

    def join(self) -> None:
        """Make the current stream wait for that work. The host does not wait."""


@runtime_checkable
class Prepares(Protocol):
    """An index on the host that captured steps ask through the same tensors again and again, without what Python checks and makes
    for every select(). A subclass that changes select() changes prepare() too, or sets it to None."""

    def prepare(self, query: Tensor, budget: int, rows: Tensor, counts: Tensor) -> Callable[[], None]:
        """Return what writes select() of the numbers that `query` [B, Hq, D] float32 holds when it is called to rows [B, H, budget]
        and counts [B, H], int32. All are contiguous and on the CPU."""


@runtime_checkable
class Attends(Protocol):
    """An index that may return attention of its own in `Selection.partial`, without softcap."""

    @property
    def attends(self) -> bool:
        """Whether it does."""


class Transfer(Protocol):
    """Copies rows from the host to the device."""

    graph_safe: bool

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Write row fetch[b, h, m] of sequence b, head h into pool slot slots[b, h, m]. Both [B, H, M] int32; fetch -1
        skips."""


@dataclass(frozen=True)
class Method:
    """How a layer group finds its rows. A method is one file in kvthaw.methods and one line in METHODS.

    name: as in METHODS. paper: its source. unit: what it selects (token, page, cluster, or - for none).
    differs: what it does otherwise than its paper. choose: when to prefer it. Both for tables, in a few words; - for nothing.
    index: makes the index of a layer group; None: nothing is retrieved, what leaves the window is stored and not read again.
    dense: every layer keeps all KV on the device and attends to all of it.
    regions: the paper's sink, window and update buffer.

    keep: for how many steps, this one included, selected rows stay on the device (ClusterKV's R); 0: each step fetches all its
    rows.
    transfer: how rows reach a GPU; None: a kernel there reads them (UvaGather). On a CPU they are copied (BulkCopy).
    anchors: which layers select; those between follow the anchor before them. An int n is every n-th layer that is not dense. A
    tuple has layer numbers, or shares of the model's depth (floats), with which the first layer that is not dense selects too.
    any_budget: the index does not depend on the number of rows, only on the regions, so a fork with another budget copies it.
    Leave it False for an index that is slower to copy than to build.
    dense_layers: how many first layers of a model of 16 and more keep all KV on the device, unless a cache is told otherwise.
    kv_dtype: how rows are stored, unless a cache is told; see `kvthaw.cache.plan.Settings`.
    prompt_queries: how many of a prompt's last queries are kept for the index, until decoding begins; None: all.
    rotary: the index needs the model's rotary embedding. prefetches: the index is also asked a layer early, with the query that
    the layer would have if its attention saw the input of the layer before.
    """

    name: str
    paper: str
    unit: str
    index: Callable[[IndexContext], Index] | None
    regions: Regions = None  # type: ignore[assignment]  # left out, it is refused by name
    dense: bool = False

    keep: int = 1
    transfer: Callable[[], Transfer] | None = None
    anchors: int | tuple[int, ...] | tuple[float, ...] = 1
    any_budget: bool = False
    dense_layers: int = 2
    kv_dtype: KvDtype | None = None
    rotary: bool = False
    prefetches: bool = False
    prompt_queries: int | None = RECENT_QUERIES
    differs: str = "-"
    choose: str = "-"

    def __post_init__(self) -> None:
        if not isinstance(self.regions, Regions):
            raise ConfigError(f"regions is {self.regions!r}; a Method needs Regions(sink, window, buffer), of kvthaw.regions")
        at_least(0, keep=self.keep, dense_layers=self.dense_layers)
        if isinstance(self.anchors, int):
            at_least(1, anchors=self.anchors)
