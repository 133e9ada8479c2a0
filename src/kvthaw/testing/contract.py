"""The contract: what every method keeps, as rules that a test suite or `check_method` runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvthaw.cache.index_api import IndexContext, Method
from kvthaw.cache.streams import AuxStream, DeferredBatch
from kvthaw.errors import CacheError, ConfigError, ContractError
from kvthaw.methods import resolve
from kvthaw.methods.options import digest
from kvthaw.testing.layer import Layer, Step, Text, need
from kvthaw.testing.shapes import BATCH, SMALL, VARIANTS, Shape, close


def check_method(method: Method | str, *, device: torch.device | str = "cpu", **options: Any) -> None:
    """Run the contract of methods on one: a Method, or a name in METHODS with its options. It takes some ten seconds on a CPU.

    Raises ContractError for the first rule that is broken, with the method, the rule, its case and the values; its cause is what
    the method's own code raised, if it did. Raises ConfigError for a dense method, which chooses nothing."""
    found = resolve(method, **options)
    if found.dense:
        raise ConfigError(
            f"method {found.name} is dense: every token is attended to, and nothing is chosen that could be checked"
        )
    contract = Contract(found, device)
    with torch.random.fork_rng():
        for rule, case in contract.cases():
            try:
                getattr(contract, rule)(*case)
            except Exception as error:
                text = (inspect.getdoc(getattr(Contract, rule)) or rule).partition(".")[0].replace("\n", " ")
                given = f" ({', '.join(map(str, case))})" if case else ""
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                raise ContractError(f'method {found.name} breaks the rule {rule}{given}, "{text}": {kind}{error}') from error


class Contract:
    """The rules for one method that is not dense. A broken rule raises AssertionError, or the method's own error."""

    CASES: ClassVar[dict[str, tuple[tuple[Any, ...], ...]]] = {
        "describes_itself": ((),),
        "keeps_the_budget": ((48,), (100,)),
        "keeps_to_retrieved": ((),),
        "chooses_alike_alone": ((),),
        "chooses_alike_again": ((),),
        "chooses_alike_when_several_tokens_come": ((),),
        "chooses_alike_without_residency": ((),),
        "copies_independently": ((),),
        "continues_after_an_export": ((),),
        "repeats_what_failed": ((),),
        "names_its_tensors": ((),),
        "parts_sequences_of_one_prefix": ((),),
        "follows_a_reorder": (([0, 0, 2, 1],), ([1, 0, 2],), ([2],), ([1, 1],)),
        "forgets_what_is_cropped": ((1,), (9,), (17,), (45,), (120,)),
        "attends_to_all_after_a_crop": ((),),
        "serves_the_smallest_budget": ((),),
        "serves_prompts_in_chunks": ((50,), (64,)),
        "serves_short_prompts": ((),),
        "attends_to_all_within_the_budget": tuple((shape,) for shape in VARIANTS),
        "serves_every_shape": tuple((shape,) for shape in reversed(VARIANTS)),
    }
    """Every rule, with its arguments."""

    RETRIEVES = (
        *("keeps_to_retrieved", "serves_prompts_in_chunks", "chooses_alike_without_residency", "forgets_what_is_cropped"),
        *("attends_to_all_after_a_crop", "names_its_tensors", "repeats_what_failed", "continues_after_an_export"),
    )
    """Rules of methods that have an index."""

    def __init__(self, method: Method, device: torch.device | str = "cpu") -> None:
        self.method, self.device, self.retrieves = method, device, method.index is not None

    def cases(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The rules that hold for the method, with each of their cases."""
        for rule, cases in self.CASES.items():
            if self.retrieves or rule not in self.RETRIEVES:
                yield from ((rule, case) for case in cases)

    def layer(self, text: Text, method: Method | None = None, **settings: Any) -> Layer:
        """Return an empty layer of the method."""
        return Layer(method or self.method, text, self.device, **settings)

    def batch(self, steps: int = 18) -> Text:
        """Return the three sequences that most rules decode. At a budget of 48 tokens leave the ring after 6, 12 and 18 steps."""
        return Text(BATCH, [150, 61, 110], steps)

    @cached_property
    def whole(self) -> tuple[Layer, list[Step]]:
        """All steps of that batch at a budget of 48, checked, and the layer after them: what many rules compare theirs with."""
        return self.checked(48)

    def checked(self, budget: int) -> tuple[Layer, list[Step]]:
        """Decode the batch at a budget and check every step."""
        layer, steps = self.layer(self.batch(), budget=budget).prefill(), []
        for step in layer.decode():
            layer.check(step)
            steps.append(step)
        return layer, steps

    def _same(self, one: Iterable[Step], other: Iterable[Step], what: str, seqs: Iterable[tuple[int, int]]) -> None:
        """Demand the same rows and outputs of some sequences of each."""
        for a, b in zip(one, other, strict=False):
            wanted, found = a.rows, b.rows
            for i, j in seqs:
                where = f"step {b.number}, sequence {j}, {what}"
                for head, (rows, before) in enumerate(zip(found[j], wanted[i], strict=True) if found else ()):
                    need(rows == before, f"{where}, KV head {head}: the rows are {rows}, not {before}")
                close(b.out[j], a.out[i], what=f"{where}: the output differs")

    def describes_itself(self) -> None:
        """A method has a known unit, "-" without an index, and options whose values results can record."""
        units = set(self.method.unit.split(" + "))
        need(units <= {"token", "page", "cluster", "-"}, f"unit is {self.method.unit!r}; it must be token, page, cluster or -")
        need((self.method.unit == "-") != self.retrieves, f"unit is {self.method.unit!r} and index is {self.method.index}")
        digest(self.method)

    def keeps_the_budget(self, budget: int) -> None:
        """Check that rows are in the retrieval region, without repeats, and that the output is the attention to them.

        Their number is at most the budget, for each head.
        """
        layer, _ = self.whole if budget == 48 else self.checked(budget)
        most = layer.cache.sequences.held.most
        if self.retrieves:
            found = layer.retriever.residency.counted()
            need(found.selected > 0, "no row was ever selected")
            most += found.most
        need(most <= budget, f"{most} tokens were attended to in one step; the budget is {budget}")

    def keeps_to_retrieved(self) -> None:
        """Check that `retrieved` instead of a budget gives the method's own regions and this number of rows."""
        layer = self.layer(Text(SMALL, [900], 4), retrieved=20).prefill()
        for step in layer.decode():
            layer.check(step)
        need(layer.plan.regions == self.method.regions, f"the regions are {layer.plan.regions}, not {self.method.regions}")
        need(layer.plan.rows == 20, f"{layer.plan.rows} rows are asked for, not 20")

    def attends_to_all_within_the_budget(self, shape: Shape) -> None:
        """Check that a budget above the length gives full attention's output, also after tokens have left the ring."""
        layer = self.layer(Text(shape, [52, 37], 17), budget=88).prefill()
        for step in layer.decode():
            layer.close_to_full(step)

    def serves_every_shape(self, shape: Shape) -> None:
        """Check the budget's rule for every head_dim, number of heads and dtype, with arbitrary data in empty slots."""
        layer = self.layer(Text(shape, [90, 53], 6), budget=32).prefill()
        slab = layer.offloaded.slab
        slab.data[:, :, slab.pool_start :] = 1e4  # finite, but seen in any output that it enters
        for step in layer.decode():
            layer.check(step)

    def serves_short_prompts(self) -> None:
        """Prompts of any length work side by side, with steps enough that tokens leave for an index that had none."""
        lengths = [24, 33, 40, 1, 2, 3, 4, 5, 8, 12, 15, 16, 17]
        layer = self.layer(Text(Shape(batch=len(lengths), heads=1, group=2), lengths, 14), budget=24).prefill()
        for step in layer.decode():
            if step.number % 11 == 1:
                layer.check(step)

    def serves_the_smallest_budget(self) -> None:
        """The smallest budget that kvthaw takes, 16 tokens, works."""
        layer = self.layer(self.batch(6), budget=16).prefill()
        for step in layer.decode():
            layer.check(step)

    def serves_prompts_in_chunks(self, chunk: int) -> None:
        """Check the budget's rule for a prompt in chunks."""
        layer = self.layer(self.batch(), budget=48)
        for start in range(0, 150, chunk):
            layer.take(start, min(150, start + chunk))
        for step in layer.decode(8):
            layer.check(step)

    def chooses_alike_alone(self) -> None:
        """Check that a sequence selects the same in a batch as alone: random choices depend on the seed, not on its slot."""
        for seq, steps in ((1, 13), (2, 7)):
            torch.manual_seed(seq)
            alone = self.layer(self.batch().sequence(seq), budget=48).prefill()
            self._same(self.whole[1], alone.decode(steps), f"alone instead of in place {seq} of a batch", [(seq, 0)])

    def chooses_alike_again(self) -> None:
        """Check that equal tokens and seeds select equally, and that the slot tables do not move."""
        torch.manual_seed(99)
        layer, addresses = self.layer(self.batch(), budget=48).prefill(), set[tuple[int, ...]]()

        def steps() -> Iterator[Step]:
            for step in layer.decode(13):
                tensors = [layer.offloaded.slab.data]
                if self.retrieves:
                    table = layer.retriever.residency
                    tensors += [table.row_slot, table.slot_row, table.used]
                addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
                yield step

        self._same(self.whole[1], steps(), "a second time", [(seq, seq) for seq in range(3)])
        need(len(addresses) == 1, "the tables moved, though they were made for more tokens than these")

    def chooses_alike_when_several_tokens_come(self) -> None:
        """Check that several tokens at once equal the same tokens one by one, also across an index update."""
        many = self.layer(self.batch(), budget=48).prefill()
        for start in range(0, 15, 5):
            at = many.cache.sequences.padded_length
            together = many.take(at, at + 5)
            for t, step in enumerate(self.whole[1][start : start + 5]):
                close(together[:, :, t], step.out, what=f"step {step.number}: the output of five tokens at once differs")

    def chooses_alike_without_residency(self) -> None:
        """Check that keep=0 fetches every selected row in every step and changes nothing else."""
        keeps, steps = self.whole
        drops = self.layer(self.batch(), replace(self.method, keep=0), budget=48).prefill()
        self._same(steps, drops.decode(), "with keep=0", [(seq, seq) for seq in range(3)])
        none, kept = drops.retriever.residency.counted(), keeps.retriever.residency.counted()
        need(none.fetched == none.selected, f"{none.fetched} rows were fetched of {none.selected} selected")
        need(kept.fetched <= none.fetched, "residency fetches more rows than none does")

    def parts_sequences_of_one_prefix(self) -> None:
        """Check beams: sequences that reorder() copied from one take different tokens, and select as if they had always been
        two."""
        text = Text(Shape(batch=2, heads=2, group=2), [150, 150], 14)
        for x in text.tensors:
            x[1, :, :150] = x[0, :, :150]
        whole = self.layer(text, budget=48).prefill()
        grown = self.layer(text, budget=48)
        grown.take(0, 150, [0])
        grown.cache.reorder([0, 0])
        for a, b in zip(whole.decode(), grown.decode(), strict=True):
            grown.check(b)
            self._same([a], [b], "made of another by reorder()", [(0, 0), (1, 1)])

    def follows_a_reorder(self, seqs: list[int]) -> None:
        """Check that a sequence continues unchanged after reorder(), in any slot and with any neighbours."""
        other = self.layer(self.batch(), budget=48).prefill()
        list(other.decode(9))
        other.cache.reorder(seqs)
        need(other.cache.sequences.count == len(seqs), f"{other.cache.sequences.count} sequences are there, not {len(seqs)}")
        self._same(
            self.whole[1][9:], other.decode(9, seqs), f"after reorder({seqs})", [(old, new) for new, old in enumerate(seqs)]
        )

    def forgets_what_is_cropped(self, drop: int) -> None:
        """Check that dropped tokens are never selected, and that their replacements are."""
        text, other = Text(SMALL, [120], 14), Text(SMALL, [120], 14, seed=5)
        layer = self.layer(text, budget=48).prefill()
        list(layer.decode())
        layer.cache.crop(drop)
        need(
            layer.cache.sequences.padded_length == 134 - drop,
            f"crop({drop}) leaves {layer.cache.sequences.padded_length} tokens",
        )
        for x, y in zip(text.tensors, other.tensors, strict=True):
            x[:, :, 134 - drop :] = y[:, :, 134 - drop :]
        for step in layer.decode(min(drop, 14)):
            layer.check(step)

    def attends_to_all_after_a_crop(self) -> None:
        """Check that the output stays full attention's after crops and new tokens, where the budget covers the length."""
        layer = self.layer(Text(SMALL, [50], 18), budget=88).prefill()
        list(layer.decode())
        for drop in (3, 20, 50):
            layer.cache.crop(drop)
            for step in layer.decode(min(drop, 9)):
                layer.close_to_full(step)

    def copies_independently(self) -> None:
        """Check that a deep copy and clone_from() select as the original would have, while the original takes other tokens."""
        one = self.layer(self.batch(), budget=48).prefill()
        list(one.decode(8))
        other, third = copy.deepcopy(one), copy.deepcopy(one)
        for layer in (other, third):
            layer.observe()
        if self.method.index is not None:
            one.cache.wait()
            index, its = self.method.make_index(third.retriever.context), one.retriever.index
            index.clone_from(its)
            mine, theirs = ({_memory(x) for x in each.tensors() if x.numel()} for each in (index, its))
            need(not mine & theirs, "clone_from() shares tensors with the index that it copies")
            third.retriever.index = index
        at = one.cache.sequences.padded_length
        for x in one.text.tensors:
            x[:, :, at:] = torch.randn_like(x[:, :, at:])
        between = (step for step, _ in zip(third.decode(6), one.decode(6), strict=True))
        copied = list(other.decode(6))
        self._same(copied, between, "of a clone", [(seq, seq) for seq in range(3)])

    def continues_after_an_export(self) -> None:
        """Check that sequences whose index waited in host memory select as if it had stayed, if the index has export()."""
        layer = self.layer(self.batch(), budget=48).prefill()
        list(layer.decode(8))
        layer.cache.wait()
        index, seqs = layer.retriever.index, range(3)
        try:
            held = [index.export(seq) for seq in seqs]
        except CacheError:
            return
        for seq in seqs:
            index.truncate(seq, 0)
        for seq in seqs:
            index.load(seq, held[seq], layer.offloaded.indexed(seq))
        self._same(self.whole[1][8:], layer.decode(10), "after export() and load()", [(seq, seq) for seq in seqs])

    def repeats_what_failed(self) -> None:
        """Check that a step whose append() fails after the first sequence can be repeated, and that every token is indexed
        once."""
        layer = self.layer(Text(Shape(batch=2, heads=2, group=2), [50, 50], 18), budget=88).prefill()
        index, calls = layer.retriever.index, 0
        append = index.append

        def half(seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                append(seqs[:1], keys[:1], values[:1], None if queries is None else queries[:1])
                raise _HalfWayError
            append(seqs, keys, values, queries)

        index.append = half  # type: ignore[method-assign]
        for _ in range(layer.text.steps):
            try:
                (step,) = layer.decode(1)
            except _HalfWayError:
                (step,) = layer.decode(1)
            layer.close_to_full(step)
        need(calls > 1, f"no token was indexed in {layer.text.steps} steps")

    def names_its_tensors(self) -> None:
        """tensors() has every tensor that select() reads, however the index grew: a captured step would read freed memory."""
        layer, sequences = self.layer(self.batch(), budget=48).prefill(), [0, 1, 2]
        _names_what_it_reads(layer, sequences, "after the prompt")
        list(layer.decode(6))
        _names_what_it_reads(layer, sequences, "after 7 steps")
        layer.retriever.wait()
        layer.retriever.make_room(5000)
        _names_what_it_reads(layer, sequences, "after make_room() of 5,000 tokens")
        sequences = [2, 0, 0, 1]
        layer.cache.reorder(sequences)
        _names_what_it_reads(layer, sequences, f"after reorder({sequences})")
        list(layer.decode(6, sequences))
        _names_what_it_reads(layer, sequences, f"6 steps after reorder({sequences})")


class _HalfWayError(Exception):
    """What fails on purpose."""


class _Reads(TorchDispatchMode):
    """Keep every input tensor of operations alive, so that no memory is reused meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {_memory(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _names_what_it_reads(layer: Layer, sequences: list[int], when: str) -> None:
    """Check that a step reads only tensors of the index that tensors() names, and at least one of an index on the device."""
    reads, index = _Reads(), layer.retriever.index
    calls = {name: getattr(index, name) for name in ("select", "rebuild")}
    own = {name: call for name, call in vars(index).items() if name in calls}

    def reading(call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            with reads:
                return call(*args)

        return read

    for name, call in calls.items():
        setattr(index, name, reading(call))
    list(layer.decode(1, sequences))
    for name in calls:
        delattr(index, name)
    vars(index).update(own)
    need(
        index.traits.on_host or bool(reads.seen),
        f"{when}, select() was not called or reads no tensor, though its traits say on_host=False",
    )
    told = {_memory(tensor) for tensor in index.tensors()}
    held = {path: tensor for path, tensor in _reachable(index, type(index).__name__, set()) if tensor.numel()}
    missing = [path for path, tensor in held.items() if _memory(tensor) in reads.seen.keys() - told]
    need(not missing, f"{when}, select() reads {', '.join(missing)}, which tensors() does not name")


def _reachable(owner: object, path: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an index holds, by path, including helper objects but not the cache's own parts."""
    if isinstance(owner, Tensor):
        yield path, owner
    elif id(owner) not in visited and not isinstance(owner, IndexContext | DeferredBatch | AuxStream):
        visited.add(id(owner))
        parts: Iterable[tuple[Any, Any]]
        if isinstance(owner, dict):
            parts = owner.items()
        elif isinstance(owner, list | tuple | set):
            parts = enumerate(owner)
        else:
            names = [*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ())]
            parts = [(name, getattr(owner, name, None)) for name in names]
        for name, part in parts:
            yield from _reachable(part, f"{path}.{name}", visited)
