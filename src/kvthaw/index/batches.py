"""Batches of tokens that become units among themselves: what clusters and tree nodes have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Self

from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.index.formation import Batches, Formation, FormingIndex, form, formed
from kvthaw.index.target import Full
from kvthaw.index.unit_counts import Seq
from kvthaw.kernels.kmeans import whole
from kvthaw.kernels.unit_select import Policy

_SHORT = 1 << 23
"""Bytes of a layer's keys up to which a prompt waits for the prompts of other layers, to be formed with them.

Few keys do not keep a GPU busy, and their launches take the host longer than the model's own.
"""


class BatchedIndex(FormingIndex):
    """An index that forms units from batches of tokens: `per_batch` units of each batch, `count` units of a prompt.

    A batch waits for the batches of other layers at the same step, and all are formed at once. So are short prompts. If the
    last tokens of a batch are known before they leave the ring, its units are formed during the steps until then. They
    enter the tables when they would have been formed otherwise.

    begun: batches whose units are being formed ahead.
    """

    mapped = True

    def __init__(self, context: IndexContext, *, batch: int, per_batch: int, width: int, policy: Policy) -> None:
        self.per_batch = per_batch
        self.begun: dict[Full, Formation] = {}
        super().__init__(context, size=batch // per_batch, batch=batch, width=width, policy=policy)

    def make_room(self, seqs: int, tokens: int) -> None:
        super().make_room(seqs, tokens)
        if self.context.device.type == "cuda" and tokens >= self.batch and not any(seq.tokens for seq in self.seqs):
            self._deferred.once((self.kind(), "load"), self._load)

    def _load(self) -> None:
        """Load the CUDA kernels that form a batch before there are tokens, since loading takes about 40 ms of the first full
        batch's step."""
        none = Batches(self, [Full(seq, 0, 0) for seq in range(len(self.seqs))])
        form([none, none], self.per_batch)
        self.beside(partial(whole, formed([none, none], self.per_batch)))  # which keeps memory
        self.join()

    @property
    def settings(self) -> Hashable:
        """What units depend on besides keys, positions and heads."""
        raise NotImplementedError

    def kind(self) -> Hashable:
        """Return what indexes have in common whose batches are formed at once."""
        context = self.context
        return type(self), context.kv_heads, context.head_dim, context.dtype, context.device, context.seed, self.settings

    def form_now(self, first: Sequence[Full], keys: Tensor, count: int) -> None:
        """Form `count` units of each batch at once.

        first: the first batch of each sequence.
        keys: [R, H, n, T, D], of n batches of R sequences.
        """
        form([Batches(self, first, keys)], count)

    def build_prompt(self, seq: int, first: int, keys: Tensor, count: int) -> None:
        """Start a sequence with a prompt, keys [H, T, D], and form `count` units of it.

        A short prompt is formed with the prompts of other layers, a long one on the side stream.
        """
        tokens, given = keys.shape[1], Batches(self, (Full(seq, 0, 0),), keys[None, :, None])
        if not 0 < keys.nbytes <= _SHORT:
            self.build_beside(seq, first, tokens, count, partial(form, [given], count), keys)
            return
        self.clear(seq, first)
        self.reserve(0, count + 1, tokens)
        self.defer((self.kind(), "prompt", tokens, count), partial(form, count=count), given, [seq])
        self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def build_beside(self, seq: int, first: int, tokens: int, count: int, job: Callable[[], None], *used: Tensor) -> None:
        """Start a sequence with a prompt of `tokens` tokens. `job` forms its `count` units on the side stream, as one batch.

        used: tensors that the job reads and others own.
        """
        self.clear(seq, first)
        if tokens:
            self.reserve(0, count + 1, tokens)
            self.beside(job, *used)
            self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        begun: dict[Formation | None, list[Full]] = {}
        for own in full:
            begun.setdefault(self.begun.pop(own, None), []).append(own)
        if keys is not None:
            self.form_now(full, keys, self.per_batch)
            return
        for formation, some in begun.items():
            of, seqs = tuple(some), [own.seq for own in some]
            if formation is None:
                self.defer((self.kind(), "form", of), partial(form, count=self.per_batch), Batches(self, of), seqs)
            else:
                self.defer((formation, of), formation.write, (self, of), seqs)

    # Ahead of time

    def upcoming(self, seq: int) -> int:
        host = self.seqs[seq]
        open_batch = 0 < host.kept < self.batch and not any(own.seq == seq for own in self.begun)
        return self.batch - host.kept if open_batch else 0

    def work_ahead(self, seqs: Sequence[int], keys: Tensor) -> None:
        buffer, full = self.context.regions.buffer, tuple(Full(seq, *self.seqs[seq].marks[-1]) for seq in seqs)
        steps = -(-keys.shape[2] // buffer) * buffer
        work = partial(begin, count=self.per_batch, steps=steps)
        self.defer((self.kind(), "begin", full, steps), work, Batches(self, full, coming=keys), seqs)

    def truncate(self, seq: int, length: int) -> None:
        shorter = seq < len(self.seqs) and length - self.first < self.seqs[seq].tokens
        super().truncate(seq, length)
        if shorter:
            self._drop_begun(seq)

    def undo(self, seq: int, length: int) -> None:
        super().undo(seq, length)
        self._drop_begun(seq)

    def reorder(self, seqs: Sequence[int]) -> None:
        super().reorder(seqs)
        self.begun.clear()

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.begun.clear()

    def _drop_begun(self, seq: int) -> None:
        self.begun = {own: formation for own, formation in self.begun.items() if own.seq != seq}


def begin(every: Sequence[Batches], count: int, steps: int) -> None:
    """Start to form the units of batches whose last tokens are still in the ring."""
    formation = Formation(every, count, steps, every[0].index._side)
    for each in every:
        assert isinstance(each.index, BatchedIndex)
        each.index.begun.update(dict.fromkeys(each.first, formation))
