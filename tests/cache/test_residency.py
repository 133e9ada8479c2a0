"""Residency against a dictionary that does the same slowly."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvthaw.cache.pool import Residency

CPU = torch.device("cpu")


class Slots:
    """One sequence and head: which row is in which slot, and when each slot was last wanted."""

    def __init__(self, slots: int) -> None:
        self.rows: list[int | None] = [None] * slots
        self.used = [0] * slots

    def admit(self, rows: list[int], step: int) -> tuple[list[int], list[int]]:
        """Hits keep their slots; the i-th miss takes the i-th slot in the order of last use."""
        slots = [self.rows.index(row) if row in self.rows else -1 for row in rows]
        for slot in slots:
            if slot >= 0:
                self.used[slot] = step
        order = sorted(range(len(self.rows)), key=lambda slot: (self.used[slot], slot))
        fetch = [-1] * len(rows)
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if row >= 0 and slot < 0:
                slots[i], fetch[i] = order.pop(0), row
        for row, slot in zip(fetch, slots, strict=True):
            if row >= 0:
                self.rows[slot], self.used[slot] = row, step
        return slots, fetch

    def clear(self, length: int) -> None:
        for slot, row in enumerate(self.rows):
            if row is not None and row >= length:
                self.rows[slot], self.used[slot] = None, 0


def wanted(rng: torch.Generator, seqs: int, heads: int, count: int, length: int) -> Tensor:
    """[B, H, count] distinct rows below length, some places empty."""
    rows = torch.full((seqs, heads, count), -1, dtype=torch.int32)
    for b in range(seqs):
        for h in range(heads):
            n = int(torch.randint(0, min(count, length) + 1, (), generator=rng))
            where = torch.randperm(count, generator=rng)[:n]
            rows[b, h, where] = torch.randperm(length, generator=rng)[:n].int()
    return rows


ACTIONS = st.lists(
    st.sampled_from(["admit"] * 6 + ["grow", "widen", "clear", "clear all", "reorder", "copy"]), min_size=1, max_size=40
)


@given(actions=ACTIONS, slots=st.integers(1, 9), heads=st.integers(1, 2), seed=st.integers(0, 10_000))
def test_against_the_model(actions: list[str], slots: int, heads: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    seqs, length, step, counts = 2, 7, 0, [0, 0, 0, 0]
    table = Residency(seqs, heads, slots, device=CPU)
    table.grow(length)
    model = {(b, h): Slots(slots) for b in range(seqs) for h in range(heads)}
    for action in actions:
        if action == "admit":
            step += 1
            rows = wanted(rng, seqs, heads, slots, length)
            found, fetch, live = table.admit(rows)
            for (b, h), one in model.items():
                expected_slots, expected_fetch = one.admit(rows[b, h].tolist(), step)
                assert found[b, h].tolist() == expected_slots
                assert fetch[b, h].tolist() == expected_fetch
                taken = [slot for slot in expected_slots if slot >= 0]
                assert len(taken) == len(set(taken)) == int((rows[b, h] >= 0).sum()), "every row has a slot of its own"
                assert live[b, h].nonzero()[:, 0].tolist() == sorted(taken)
                brought = sum(row >= 0 for row in expected_fetch)
                counts = [counts[0] + len(taken), counts[1] + brought, max(counts[2], len(taken)), 0]
            assert table.counts.tolist() == counts
        elif action == "grow":
            length += int(torch.randint(1, 300, (), generator=rng))
            table.grow(length)
        elif action == "widen":
            slots += 2
            table.widen(slots)
            for one in model.values():
                one.rows, one.used = [*one.rows, None, None], [*one.used, 0, 0]
        elif action.startswith("clear"):
            seq = int(torch.randint(0, seqs, (), generator=rng))
            keep = 0 if action == "clear all" else int(torch.randint(0, length, (), generator=rng))
            table.clear(seq, keep)
            for h in range(heads):
                model[seq, h].clear(keep)
        elif action == "reorder":
            order = torch.randint(0, seqs, (int(torch.randint(1, 4, (), generator=rng)),), generator=rng)
            table.reorder(order)
            model = {(i, h): copy.deepcopy(model[int(b), h]) for i, b in enumerate(order) for h in range(heads)}
            seqs = len(order)
        else:
            table = copy.deepcopy(table)
        for (b, h), one in model.items():
            assert [None if row < 0 else row for row in table.slot_row[b, h, :-1].tolist()] == one.rows
            known = {row: slot for slot, row in enumerate(one.rows) if row is not None}
            assert {row: slot for row, slot in enumerate(table.row_slot[b, h, :-1].tolist()) if slot >= 0} == known


def test_a_second_wish_is_a_hit() -> None:
    table = Residency(1, 1, 4, device=CPU)
    table.grow(100)
    rows = torch.tensor([[[9, 50, -1, 3]]], dtype=torch.int32)
    slots, fetch, _ = table.admit(rows)
    assert fetch.tolist() == rows.tolist()
    again, fetch, _ = table.admit(rows.flip(2))
    assert (fetch == -1).all()
    assert again.tolist() == slots.flip(2).tolist()


def test_slots_take_16_bits_of_a_device_where_they_fit() -> None:
    """The CPU's code reads 32."""
    table = Residency(1, 2, 1 << 14, device=torch.device("meta"))
    table.grow(1000)
    assert table.row_slot.dtype == torch.int16
    table.widen(1 << 15)
    assert table.row_slot.dtype == torch.int32
    assert Residency(1, 2, 4, device=CPU).row_slot.dtype == torch.int32


def test_addresses_stay_within_a_capacity() -> None:
    table = Residency(1, 2, 4, device=CPU)
    table.grow(200)
    before = [t.data_ptr() for t in (table.row_slot, table.slot_row, table.used, table.counts)]
    rng = torch.Generator().manual_seed(0)
    for length in range(10, 250, 5):
        table.grow(length)
        table.admit(wanted(rng, 1, 2, 4, length))
        table.clear(0, length - 3)
    assert table.row_slot.shape[2] > 250
    assert before == [t.data_ptr() for t in (table.row_slot, table.slot_row, table.used, table.counts)]
