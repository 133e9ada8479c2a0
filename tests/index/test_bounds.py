"""Pages by their bounding volumes as an index."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs

from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex

QUEST, ARKVALE = partial(BoundIndex, page=16, spread="max"), partial(BoundIndex, page=32, spread="mean")


def test_quest_is_its_formula() -> None:
    seqs = Seqs(QUEST, [150], heads=2, group=1)
    found = seqs.sets(40)[0]
    for head in range(2):
        keys, query = seqs.keys[0][head, FIRST : FIRST + 150].double(), seqs.query()[0, head].double()
        pages = keys.split(16)
        bounds = torch.stack([torch.maximum(query * p.amin(dim=0), query * p.amax(dim=0)).sum() for p in pages])
        best = bounds.argsort(descending=True).tolist()
        wanted = [FIRST + 16 * p + i for p in best for i in range(len(pages[p]))]
        assert found[head] == set(wanted[:40])


def test_arkvale_is_its_formula() -> None:
    seqs = Seqs(ARKVALE, [140], heads=2, group=1)
    found = seqs.sets(64)[0]
    for head in range(2):
        keys, query = seqs.keys[0][head, FIRST : FIRST + 140].double(), seqs.query()[0, head].double()
        scores = []
        for page in keys.split(32):
            centre = (page.amax(dim=0) + page.amin(dim=0)) / 2
            delta = (centre - page).abs().mean(dim=0)
            scores.append(torch.maximum(query * (centre - delta), query * (centre + delta)).sum())
        best = torch.stack(scores).argsort(descending=True).tolist()
        wanted = [FIRST + 32 * p + i for p in best for i in range(min(32, 140 - 32 * p))]
        assert found[head] == set(wanted[:64])


def test_pages_are_the_same_however_tokens_came() -> None:
    one, many = Seqs(QUEST, [63]), Seqs(QUEST, [63])
    one.append(70)
    for n in (1, 1, 14, 20, 33, 1):
        many.append(n)
    a, b = one.index, many.index
    assert isinstance(a, BoundIndex)
    assert isinstance(b, BoundIndex)
    assert a.seqs[0].units == b.seqs[0].units == 9
    a.join()
    b.join()
    torch.testing.assert_close(a.digests[0, :, :9], b.digests[0, :, :9])
    assert torch.equal(a.stops[0, :, :10], b.stops[0, :, :10])


@pytest.mark.parametrize("make", [QUEST, ARKVALE])
@pytest.mark.parametrize("length", [203, 199, 197, 150, 130, 100, 36, 5])
def test_truncate_forgets_and_goes_on(make: partial[BoundIndex], length: int) -> None:
    seqs = Seqs(make, [100, 100])
    for _ in range(10):
        seqs.append(10)
    before = seqs.sets(60)[1]
    seqs.truncate(0, length)
    seqs.select(60)
    for _ in range(5):
        seqs.append(10, [0])
        seqs.select(30)
    assert seqs.sets(60)[1] == before
    index = seqs.index
    assert isinstance(index, BoundIndex)
    assert index.seqs[0].units <= (seqs.length[0] - FIRST) // index.size + 3


def test_truncating_within_the_last_page_is_as_if_it_had_not_come() -> None:
    cut, plain = Seqs(ARKVALE, [100]), Seqs(ARKVALE, [100])
    cut.append(60)
    cut.truncate(0, FIRST + 131)
    plain.append(31)
    assert cut.sets(50) == plain.sets(50)
    cut.append(40)
    plain.append(40)
    assert cut.sets(50) == plain.sets(50)


@pytest.mark.parametrize(
    ("options", "message"), [({"page": 0, "spread": "max"}, "page is 0"), ({"page": 8, "spread": "wide"}, "spread is 'wide'")]
)
def test_settings_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Seqs(partial(BoundIndex, **options), [0])  # type: ignore[arg-type]
