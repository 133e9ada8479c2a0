"""Work between steps is done once, however often it is asked for: a step that is captured asks before it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from one_layer import SCALE, OneLayer
from torch.utils._python_dispatch import TorchDispatchMode

from kvthaw.cache import layer_storage
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.index import clusters, codes, units
from kvthaw.kernels.kmeans import whole
from kvthaw.methods import METHODS, resolve
from kvthaw_baselines.index import nodes
from zoo import DISTINCT


@pytest.mark.parametrize("method", ["oracle", "clusterkv", "prkv", "quest", "pariskv", "retroinfer", "icecache-digest"])
def test_work_between_steps_is_done_once(method: str) -> None:
    torch.manual_seed(1)
    plain = OneLayer(method, 200, 36)
    torch.manual_seed(1)
    asked = OneLayer(method, 200, 36)
    for _ in range(36):
        for _ in range(2):
            if asked.cache.needs_host():
                asked.cache.before_step()
        assert not asked.cache.needs_host()
        assert asked.step() == plain.step()
        assert torch.equal(asked.out, plain.out)


def test_what_has_left_is_taken_back_by_a_crop_and_by_a_dense_pass() -> None:
    for after in (lambda cache: cache.crop(3), lambda cache: None):
        torch.manual_seed(2)
        plain = OneLayer("oracle", 200, 1200)
        torch.manual_seed(2)
        asked = OneLayer("oracle", 200, 1200)
        for _ in range(30):
            if asked.cache.needs_host():
                asked.cache.before_step()
                after(asked.cache)
                after(plain.cache)
                start = asked.length
                assert torch.equal(asked.take(start, start + 20), plain.take(start, start + 20))  # too many to go one by one
            assert asked.step() == plain.step()


def test_what_is_outgrown_moves_at_one_step() -> None:
    one = OneLayer("quest", 200, 300)
    seen = []
    for _ in range(300):
        one.step()
        addresses = [tensor.data_ptr() for tensor in one.cache.tensors()]
        if not seen or seen[-1][1] != addresses:
            seen.append((one.length, addresses))
    assert [at for at, _ in seen] == [201, 457]
    assert one.cache.sequences.capacity == 684


@pytest.mark.parametrize("method", [name for name in DISTINCT if name not in ("full", "streaming")])
def test_going_ahead_changes_nothing_and_moves_nothing(method: str) -> None:
    """Work for the next token may be done while the last one's is under way. A captured step of a graph-safe index reads by
    address, and what a prompt of 200 makes room for is 456 tokens."""
    torch.manual_seed(3)
    plain = OneLayer(method, 200, 18)
    torch.manual_seed(3)
    ahead = OneLayer(method, 200, 18)
    assert plain.layer.retriever is not None
    safe = plain.layer.retriever.index.traits.graph_safe
    addresses: list[list[int]] = []
    for _ in range(18):
        assert ahead.step() == plain.step()
        ahead.cache.run_ahead(certain=True)
        assert not ahead.cache.sequences.full() or not ahead.cache.needs_host()
        assert torch.equal(ahead.out, plain.out)
        now = [tensor.data_ptr() for each in (plain, ahead) for tensor in each.cache.tensors()]
        assert not safe or not addresses or now == addresses[0]
        addresses.append(now)


SOON: dict[str, dict[str, int]] = {
    "clusterkv": {"batch": 12, "clusters_per_batch": 2},
    "clusterkv-plus": {"batch": 16, "clusters_per_batch": 2},
    "prkv": {"interval": 16, "page": 8},
    "retroinfer": {"batch": 12, "tokens_per_cluster": 4, "segment": 64},
}
"""Options with which batches are full, and sets chosen again, after a few tokens."""
KEEP_WHAT_LEFT = ["full", "streaming", "h2o", "snapkv", "snapkv-refreshed", "icecache", "icecache-reuse", "icecache-digest"]
REVERSIBLE = [*(name for name in DISTINCT if name not in KEEP_WHAT_LEFT), "clusterkv-plus"]


def until_full(one: OneLayer) -> OneLayer:
    """Steps until the ring is full."""
    while not one.cache.sequences.full():
        one.step()
    return one


def begun(method: str, steps: int) -> OneLayer:
    torch.manual_seed(4)
    return until_full(OneLayer(method, 130, steps, **SOON.get(method, {})))


def other_tokens(one: OneLayer, start: int) -> None:
    """From a place on the text is another one; the same for all layers."""
    rng = torch.Generator().manual_seed(start)
    for tensor in (one.query, one.keys, one.values):
        tensor[:, :, start:] = torch.randn(tensor[:, :, start:].shape, generator=rng)


def crop(drop: int) -> Callable[[OneLayer], None]:
    def do(one: OneLayer) -> None:
        one.cache.crop(drop)
        other_tokens(one, one.length)

    return do


def dense(one: OneLayer) -> None:
    start = one.length
    one.out = one.take(start, start + 20)


def few(one: OneLayer) -> None:
    start = one.length
    one.out = one.take(start, start + 5)


def cloned(one: OneLayer) -> None:
    """Its index is a clone of what it was; then tokens are dropped."""
    group = one.layer.retriever
    assert group is not None
    index = group.method.index(group.context)
    index.clone_from(group.index)
    group.index = index
    crop(2)(one)


COMES: dict[str, Callable[[OneLayer], None]] = {
    "one token": lambda one: None,
    "a few tokens": few,
    "a dense pass": dense,
    "a crop": crop(3),
    "a crop beyond what left before": crop(15),
    "a clone": cloned,
}
CLOSELY = ("oracle", *SOON, "pariskv")
"""Methods for which everything comes; for the others every second of these."""


@pytest.mark.parametrize(
    ("method", "comes"),
    [(method, list(COMES) if method in CLOSELY else [*COMES][turn % 2 :: 2]) for turn, method in enumerate(REVERSIBLE)],
)
def test_what_went_ahead_is_taken_back_exactly(method: str, comes: list[str]) -> None:
    """Whatever comes instead of the token, choices and output are those of a layer that never went ahead."""
    rounds, steps = (2, 13) if method in SOON else (1, 9)  # of updates between which a batch is now full and now is not
    one, went = begun(method, 100 + 60 * rounds), 0
    for do in [COMES[name] for name in comes] * rounds:
        plain = copy.deepcopy(until_full(one))
        if one.layer.can_run_ahead:
            one.cache.run_ahead()
            assert not one.cache.needs_host()
            went += 1
        ahead = copy.deepcopy(one)
        for each in (plain, ahead):
            do(each)
        for _ in range(steps):
            assert torch.equal(ahead.out, plain.out)
            assert ahead.step() == plain.step()
        one.step()
    assert went == len(comes) * rounds


@pytest.mark.parametrize("method", REVERSIBLE)
def test_beams_take_back_what_went_ahead(method: str) -> None:
    outs = []
    for goes in (False, True):
        one = begun(method, 40)
        if goes:
            one.cache.run_ahead(certain=True)
        one.cache.reorder([0, 0])
        one.cache.crop(2)
        other_tokens(one, one.length)
        one.cache.streams.observers.clear()
        for _ in range(4):
            at = one.length
            q, k, v = (x[:, :, at : at + 1].repeat(2, 1, 1, 1) for x in (one.query, one.keys, one.values))
            outs.append(one.cache.attend(one.layer, q, k, v, AttentionParams(SCALE)))
    for plain, ahead in zip(outs[:4], outs[4:], strict=True):
        assert torch.equal(ahead, plain)
        assert torch.equal(ahead[0], ahead[1])


def reversible(method: str) -> bool:
    updater = OneLayer(method, 60, 1).layer.updater
    return updater is None or updater.retriever.index.reversible


def test_which_methods_keep_what_left() -> None:
    """Those that drop some of it for good, and trees, which keep another shape; of the rest nothing is indexed."""
    found = {name for name in METHODS if name != "full" and not reversible(name)}
    assert found == {name for name in KEEP_WHAT_LEFT if name not in ("full", "streaming")}


def done(made: Any) -> Generator[None, None, Any]:
    """A work in pieces that has none left."""
    return made
    yield


class Launches(TorchDispatchMode):
    """Counts what is asked of the device; to have memory is no launch."""

    count = 0
    within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "empty" not in str(func) and not self.within
        return func(*args, **(kwargs or {}))

    def one(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Of what is a kernel on a GPU its definition's steps are not counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count, self.within = self.count + 1, True
            try:
                made = kernel(*args, **kwargs)
                return made if not isinstance(made, Generator) else done(whole(made))
            finally:
                self.within = False

        return counted


@pytest.mark.parametrize("method", REVERSIBLE)
def test_nothing_is_left_to_do_before_a_step_whose_work_went_ahead(method: str) -> None:
    one = begun(method, 40)
    assert one.cache.needs_host()
    with Launches() as ahead:
        one.cache.run_ahead(certain=True)
    assert ahead.count > 0
    assert not one.cache.needs_host()
    with Launches() as before:
        one.cache.before_step()
    assert before.count == 0


TOKENS = ["oracle", "omnikv", "pqcache", "magicpig", "socket", "infinigen", "twilight"]
KERNELS = [
    (layer_storage, "freeze_definition"),
    (units, "extend"),
    (codes, "encode"),
    (codes, "count"),
    (clusters, "first_keys"),
    (clusters, "kmeans_in_pieces"),
    (nodes, "node_digests"),
    (nodes, "nearest"),
    (nodes, "grouped"),
]


UNITS = ["clusterkv", "prkv", "quest", "arkvale", "freekv", "retroinfer", "pariskv", "shadowkv", "icecache-digest-device"]


@pytest.mark.parametrize(
    ("method", "pads"),
    [*((method, "some") for method in UNITS + TOKENS), *((method, "none") for method in ("clusterkv", "pariskv", "oracle"))],
)
def test_more_rows_are_no_more_launches(method: str, pads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that leave their rings at the same step leave together, wherever in their rings, pages and batches they stand."""
    found = []
    for rows in (2, 5):  # of one row some are views instead
        left = [0] * rows if pads == "none" else [3 * row for row in range(rows)]
        query, key, value = (torch.randn(rows, heads, 220, 16) for heads in (4, 2, 2))
        options = {} if method == "prkv" else SOON.get(method, {})  # PRKV's sets are chosen again sequence by sequence
        cache = KVCache(Settings(resolve(method, **options), budget=64, block_size=32), [2], 3)
        for start, stop in [(0, 200), *((at, at + 1) for at in range(200, 220))]:
            if stop == start + 1 and cache.needs_host():
                cache.streams.deferred.flush()  # clusters of the prompts
                with monkeypatch.context() as patch, Launches() as launches:
                    for module, name in KERNELS:
                        patch.setattr(module, name, launches.one(getattr(module, name)))
                    cache.before_step()
                found.append((rows, start, launches.count))
            q, k, v = (x[:, :, start:stop] for x in (query, key, value))
            cache.attend(cache.layers[0], q, k, v, AttentionParams(SCALE), left)
    two, five = ([of[1:] for of in found if of[0] == rows] for rows in (2, 5))
    assert len(two) >= 2
    assert two == five
