"""What every method keeps, over METHODS: a new method is held to it by its line there."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvthaw.cache.aux_stream import AuxStream
from kvthaw.cache.deferred_batch import DeferredBatch
from kvthaw.cache.index_api import IndexContext, Method, Rebuilds
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.cache.retriever import Choice
from kvthaw.errors import ConfigError
from kvthaw.kernels import dense
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.flash_decode import definition
from kvthaw.kernels.merge import merge
from kvthaw.methods import METHODS
from kvthaw.regions import Regions
from shapes import DTYPES, HEAD_DIMS, Shape, close

MADE = {name: make() for name, make in METHODS.items()}
RETRIEVES = [name for name, method in MADE.items() if method.index is not None]
FROZEN = [name for name, method in MADE.items() if not method.dense]
SMALL = Shape(batch=1, heads=2, group=2, head_dim=64)
CLOSELY = ("oracle", "icecache", "pariskv", "clusterkv", "h2o")
"""Methods that meet every case of a table; the others take turns at the cases."""


def turns_of(*cases: Any, names: Sequence[str] = FROZEN, closely: Sequence[str] = CLOSELY) -> list[tuple[str, Any]]:
    """Pairs of methods and cases: some methods with each, and all the others with one."""
    others = [name for name in names if name not in closely]
    return [(name, case) for name in names if name in closely for case in cases] + [
        (name, cases[turn % len(cases)]) for turn, name in enumerate(others)
    ]


@dataclasses.dataclass
class Text:
    """Queries, keys and values of ragged rows, padded on the left; keys in clumps, so that there is something to find."""

    shape: Shape
    lengths: list[int]
    steps: int
    seed: int = 0
    pads: list[int] = dataclasses.field(init=False)

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

    def row(self, seq: int) -> Text:
        """One row alone, without its padding."""
        twin = copy.copy(self)
        twin.shape = Shape(1, self.shape.heads, self.shape.group, self.shape.head_dim, dtype=self.shape.dtype)
        pad = self.pads[seq]
        twin.query, twin.keys, twin.values = (x[seq : seq + 1, :, pad:] for x in (self.query, self.keys, self.values))
        twin.lengths, twin.pads = [self.lengths[seq]], [0]
        return twin


@dataclasses.dataclass
class Step:
    """One decode step: what came out, and what was chosen."""

    out: Tensor
    choice: Choice | None
    begins: list[int]


class Layer:
    """A layer of a method on its own, without a model. On whatever device: texts and what is looked at are on the CPU."""

    def __init__(self, name: str | Method, text: Text, device: torch.device | str = "cpu", **settings: Any) -> None:
        method = MADE[name] if isinstance(name, str) else name
        self.text, self.how, self.device = text, AttentionParams(0.3), device
        self.cache = KVCache(Settings(method, block_size=16, **settings), [3], 4)
        self.observe()
        self.choices: list[Choice | None] = []

    @property
    def frozen(self) -> OffloadedLayer:
        return self.cache.offloaded[0]

    def observe(self) -> None:
        self.cache.streams.observers.append(self._observe)

    @property
    def regions(self) -> Regions:
        """As they were fitted to the budget."""
        assert self.frozen.plan is not None
        return self.frozen.plan.regions

    @property
    def rows(self) -> int:
        """The most that the index may bring."""
        assert self.frozen.plan is not None
        return self.frozen.plan.rows

    def _observe(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        self.choices.append(None if choice is None else there(choice))

    def take(self, start: int, stop: int, seqs: list[int] | None = None) -> Tensor:
        """Tokens start .. stop of the text, the padding counted; [B, Hq, n, D]."""
        text, rows = self.text, slice(None) if seqs is None else seqs
        q, k, v = (x[rows, :, start:stop].to(self.device) for x in (text.query, text.keys, text.values))
        pads = [text.pads[seq] for seq in (range(len(text.pads)) if seqs is None else seqs)]
        return self.cache.attend(self.frozen, q, k, v, self.how, [min(pad, stop) for pad in pads]).cpu()

    def prefill(self) -> Layer:
        self.take(0, max(self.text.lengths))
        return self

    def decode(self, count: int | None = None, seqs: list[int] | None = None) -> Iterator[Step]:
        for _ in range(self.text.steps if count is None else count):
            at = self.cache.sequences.padded_length
            out = self.take(at, at + 1, seqs)
            begins = [self.frozen.indexed(seq) for seq in range(self.cache.sequences.count)]
            yield Step(out[:, :, 0], self.choices[-1], begins)

    def expected(self, step: Step, seq: int) -> Tensor:
        """Attention over sink, ring and the chosen rows, taken from the text itself, but for keys that the index made; [Hq, D]."""
        text, pad, n = self.text, self.text.pads[seq], self.frozen.length(seq)
        visible = torch.zeros(1, text.shape.heads, n, dtype=torch.bool)
        visible[:, :, : self.regions.sink] = True
        visible[:, :, step.begins[seq] :] = True
        weight, parts = None, []
        if step.choice is not None:
            chosen = step.choice.selection
            if chosen.log_weight is not None:
                weight = torch.zeros(1, text.shape.q_heads, n)
            for h in range(text.shape.heads):
                rows = chosen.rows[seq, h]
                visible[0, h, rows[rows >= 0].long()] = True
                if weight is not None:
                    for g in range(h * text.shape.group, (h + 1) * text.shape.group):
                        weight[0, g, rows[rows >= 0].long()] = chosen.log_weight[seq, g][rows >= 0]
            if chosen.partial is not None:
                parts = [(chosen.partial.out[seq : seq + 1], chosen.partial.lse[seq : seq + 1])]
        q, k, v = (x[seq : seq + 1, :, pad : pad + n] for x in (text.query, text.keys, text.values))
        if step.choice is not None and isinstance(self.frozen.retriever.index, Rebuilds):
            k = k.clone()
            for h, (rows, slots) in enumerate(zip(step.choice.selection.rows[seq], step.choice.slots[seq], strict=True)):
                pool = self.frozen.slab.keys[seq, h, self.frozen.slab.pool_start :].cpu()
                k[0, h, rows[rows >= 0].long()] = pool[slots[rows >= 0].long()]
        whole = definition(DecodeStep(q[:, :, -1], k, v, visible=visible, scale=self.how.scale, log_weight=weight))
        return merge([whole.out, *(p[0] for p in parts)], [whole.lse, *(p[1] for p in parts)])[0][0]

    def check(self, step: Step) -> None:
        """The selection's contract, and the output that follows from it."""
        frozen, shape, plan, seqs = self.frozen, self.text.shape, self.frozen.plan, self.cache.sequences.count
        assert plan is not None
        if step.choice is not None:
            chosen = step.choice.selection
            assert chosen.rows.dtype == chosen.counts.dtype == torch.int32
            assert chosen.rows.shape[:2] == chosen.counts.shape == (seqs, shape.heads)
            assert chosen.rows.shape[2] <= plan.rows
            assert int(chosen.counts.max()) <= plan.rows
            assert torch.equal((chosen.rows >= 0).sum(dim=2).int(), chosen.counts)
            if chosen.log_weight is not None:
                assert chosen.log_weight.shape == (seqs, shape.q_heads, chosen.rows.shape[2])
            if chosen.partial is not None:
                assert chosen.partial.out.shape == (seqs, shape.q_heads, shape.head_dim)
                assert chosen.partial.lse.shape == (seqs, shape.q_heads)
            for seq in range(seqs):
                for h in range(shape.heads):
                    rows = chosen.rows[seq, h]
                    rows = rows[rows >= 0].tolist()
                    assert len(rows) == len(set(rows)), "a row was selected twice"
                    assert all(plan.regions.sink <= row < step.begins[seq] for row in rows)
                    n = frozen.length(seq)
                    held = min(n, plan.regions.sink) + n - step.begins[seq]
                    assert held + len(rows) <= plan.budget
        for seq in range(seqs):
            self.close(step.out[seq], self.expected(step, seq))

    def close(self, found: Tensor, expected: Tensor) -> None:
        """Within the tolerance of the dtype. Scores are a few hundred: by float32 products of a CPU, or three of tf32 on a GPU,
        weights differ by up to 1e-4 of themselves."""
        if self.text.shape.dtype == torch.float32:
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        else:
            close(found, expected, self.text.shape.dtype)

    def full(self, seq: int) -> Tensor:
        """Full attention of the newest token, [Hq, D]."""
        pad, n, text = self.text.pads[seq], self.frozen.length(seq), self.text
        q, k, v = (x[seq : seq + 1, :, pad : pad + n] for x in (text.query, text.keys, text.values))
        return dense.definition(q[:, :, -1:], k, v, scale=self.how.scale, causal=True)[0][0, :, 0]


def there(what: Any) -> Any:
    """Dataclasses of tensors, on the CPU."""
    if isinstance(what, Tensor):
        return what.cpu()
    if dataclasses.is_dataclass(what) and not isinstance(what, type):
        fields = [field.name for field in dataclasses.fields(what)]
        return dataclasses.replace(what, **{name: there(getattr(what, name)) for name in fields})
    return what


def sets(step: Step) -> list[list[set[int]]]:
    """Of every sequence and head, the rows chosen."""
    if step.choice is None:
        return []
    return [[set(rows.tolist()) - {-1} for rows in seq] for seq in step.choice.selection.rows]


BATCH = {"shape": Shape(batch=3, heads=2, group=2, head_dim=64), "lengths": [150, 61, 110], "steps": 24}


@functools.cache
def whole(name: str) -> tuple[Layer, list[Step]]:
    """All steps of that batch at a budget of 48, and the layer after them: what many tests compare theirs with."""
    layer = Layer(name, Text(**BATCH), budget=48).prefill()
    return layer, list(layer.decode())


@pytest.mark.parametrize(("name", "budget"), turns_of(48, 16, 100))
def test_every_step_keeps_the_contract(name: str, budget: int) -> None:
    layer = Layer(name, Text(**BATCH), budget=budget).prefill()
    for step in layer.decode():
        layer.check(step)
    if name in RETRIEVES:
        assert layer.frozen.retriever is not None
        assert layer.frozen.retriever.meter.selected > 0
    assert layer.cache.sequences.held.most + (int(layer.frozen.retriever.meter.most) if layer.frozen.retriever else 0) <= budget


@pytest.mark.parametrize("name", RETRIEVES)
def test_retrieved_instead_of_a_budget(name: str) -> None:
    text = Text(SMALL, [900], 20)
    layer = Layer(name, text, retrieved=20).prefill()
    for step in layer.decode():
        layer.check(step)
    assert layer.regions == MADE[name].regions
    assert layer.rows == 20


VARIANTS = [
    *(Shape(batch=2, heads=2, group=4, head_dim=d) for d in HEAD_DIMS),
    *(Shape(batch=2, heads=2, group=4, dtype=t) for t in DTYPES),
    Shape(batch=2, heads=4, group=1, head_dim=128, dtype=torch.bfloat16),
    Shape(batch=2, heads=1, group=8, head_dim=80, dtype=torch.float16),
    Shape(batch=2, heads=1, group=7, head_dim=128, dtype=torch.bfloat16),
]


@pytest.mark.parametrize(("name", "shape"), turns_of(*dict.fromkeys(VARIANTS), closely=CLOSELY[1:2]), ids=str)
def test_budget_above_the_length_is_full_attention(name: str, shape: Shape) -> None:
    """Also once tokens have left the ring for the index, whatever the method's regions."""
    layer = Layer(name, Text(shape, [52, 37], 17), budget=88).prefill()
    for step in layer.decode():
        for seq in range(2):
            layer.close(step.out[seq], layer.full(seq))


@pytest.mark.parametrize(("name", "shape"), turns_of(*reversed(dict.fromkeys(VARIANTS)), closely=CLOSELY[2:4]), ids=str)
def test_every_shape_keeps_the_contract(name: str, shape: Shape) -> None:
    layer = Layer(name, Text(shape, [90, 53], 9), budget=32).prefill()
    for step in layer.decode():
        layer.check(step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("shape", list(dict.fromkeys(VARIANTS)), ids=str)
def test_every_shape_keeps_the_contract_on_a_gpu(name: str, shape: Shape, device: torch.device) -> None:
    """By kernels: ragged rows, tokens that leave the ring, and full attention where the budget allows it."""
    for budget in (40, 256):
        layer = Layer(name, Text(shape, [120, 71], 24), device, budget=budget).prefill()
        for step in layer.decode():
            layer.check(step)
            for seq in range(2 if budget == 256 else 0):
                layer.close(step.out[seq], layer.full(seq))


@pytest.mark.parametrize(("name", "length"), turns_of(1, 2, 3, 7, 16, 33, closely=()))
def test_short_prompts(name: str, length: int) -> None:
    """Steps enough that tokens leave for the index that had none."""
    layer = Layer(name, Text(SMALL, [length], 28, seed=length), budget=32).prefill()
    for step in layer.decode():
        layer.check(step)
        if step.begins[0] - layer.regions.sink <= layer.rows:
            close(step.out[0], layer.full(0))


@pytest.mark.parametrize("name", FROZEN)
def test_short_prompts_of_every_length_in_a_batch(name: str) -> None:
    lengths = [24, 33, 40, 1, 2, 3, 4, 5, 8, 12, 15, 16, 17]
    layer = Layer(name, Text(Shape(batch=len(lengths), heads=1, group=2), lengths, 24), budget=24).prefill()
    for i, step in enumerate(layer.decode()):
        if i % 11 == 1:
            layer.check(step)


@pytest.mark.parametrize("name", FROZEN)
def test_a_row_of_a_batch_is_the_row_alone(name: str) -> None:
    for seq in (1, 2):
        torch.manual_seed(seq)  # random choices follow from the seed of the settings alone
        alone = Layer(name, Text(**BATCH).row(seq), budget=48).prefill()
        for step, one in zip(whole(name)[1], alone.decode(16), strict=False):
            if name in RETRIEVES:
                assert sets(step)[seq] == sets(one)[0]
            close(step.out[seq], one.out[0])


@pytest.mark.parametrize("name", FROZEN)
def test_the_same_seed_chooses_the_same_and_addresses_stay(name: str) -> None:
    expected = whole(name)[1]
    torch.manual_seed(99)
    layer, addresses = Layer(name, Text(**BATCH), budget=48).prefill(), []
    for one, other in zip(expected, layer.decode(20), strict=False):
        assert torch.equal(one.out, other.out)
        assert sets(one) == sets(other)
        tensors = [layer.frozen.slab.data]
        if layer.frozen.retriever is not None:
            table = layer.frozen.retriever.residency
            tensors += [table.row_slot, table.slot_row, table.used]
        addresses.append([t.data_ptr() for t in tensors])
    assert all(later == addresses[0] for later in addresses), "the tables were made for more tokens than these"


class Reads(TorchDispatchMode):
    """Keeps every tensor that an operation is given, so that no memory is used twice meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {memory(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def reachable(owner: object, path: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an index holds, helper objects included, by where they are; not those of the cache's own parts."""
    if isinstance(owner, Tensor):
        yield path, owner
    elif id(owner) not in visited and not isinstance(owner, IndexContext | DeferredBatch | AuxStream):
        visited.add(id(owner))
        if isinstance(owner, dict):
            parts = owner.items()
        elif isinstance(owner, list | tuple | set):
            parts = enumerate(owner)
        else:
            names = [*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ())]
            parts = ((name, getattr(owner, name, None)) for name in names)
        for name, part in parts:
            yield from reachable(part, f"{path}.{name}", visited)


@pytest.mark.parametrize("name", RETRIEVES)
def test_an_index_names_the_tensors_that_a_step_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it grew: a captured step would read freed memory."""
    one = Layer(name, Text(**{**BATCH, "steps": 30}), budget=48).prefill()
    group, sequences = one.frozen.retriever, [0, 1, 2]
    assert group is not None

    def check() -> None:
        reads, index = Reads(), group.index
        with monkeypatch.context() as patch:
            for call in ("select", "rebuild"):
                own = getattr(index, call, None)

                def read(*args: Any, own: Any = own) -> Any:
                    with reads:
                        return own(*args)

                if own is not None:
                    patch.setattr(index, call, read)
            list(one.decode(1, sequences))
        assert reads.seen
        told = {memory(tensor) for tensor in index.tensors()}
        held = {path: tensor for path, tensor in reachable(index, type(index).__name__, set()) if tensor.numel()}
        assert [path for path, tensor in held.items() if memory(tensor) in reads.seen.keys() - told] == []

    check()
    list(one.decode(17))
    check()
    group.settle()
    group.make_room(5000)
    check()
    sequences = [2, 0, 0, 1]
    one.cache.reorder(sequences)
    check()
    list(one.decode(8, sequences))
    check()


def same_choices(one: Iterable[Step], other: Iterable[Step]) -> None:
    for a, b in zip(one, other, strict=True):
        assert sets(a) == sets(b)
        close(a.out, b.out)


@pytest.mark.parametrize("name", FROZEN)
def test_copies_and_clones_of_an_index_are_independent(name: str) -> None:
    """The layer that they come from goes on with other tokens between their steps."""
    one = Layer(name, Text(**BATCH), budget=48).prefill()
    list(one.decode(8))
    other, third = copy.deepcopy(one), copy.deepcopy(one)
    for layer in (other, third):
        layer.observe()
    if third.frozen.retriever is not None:
        assert one.frozen.retriever is not None
        one.cache.wait()
        index = MADE[name].index(third.frozen.retriever.context)
        index.clone_from(one.frozen.retriever.index)
        mine, theirs = ({memory(x) for x in each.tensors() if x.numel()} for each in (index, one.frozen.retriever.index))
        assert not mine & theirs
        third.frozen.retriever.index = index
    at = one.cache.sequences.padded_length
    for x in (one.text.query, one.text.keys, one.text.values):
        x[:, :, at:] = torch.randn_like(x[:, :, at:])
    same_choices((step for step, _ in zip(third.decode(11), one.decode(11), strict=True)), list(other.decode(11)))


@pytest.mark.parametrize(("name", "drop"), turns_of(1, 9, 17, 45, 120, names=RETRIEVES, closely=CLOSELY[1:4]))
def test_crop_then_go_on(name: str, drop: int) -> None:
    """Tokens that were dropped are never chosen; those that come in their place are."""
    text = Text(SMALL, [120], 20)
    layer = Layer(name, text, budget=48).prefill()
    list(layer.decode())
    layer.cache.crop(drop)
    assert layer.cache.sequences.padded_length == 140 - drop
    other = Text(SMALL, [120], 20, seed=5)
    for x, y in ((text.query, other.query), (text.keys, other.keys), (text.values, other.values)):
        x[:, :, 140 - drop :] = y[:, :, 140 - drop :]
    for step in layer.decode(min(drop, 20)):
        layer.check(step)


@pytest.mark.parametrize("name", RETRIEVES)
def test_crop_at_full_budget(name: str) -> None:
    text = Text(SMALL, [80], 24)
    layer = Layer(name, text, budget=144).prefill()
    list(layer.decode())
    for drop in (3, 30, 80):
        layer.cache.crop(drop)
        for step in layer.decode(min(drop, 15)):
            close(step.out[0], layer.full(0))


@pytest.mark.parametrize(("name", "seqs"), turns_of([0, 0, 2, 1], [1, 0, 2], [2], [1, 1], closely=CLOSELY[2:]), ids=str)
def test_reorder(name: str, seqs: list[int]) -> None:
    """A sequence goes on as it would have, wherever it stands and whoever stands beside it."""
    other = Layer(name, Text(**BATCH), budget=48).prefill()
    list(other.decode(9))
    other.cache.reorder(seqs)
    assert other.cache.sequences.count == len(seqs)
    for a, b in zip(whole(name)[1][9:], other.decode(12, seqs), strict=False):
        for i, seq in enumerate(seqs):
            if name in RETRIEVES:
                assert sets(a)[seq] == sets(b)[i]
            close(a.out[seq], b.out[i])


@pytest.mark.parametrize("name", FROZEN)
def test_sequences_of_one_prefix_part(name: str) -> None:
    """Beams: sequences made of one sequence are given different tokens afterwards."""
    text = Text(Shape(batch=2, heads=2, group=2), [150, 150], 20)
    text.query[1, :, :150], text.keys[1, :, :150], text.values[1, :, :150] = (
        text.query[0, :, :150],
        text.keys[0, :, :150],
        text.values[0, :, :150],
    )
    whole = Layer(name, text, budget=48).prefill()
    grown = Layer(name, text, budget=48)
    grown.take(0, 150, [0])
    grown.cache.reorder([0, 0])
    for a, b in zip(whole.decode(), grown.decode(), strict=True):
        grown.check(b)
        assert sets(a) == sets(b)
        close(a.out, b.out)


@pytest.mark.parametrize("name", FROZEN)
def test_several_tokens_equal_one_by_one(name: str) -> None:
    """Also where they cross the moment at which tokens leave for the index."""
    many = Layer(name, Text(**BATCH), budget=48).prefill()
    for start in range(0, 20, 5):
        at = many.cache.sequences.padded_length
        together = many.take(at, at + 5)
        for t, step in enumerate(whole(name)[1][start : start + 5]):
            close(together[:, :, t], step.out)


@pytest.mark.parametrize(("name", "chunk"), turns_of(50, 64, names=RETRIEVES, closely=()))
def test_chunked_prefill_keeps_the_contract(name: str, chunk: int) -> None:
    layer = Layer(name, Text(**BATCH), budget=48)
    for start in range(0, 150, chunk):
        layer.take(start, min(150, start + chunk))
    for step in layer.decode(12):
        layer.check(step)


@pytest.mark.parametrize("name", RETRIEVES)
def test_nothing_stays_when_the_method_says_so(name: str) -> None:
    """Without residency every selected row is fetched, and the output is the same."""
    keeps, steps = whole(name)
    drops = Layer(dataclasses.replace(MADE[name], keep=0), Text(**BATCH), budget=48).prefill()
    same_choices(steps, drops.decode())
    assert keeps.frozen.retriever is not None
    assert drops.frozen.retriever is not None
    assert drops.frozen.retriever.meter.fetched == drops.frozen.retriever.meter.selected
    assert keeps.frozen.retriever.meter.fetched <= drops.frozen.retriever.meter.fetched


@pytest.mark.parametrize("name", FROZEN)
def test_values_where_nothing_was_written_do_not_matter(name: str) -> None:
    """The pool of a fresh layer holds zeros, and a row that was never fetched is never attended to."""
    layer = Layer(name, Text(SMALL, [60], 20), budget=32).prefill()
    slab = layer.frozen.slab
    assert (slab.data[:, :, slab.pool_start :] == 0).all()
    slab.data[:, :, slab.pool_start :] = 1e4  # finite, but seen in any output that it enters
    for step in layer.decode():
        layer.check(step)


@pytest.mark.parametrize("name", METHODS)
def test_methods_describe_themselves(name: str) -> None:
    method = MADE[name]
    assert method.name == name
    assert set(method.unit.split(" + ")) <= {"token", "page", "cluster", "-"}
    assert (method.unit == "-") == (method.index is None)
    assert METHODS[name].__doc__


@pytest.mark.parametrize("name", RETRIEVES)
def test_the_smallest_budget_works_and_less_is_refused(name: str) -> None:
    layer = Layer(name, Text(SMALL, [90], 5), budget=16).prefill()
    for step in layer.decode():
        layer.check(step)
    with pytest.raises(ConfigError, match=r"smallest .* is 16 tokens"):
        Layer(name, Text(SMALL, [90], 5), budget=15)
