"""Tables of sequences, without an index."""

from __future__ import annotations

import pytest
import torch

from kvthaw.index.tables import SequenceTables


def tables(*, seqs: int, tokens: int) -> tuple[SequenceTables, list[int], list[list[int]]]:
    made = SequenceTables(torch.device("cpu"))
    made.add("codes", (2, "tokens", 3), torch.int32, -1)
    made.add("ends", ("tokens",), torch.float32)
    counts, marks = made.host(int), made.host(list[int])
    made.reserve(seqs, tokens=tokens)
    made.add("late", (), torch.bool)
    for seq in range(seqs):
        made["codes"][seq, :, :tokens] = seq
        counts[seq] = tokens + seq
        marks[seq].append(seq)
    return made, counts, marks


def addresses(made: SequenceTables) -> list[int]:
    return [table.data_ptr() for table in made.values()]


def test_growing_keeps_content_and_addresses_while_there_is_room() -> None:
    made, counts, _ = tables(seqs=2, tokens=5)
    assert made["late"].shape == (2,)
    before = addresses(made)
    made.reserve(1, tokens=4)
    assert addresses(made) == before
    assert not made.lacks(2, tokens=5)
    made.reserve(3, tokens=9)
    assert (made.seqs, made.room, counts) == (3, {"tokens": 9}, [5, 6, 0])
    assert made["codes"][:, 0, :, 0].tolist() == [[0] * 5 + [-1] * 4, [1] * 5 + [-1] * 4, [-1] * 9]
    assert made["ends"].shape == (3, 9)


def test_a_dimension_that_no_column_has_is_refused() -> None:
    made, _, _ = tables(seqs=1, tokens=2)
    with pytest.raises(KeyError, match="pages"):
        made.reserve(1, pages=3)


def test_where_memory_is_short_nothing_changes() -> None:
    made = SequenceTables(torch.device("cpu"))
    made.add("small", (), torch.int32)
    made.add("large", ("tokens",), torch.int32)
    with pytest.raises(RuntimeError):
        made.reserve(2, tokens=1 << 58)
    assert (made.seqs, made.room, made["small"].shape) == (0, {"tokens": 0}, (0,))
    made.reserve(1, tokens=4)
    assert (made["small"].shape, made["large"].shape) == ((1,), (1, 4))


def test_resizing_drops_the_columns_of_that_dimension_alone() -> None:
    made, counts, _ = tables(seqs=2, tokens=5)
    made["late"][1] = True
    made.resize("tokens", 3)
    assert made["codes"].shape == (2, 2, 3, 3)
    assert (made["codes"] == -1).all()
    assert (made["late"].tolist(), counts) == ([False, True], [5, 6])


def test_reordering_is_in_place_while_the_number_of_sequences_stays() -> None:
    made, counts, marks = tables(seqs=3, tokens=5)
    before = addresses(made)
    made.reorder([2, 0, 0])
    assert addresses(made) == before
    assert (made["codes"][:, 0, 0, 0].tolist(), counts, marks) == ([2, 0, 0], [7, 5, 5], [[2], [0], [0]])
    marks[1].append(9)
    assert marks[2] == [0]
    made.reserve(5)
    made.reorder([1, 4])
    assert (made["codes"][:, 0, 0, 0].tolist(), counts, made.seqs) == ([0, -1], [5, 0], 2)


def test_export_and_load_copy_as_many_entries_as_asked() -> None:
    made, _, marks = tables(seqs=2, tokens=5)
    held = made.export(1, tokens=4)
    assert held[0]["codes"].shape == (2, 4, 3)
    assert held[0]["ends"].shape == (4,)
    made["codes"][1], marks[1][0] = 7, 8
    other, others, _ = tables(seqs=1, tokens=6)
    other.reserve(2)
    other.load(1, held)
    assert other["codes"][1, 0, :, 0].tolist() == [1, 1, 1, 1, -1, -1]
    assert others == [6, 6]
    assert held[1] == [6, [1]]


def test_a_clone_shares_nothing() -> None:
    made, _, marks = tables(seqs=2, tokens=5)
    other, others, other_marks = tables(seqs=1, tokens=1)
    other.clone_from(made)
    assert (other.seqs, other.room, others, other_marks) == (2, {"tokens": 5}, [5, 6], [[0], [1]])
    made["codes"].zero_()
    marks[1].append(3)
    assert other["codes"][1, 0, 0, 0] == 1
    assert other_marks == [[0], [1]]
