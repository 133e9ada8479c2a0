"""What a method gives kvthaw: an index with its traits, a transfer, and the settings of both.

Letters in shapes: B sequences, Hq query heads, H KV heads, G = Hq // H, D head_dim. T tokens, M rows selected, C pool
slots, W width of an observation window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.pool import Slab
from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.streams import AuxStream, DeferredBatch
from kvthaw.config import KvDtype
from kvthaw.errors import CacheError, ConfigError, at_least
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.remainder import Estimated
from kvthaw.regions import Regions

RECENT_QUERIES = 128
"""How many of a prompt's last queries are kept by default."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that one layer attends to in this step, besides sink, window and buffer. No row occurs twice.

    rows: [B, H, M] int32 token positions in the sequence (left padding not counted), padded with -1; the budget fixes M.
    counts: [B, H] int32, the number of rows among the M.
    log_weight: [B, Hq, M] float32, added to the logits of each query head; -inf: this head did not draw the row.
    partial: attention that the index computes itself, over tokens that are not in rows; `Partial.wait` before it is read.
    estimated: the tokens whose scores the index estimated, for an index around it.
    """

    rows: Tensor
    counts: Tensor
    log_weight: Tensor | None = None
    partial: Partial | None = None
    estimated: Estimated | None = None


@dataclass(frozen=True, slots=True)
class IndexContext:
    """The layer that an index serves.

    device: where queries come from, and where a graph-safe index keeps its metadata.
    store: the layer's rows on the host. An index on the host reads keys there by position.
    scale: factor of q.k before the softmax.
    rows: the budget of select(); 0: unknown.
    slab, sequences: the tokens in sink and ring, for an index that weighs its rows against them. None without a layer.
    aux: stream for work that overlaps the model.
    deferred: queue of work that runs once for all layers. The layers of a cache share aux and deferred; an index without
        them makes its own.
    rotary: the layer's rotary embedding, if the Method asks for it and the model has one.
    ranks: the processes that have the other heads of the layer; q_heads and kv_heads are this process's.
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
        """Return the number of entries of a table that select() reads.

        On a CPU it is the largest count of any sequence. On a GPU it is the same in all steps of a bucket (Sequences.bucket), so
        that a captured step may be replayed.

        counts: entries of the sequences that a step computes, which are the first of the batch.
        room: entries that the table has room for.
        most: returns an upper bound on the entries of a sequence of that number of tokens.
        """
        longest = max(counts, default=0)
        if self.device.type == "cpu":
            return longest
        bucket = 0 if self.sequences is None else self.sequences.bucket(len(counts))
        return room if not bucket or most(bucket) < longest else min(room, most(bucket))


@dataclass(frozen=True, slots=True)
class Traits:
    """What the cache may expect of an index. An index class declares one; an instance may replace it in `__init__`."""

    graph_safe: bool = False
    """select() has static shapes and never syncs the host."""
    grows: bool = True
    """append() of a long chunk is as good as build() of all tokens, so a chunked prompt is indexed chunk by chunk. If False,
    the index is built once, with the last chunk."""
    light: bool = False
    """build() takes a GPU less time than reading the rows from the host. The index of a joining prompt is then built with its
    last chunk, from the rows that attention read, though other sequences wait for it."""
    on_host: bool = False
    """The index works on the CPU and reads keys from the store. A worker thread calls build() and append() once the rows are
    there, with keys and values of D = 0; select() gets its query on the CPU."""
    reversible: bool = False
    """undo() restores the index bit for bit, so the cache may append before it is certain that the tokens leave the ring."""
    remembers: bool = False
    """select() changes what the index selects later."""
    evicts: bool = False
    """The index never selects again what it once dropped."""
    snapshots: bool = False
    """The index is slow to build and fast to share: prefix caches and files keep what export() and state() return."""
    rebuilds: bool = False
    """rebuild() replaces fetched keys by keys that the index computes."""
    attends: bool = False
    """select() may return attention of its own in `Selection.partial`, without softcap."""


class Tables(ABC):
    """Per-token data of a layer's sequences that follows every change of them.

    Positions count from the start of a sequence. An index holds the positions [first, length) that it was given, where first is
    the end of the sink.
    """

    def make_room(self, seqs: int, tokens: int) -> None:  # noqa: B027 nothing to do for most
        """Allocate for `seqs` sequences of `tokens` positions. Until there are more, no tensor of a graph-safe index moves."""

    @abstractmethod
    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Index a sequence from scratch.

        keys, values: [H, T, D], positions first .. first + T.
        queries: [Hq, W, D], the prompt's last, at most `Method.prompt_queries`.
        """

    @abstractmethod
    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Add the next n positions of some sequences, in place; one that was never built begins after the sink.

        keys, values: [R, H, n, D] for the R sequences.
        queries: None or [R, Hq, W, D].

        If this raises, the cache truncates the sequences to their former lengths.
        """

    @abstractmethod
    def truncate(self, seq: int, length: int) -> None:
        """Forget positions >= length of a sequence; 0 clears it."""

    def undo(self, seq: int, length: int) -> None:
        """Undo the last append() to a sequence, which began at position `length` and had no queries."""
        self.truncate(seq, length)

    @abstractmethod
    def reorder(self, seqs: Sequence[int]) -> None:
        """Replace sequence i by the former sequence seqs[i]; sequences may repeat, and their number may change."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the device tensors that select() reads or writes, including the tensors of helper objects. If one has moved,
        the step is captured again. The cache adds its own (store, slab, sequences)."""

    @abstractmethod
    def clone_from(self, other: Self) -> None:
        """Copy the state of another index with the same settings. Later changes of either do not affect the other."""

    def export(self, seq: int) -> Any:
        """Return the index's state of a sequence, in host memory. Later changes of the sequence do not change it.

        Raises CacheError for an index whose sequences cannot wait in host memory. The cache then computes the sequence again.
        """
        raise CacheError(f"{type(self).__name__} has no export()")

    def load(self, seq: int, held: Any, end: int) -> None:
        """Load what export() of an index with equal settings returned into an empty sequence. Selections continue unchanged.

        end: where the positions end. It may be earlier than when the state was exported if `Traits.snapshots` is set;
            held may then be what Index.state() returned, too, and CacheError says that it is invalid.
        """
        raise CacheError(f"{type(self).__name__} has no load()")

    def join(self) -> None:  # noqa: B027
        """Run work that is queued with other layers' work, and make the current stream wait for it. The host does not wait.

        select() of a class that defines this calls it first.
        """


class Index(Tables):
    """Selects the rows that a query needs. One per layer group. Owns no KV; maps its units (pages, clusters, tokens) to rows.

    An index never returns a row outside the positions that it holds. Random choices derive from (seed, layer, head, position), the
    head's number in the model, never from the place of the sequence in the batch. An index implements the abstract methods and
    declares its traits; all other methods have defaults.

    tested: the contract's tests run on this class, so eager steps check only its first selections. A class declares it for
        itself, `class Mine(Index, tested=True)`, and not for its subclasses.
    """

    traits = Traits()
    tested = False

    def __init_subclass__(cls, *, tested: bool = False) -> None:
        cls.tested = tested

    @abstractmethod
    def select(self, query: Tensor, budget: int) -> Selection:
        """Select at most `budget` rows per KV head for one query per head.

        query: [B, Hq, D], after RoPE, unscaled.
        """

    def prepare(self, query: Tensor, budget: int, rows: Tensor, counts: Tensor) -> Callable[[], None]:
        """Return a function that selects for the numbers in `query` and writes the result to `rows` and `counts`.

        Captured steps call that function of an index on the host. All tensors are contiguous and on the CPU: query [B, Hq, D]
        float32, rows [B, H, budget] and counts [B, H] int32. An index may override it to check less in every step.
        """

        def select() -> None:
            found = self.select(query, budget)
            if found.log_weight is not None or found.partial is not None:
                name = type(self).__name__
                raise CacheError(f"{name} weighs or estimates on the host; its steps cannot be captured: capture=False")
            rows.copy_(found.rows)
            counts.copy_(found.counts)

        return select

    def unask(self) -> None:
        """Roll back the last select(), because its step failed. A failed step undoes each select() that it ran.

        Other sequences may decode before the same queries come again.
        """

    @property
    def reversible(self) -> bool:
        """Whether undo() could restore the index exactly after the next append()."""
        return self.traits.reversible

    def take_effect(self, seqs: Sequence[int]) -> None:
        """Publish prepared changes of `seqs`, whose tokens leave the ring with the next step, before their append.

        Irreversible.
        """

    def upcoming(self, seq: int) -> int:
        """Return how many tokens after the last indexed one the index can start to work on now."""
        return 0

    def work_ahead(self, seqs: Sequence[int], keys: Tensor) -> None:
        """Start the work on the next n tokens of `seqs`, with n from upcoming().

        keys: [R, H, n, D].

        The next appends will add these tokens, unless truncate() or undo() removes a token before them.
        """

    def rebuild(self, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Overwrite the fetched keys in the layer's slab, on the transfer's stream and with static shapes. fetch and slots
        are on the device, see Transfer."""

    def state(self, held: Any) -> Mapping[str, Tensor]:
        """Return what export() returned as tensors on the host, which load() of another process takes for the same keys."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Return the bytes of host memory that an index on the host holds; 0: unknown."""
        return 0


class Transfer(Protocol):
    """Copies rows from the host to the device."""

    graph_safe: bool

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Write row fetch[b, h, m] of sequence b, head h into pool slot slots[b, h, m], once the rows are in place.

        fetch, slots: [B, H, M] int32; -1 in fetch skips.
        """


@dataclass(frozen=True)
class Method:
    """How a layer group selects its rows. A method is one file in kvthaw.methods and one line in `OWN`
    (`method_names.py`).

    name: its key in METHODS.
    paper: its source.
    unit: what it selects (token, page, cluster, or - for none).
    differs: how it differs from its paper.
    choose: when to prefer it. `differs` and `choose` are short texts for tables; "-" for none.
    index: makes the index of a layer group; None: nothing is retrieved. Tokens that leave the window are stored and not
        read again.
    dense: every layer keeps all KV on the device and attends to all of it.
    regions: the paper's sink, window and update buffer.

    keep: for how many steps, this one included, selected rows stay on the device (ClusterKV's R); 0: each step fetches all
        its rows.
    transfer: how rows reach a GPU; None: a kernel there reads them (UvaGather). On a CPU they are copied (BulkCopy).
    anchors: which layers select; the layers between follow the anchor before them. An int n means every n-th layer that is
        not dense. A tuple holds layer numbers, or fractions of the model's depth (floats); with fractions the first layer
        that is not dense selects too.
    any_budget: the index does not depend on the number of rows, only on the regions, so a fork with another budget copies
        it. Leave it False for an index that is slower to copy than to build.
    dense_layers: how many first layers keep all KV on the device, in models of 16 layers and more. A cache may override it.
    kv_dtype: how rows are stored, unless a cache overrides it; see `kvthaw.config.CacheConfig`.
    prompt_queries: how many of a prompt's last queries are kept for the index, until decoding begins; None: all.
    rotary: the index needs the model's rotary embedding.
    prefetches: the index selects with a query that the input of the attention before predicts. An index on the host searches
        at once, while the layer before attends.
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

    def make_index(self, context: IndexContext) -> Index:
        """Make the index of a layer group. Raises ConfigError if `index` returns something else."""
        made = None if self.index is None else self.index(context)
        if not isinstance(made, Index):
            must = "it must make an index that inherits kvthaw.cache.index_api.Index"
            raise ConfigError(f"index of {self.name} made a {type(made).__name__}; {must}")
        return made

    def slots(self, rows: int) -> int:
        """Return how many pool slots a KV head has on the device if a step selects `rows` per head."""
        return rows * max(1, self.keep)


Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Rotary:
    """Apply a model's rotary embedding to keys, or invert it.

    The tables cos, sin [T, R] float32 grow by doubling. The first `width` channels rotate: R, or 2 R if the tables hold
    each angle once. A constant offset of positions rotates all keys equally, which changes no ranking.

    angles: the model's own, positions [1, T] -> cos and sin [1, T, R].
    apply: the model's own, (queries, keys [N, n, T, D], cos, sin [N, T, R]) -> both rotated.
    """

    def __init__(self, angles: Angles, apply: Apply) -> None:
        self._angles, self._apply = angles, apply
        self.cos = self.sin = torch.empty(0)
        self.width = 0

    def reserve(self, length: int, device: torch.device) -> None:
        """Make room for positions below length."""
        have = self.cos.shape[0]
        if length <= have and self.cos.device == device:
            return
        cos, sin = self._angles(torch.arange(max(length, 2 * have, 64), device=device)[None])
        self.cos, self.sin = cos[0].float(), sin[0].float()
        if not self.width:
            self.width = self.cos.shape[1]
            try:
                self.turn(torch.zeros(1, 1, self.width, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device))
            except RuntimeError:  # gpt-oss
                self.width *= 2

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Return keys [N, T, D] rotated to positions [N, T], in float32. The tables must cover the positions.

        back: rotate back from them.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        if back:  # the inverse of a rotation that may scale (YaRN)
            norm = cos.square() + sin.square()
            cos, sin = cos / norm, -sin / norm
        some = keys[:, None, :, : self.width].float()
        turned = self._apply(some, some, cos, sin)[1][:, 0]
        return torch.cat((turned, keys[:, :, self.width :].float()), dim=2)
