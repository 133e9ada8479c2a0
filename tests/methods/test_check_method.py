"""check_method() names the rule that a method breaks, with the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from kvthaw.cache.index_api import Selection
from kvthaw.errors import ConfigError, ContractError
from kvthaw.index.exact import ExactIndex
from kvthaw.index.tables import Held
from kvthaw.methods import resolve
from kvthaw.testing import Contract, check_method


class Twice(ExactIndex):
    """Selects its first row once more."""

    def select(self, query: Tensor, budget: int) -> Selection:
        found = super().select(query, budget)
        found.rows[:, :, 1] = found.rows[:, :, 0]
        return found


class Fails(ExactIndex):
    """Cannot add tokens."""

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        raise IndexError("no such page")


class Draws(ExactIndex):
    """Looks for a query of its own, drawn from torch's generator."""

    def select(self, query: Tensor, budget: int) -> Selection:
        return super().select(torch.randn_like(query), budget)


class Keeps(ExactIndex):
    """Shares with its copies what it holds."""

    def clone_from(self, other: Self) -> None:
        self.__dict__.update(other.__dict__)


class Forgets(ExactIndex):
    """Leaves out of an export how many tokens there are."""

    def load(self, seq: int, held: Held, end: int) -> None:
        super().load(seq, held, end)
        self.counts[seq] = 0
        self.sync_counts()


class Hides(ExactIndex):
    """Does not say which tensors it reads."""

    def tensors(self) -> list[Tensor]:
        return []


class Guesses(ExactIndex):
    """Selects the same positions whatever it is asked, and reads nothing for it."""

    def select(self, query: Tensor, budget: int) -> Selection:
        rows = torch.full((len(query), self.context.kv_heads, budget), -1, dtype=torch.int32)
        return Selection(rows, torch.zeros(rows.shape[:2], dtype=torch.int32))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (Twice, r"mine breaks the rule keeps_the_budget \(48\), .*without repeats.*: CacheError: .* row \d+ is there twice"),
        (Fails, r"mine breaks the rule keeps_the_budget \(48\), .*IndexError: no such page"),
    ],
)
def test_the_first_broken_rule_is_named(index: Any, words: str) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(ContractError, match=words):
        check_method(replace(resolve("oracle"), name="mine", index=index))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("index", "rule", "words"),
    [
        (Draws, "chooses_alike_alone", r"step 0, sequence 0, alone .*KV head \d: the rows are \[\d+, .*, not \["),
        (Keeps, "copies_independently", r"clone_from\(\) shares tensors"),
        (Forgets, "continues_after_an_export", r"step 8, sequence \d, after export\(\) and load\(\), KV head 0: the rows are"),
        (
            Guesses,
            "names_its_tensors",
            r"after the prompt, select\(\) was not called or reads no tensor, though its traits say on_host=False",
        ),
        (Hides, "names_its_tensors", r"after the prompt, select\(\) reads Hides\.\w.*, which tensors\(\) does not name"),
    ],
)
def test_a_broken_rule_says_what_it_found(index: Any, rule: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        getattr(Contract(replace(resolve("oracle"), index=index)), rule)()


def test_a_unit_that_no_table_knows_is_refused() -> None:
    with pytest.raises(ContractError, match=r"describes_itself, .*unit is 'word'; it must be token, page, cluster or -"):
        check_method(replace(resolve("oracle"), unit="word"))


def test_a_dense_method_has_nothing_to_check() -> None:
    with pytest.raises(ConfigError, match="method full is dense"):
        check_method("full")
