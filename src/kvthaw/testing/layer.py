"""One layer of a method without a model, and its expected output."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvthaw.cache.choice import Choice, check_selection
from kvthaw.cache.index_api import Method
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.retriever import Retriever
from kvthaw.kernels import dense
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep
from kvthaw.kernels.flash_decode import definition
from kvthaw.kernels.merge import merge
from kvthaw.testing.shapes import Shape, close, near


def need(ok: bool, what: str) -> None:
    """Raise AssertionError with a message unless something holds, under python -O too."""
    if not ok:
        raise AssertionError(what)


@dataclass
class Text:
    """Queries, keys and values of ragged sequences, padded on the left; keys in clumps, so that there is something to find."""

    shape: Shape
    lengths: list[int]
    steps: int
    seed: int = 0
    pads: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        shape, longest = self.shape, max(self.lengths)
        self.pads = [longest - n for n in self.lengths]
        total = longest + self.steps

        def noise(heads: int) -> Tensor:
            return torch.randn(shape.batch, heads, total, shape.head_dim, generator=rng)

        middles = 1.5 * torch.randn(shape.heads, 9, shape.head_dim, generator=rng)
        which = torch.randint(0, 9, (shape.batch, total), generator=rng)
        asked = torch.randint(0, 9, (shape.batch, total), generator=rng)
        keys = middles[:, which].transpose(0, 1) + 0.7 * noise(shape.heads)
        query = middles.repeat_interleave(shape.group, 0)[:, asked].transpose(0, 1) + 0.7 * noise(shape.q_heads)
        self.query, self.keys, self.values = (x.to(shape.dtype) for x in (query, keys, noise(shape.heads)))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values."""
        return self.query, self.keys, self.values

    def sequence(self, seq: int) -> Text:
        """Return one sequence alone, without its padding."""
        twin, pad = copy.copy(self), self.pads[seq]
        twin.shape = replace(self.shape, batch=1)
        twin.query, twin.keys, twin.values = (x[seq : seq + 1, :, pad:] for x in self.tensors)
        twin.lengths, twin.pads = [self.lengths[seq]], [0]
        return twin


@dataclass
class Step:
    """One decode step: its number, the output [B, Hq, D], the choice, and where each sequence's ring begins."""

    number: int
    out: Tensor
    choice: Choice | None
    begins: list[int]

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """Of every sequence and KV head, the rows that were chosen, ascending."""
        if self.choice is None:
            return []
        return [[sorted(set(rows.tolist()) - {-1}) for rows in seq] for seq in self.choice.selection.rows]


class Layer:
    """A layer of a method alone, on any device. Texts and results are on the CPU."""

    def __init__(self, method: Method, text: Text, device: torch.device | str = "cpu", **settings: Any) -> None:
        self.method, self.text, self.how, self.device = method, text, AttentionParams(0.3), device
        self.cache = KVCache(Settings(method, block_size=16, **settings), [3], 4)
        self.choices: list[Choice | None] = []
        self.steps = 0
        self.observe()

    @property
    def offloaded(self) -> OffloadedLayer:
        """The layer of the cache."""
        return self.cache.offloaded[0]

    @property
    def retriever(self) -> Retriever:
        """Its retriever; only of a method that has an index."""
        assert self.offloaded.retriever is not None
        return self.offloaded.retriever

    @property
    def plan(self) -> Plan:
        """Regions and rows as fitted to the budget; available after the prefill."""
        assert self.offloaded.plan is not None
        return self.offloaded.plan

    def observe(self) -> None:
        """Keep the choices of every step; copies of a cache have no observers."""
        self.cache.streams.observers.append(self._observe)

    def _observe(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        self.choices.append(None if choice is None else _on_cpu(choice))

    def take(self, start: int, stop: int, seqs: list[int] | None = None) -> Tensor:
        """Attend with tokens start .. stop of the text, the padding counted; [B, Hq, n, D]."""
        text, which = self.text, slice(None) if seqs is None else seqs
        q, k, v = (x[which, :, start:stop].to(self.device) for x in text.tensors)
        pads = [text.pads[seq] for seq in (range(len(text.pads)) if seqs is None else seqs)]
        return self.cache.attend(self.offloaded, q, k, v, self.how, [min(pad, stop) for pad in pads]).cpu()

    def prefill(self) -> Layer:
        """Prefill the whole prompt."""
        self.take(0, max(self.text.lengths))
        return self

    def decode(self, count: int | None = None, seqs: list[int] | None = None) -> Iterator[Step]:
        """Decode the next tokens one by one; by default all remaining tokens of the text."""
        for _ in range(self.text.steps if count is None else count):
            at = self.cache.sequences.padded_length
            out = self.take(at, at + 1, seqs)
            begins = [self.offloaded.indexed(seq) for seq in range(self.cache.sequences.count)]
            yield Step(self.steps, out[:, :, 0], self.choices[-1], begins)
            self.steps += 1

    def check(self, step: Step) -> None:
        """Raise AssertionError or CacheError unless a step's selection is allowed and its output follows from it."""
        seqs, plan = self.cache.sequences.count, self.plan
        if step.choice is not None:
            found = step.choice.selection
            who, ends = f"step {step.number}", torch.tensor(step.begins)
            check_selection(found, who, self.retriever.context, seqs, plan.rows, ends)
            for seq in range(seqs):
                n = self.offloaded.length(seq)
                held, most = min(n, plan.regions.sink) + n - step.begins[seq], int(found.counts[seq].max())
                what = f"step {step.number}, sequence {seq}: {held} tokens of sink and ring and {most} rows are attended to"
                need(held + most <= plan.budget, f"{what}; the budget is {plan.budget}")
        self.close(step, self.expected(step), "attention over sink, ring and the selected rows")

    def close(self, step: Step, expected: Tensor, what: str) -> None:
        """Raise AssertionError unless a step's output is the expected one, within the tolerance of the dtype. Scores are a few
        hundred: by float32 products of a CPU, or three of tf32 on a GPU, weights differ by up to 1e-4 of themselves."""
        what = f"step {step.number}: the output [sequence, query head, head_dim] is not {what}"
        if self.text.shape.dtype == torch.float32:
            near(step.out, expected, atol=2e-4, rtol=2e-4, what=what)
        else:
            close(step.out, expected, self.text.shape.dtype, what=what)

    def close_to_full(self, step: Step) -> None:
        """Raise AssertionError unless a step's output is full attention of the newest token."""
        whole = []
        for seq, left in enumerate(self.text.pads):
            n = self.offloaded.length(seq)
            q, k, v = (x[seq : seq + 1, :, left : left + n] for x in self.text.tensors)
            whole.append(dense.definition(q[:, :, -1:], k, v, scale=self.how.scale, causal=True)[0][:, :, 0])
        self.close(step, torch.cat(whole), "full attention, though the budget covers the length")

    def expected(self, step: Step) -> Tensor:
        """Return the attention to sink, ring and selected rows, [B, Hq, D].

        Keys and values are the text's, not the layer's, except keys that the index rebuilt."""
        shape, n = self.text.shape, self.cache.sequences.padded_length
        pads, begins = torch.tensor(self.text.pads)[:, None], torch.tensor(step.begins)[:, None]
        at = torch.arange(n + 1) - pads  # the last place is for padding
        visible = (at >= begins) | ((at >= 0) & (at < self.plan.regions.sink))
        visible = visible[:, None].repeat(1, shape.heads, 1)
        keys, values = (pad(x[:, :, :n], (0, 0, 0, 1)) for x in (self.text.keys, self.text.values))
        weight, partial = None, None
        if step.choice is not None:
            chosen, partial = step.choice.selection, step.choice.selection.partial
            rows = torch.where(chosen.rows >= 0, chosen.rows + pads[:, None], n)
            visible.scatter_(2, rows, True)
            if chosen.log_weight is not None:
                weight = torch.zeros(len(rows), shape.q_heads, n + 1)
                weight = weight.scatter_(2, rows.repeat_interleave(shape.group, 1), chosen.log_weight)[:, :, :n]
            if self.retriever.index.traits.rebuilds and (slots := step.choice.slots) is not None:
                pool, wide = (
                    self.offloaded.slab.keys[:, :, self.offloaded.slab.pool_start :].cpu(),
                    (-1, -1, -1, shape.head_dim),
                )
                made = pool.gather(2, slots.clamp(min=0).long()[..., None].expand(wide))
                keys.scatter_(2, rows[..., None].expand(wide), made)
        query, keys, values, visible = self.text.query[:, :, n - 1], keys[:, :, :n], values[:, :, :n], visible[:, :, :n]
        attended = DecodeStep(query, keys, values, scale=self.how.scale, log_weight=weight)
        whole = definition(attended, AnyOrder(visible))
        return whole.out if partial is None else merge([whole.out, partial.out], [whole.lse, partial.lse])[0]


def _on_cpu(what: Any) -> Any:
    """Return dataclasses of tensors on the CPU."""
    if isinstance(what, Tensor):
        return what.cpu()
    if is_dataclass(what) and not isinstance(what, type):
        return replace(what, **{each.name: _on_cpu(getattr(what, each.name)) for each in fields(what)})
    return what
