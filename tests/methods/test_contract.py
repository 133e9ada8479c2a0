"""What every method keeps, over METHODS: a new method is held to it by its line there. The rules are kvthaw.testing's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kvthaw.errors import ConfigError
from kvthaw.methods import METHODS, resolve
from kvthaw.testing.contract import Contract
from kvthaw.testing.layer import Layer, Text
from kvthaw.testing.shapes import SMALL, VARIANTS, Shape
from zoo import DISTINCT

MADE = {name: make() for name, make in METHODS.items()}
RETRIEVES = [name for name, method in MADE.items() if method.index is not None]
OFFLOADS = [name for name, method in MADE.items() if not method.dense]
ALIKE = [name for name in OFFLOADS if name not in DISTINCT]
CLOSELY = {
    "keeps_the_budget": ("oracle", "icecache", "pariskv", "clusterkv", "h2o"),
    "attends_to_all_within_the_budget": ("icecache",),
    "serves_every_shape": ("pariskv", "clusterkv"),
    "follows_a_reorder": ("pariskv", "clusterkv", "h2o"),
    "forgets_what_is_cropped": ("icecache", "pariskv", "clusterkv"),
}
"""Methods that meet every case of a rule; the others take turns at the cases."""


@functools.cache
def contract(name: str) -> Contract:
    return Contract(MADE[name])


def runs() -> list[Any]:
    """Methods, rules and cases: some methods with each case of a rule, and all the others with one; those whose index another has
    at other options take turns at the rules."""
    found = []
    for number, (rule, cases) in enumerate(Contract.CASES.items()):
        names = RETRIEVES if rule in Contract.RETRIEVES else OFFLOADS
        closely = [name for name in names if name in CLOSELY.get(rule, ())]
        others = [name for name in names if name not in closely and (name in DISTINCT or (number + ALIKE.index(name)) % 2)]
        pairs = [(name, case) for name in closely for case in cases]
        pairs += [(name, cases[turn % len(cases)]) for turn, name in enumerate(others)]
        found += [pytest.param(name, rule, case, id="-".join((rule, name, *map(str, case)))) for name, case in pairs]
    return found


@pytest.mark.parametrize(("name", "rule", "case"), runs())
def test_contract(name: str, rule: str, case: tuple[Any, ...]) -> None:
    getattr(contract(name), rule)(*case)


@pytest.mark.parametrize("name", ["icecache-digest:remainder=16", "thaw:tolerance=0.002"])
@pytest.mark.parametrize(
    "rule", ["chooses_alike_alone", "copies_independently", "repeats_what_failed", "attends_to_all_after_a_crop"]
)
def test_options_that_change_what_is_read_keep_the_contract(name: str, rule: str) -> None:
    for case in Contract.CASES[rule]:
        getattr(Contract(resolve(name)), rule)(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("shape", VARIANTS, ids=str)
def test_every_shape_keeps_the_contract_on_a_gpu(name: str, shape: Shape, device: torch.device) -> None:
    """By kernels: ragged rows, tokens that leave the ring, and full attention where the budget allows it."""
    for budget in (40, 256):
        layer = Layer(MADE[name], Text(shape, [120, 71], 24), device, budget=budget).prefill()
        for step in layer.decode():
            layer.check(step)
            if budget == 256:
                layer.close_to_full(step)


def test_the_pool_of_a_fresh_layer_holds_zeros() -> None:
    slab = Layer(MADE["oracle"], Text(SMALL, [60], 20), budget=32).prefill().offloaded.slab
    assert (slab.data[:, :, slab.pool_start :] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_methods_describe_themselves(name: str) -> None:
    assert MADE[name].name == name
    assert METHODS[name].__doc__


@pytest.mark.parametrize("name", RETRIEVES)
def test_less_than_the_smallest_budget_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"smallest .* is 16 tokens"):
        Layer(MADE[name], Text(SMALL, [90], 5), budget=15)
