"""prkv-plus's index: static tokens chosen from the best pages, pages of the text around them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import page_bounds
from kvthaw_baselines.index.static_pages import StaticPageIndex

SMALL = partial(StaticPageIndex, page=8, interval=20, share=0.5, observe=3)


def static(seqs: Seqs, seq: int = 0) -> list[list[int]]:
    index = seqs.index
    assert isinstance(index, StaticPageIndex)
    return [index.order[seq, h, : int(index.stops[seq, h, 0])].tolist() for h in range(index.context.kv_heads)]


def mass(seqs: Seqs, head: int, asked: slice, end: int) -> Tensor:
    """The mean attention of some queries over the positions FIRST .. end."""
    keys, queries = seqs.keys[0][head, FIRST:end].double(), seqs.queries[0][head].double()
    return torch.softmax(queries[asked] @ keys.T * 64**-0.5, dim=1).mean(dim=0)


def test_pages_keep_the_bounds_of_their_static_tokens() -> None:
    """Pages are those of the text and rank by all of their keys; none of their tokens is selected twice, and none is lost."""
    seqs = Seqs(SMALL, [203], heads=2, group=1)
    found, everything = seqs.sets(40)[0], seqs.sets(300)[0]
    seqs.sets(40)
    for head in range(2):
        keys = seqs.keys[0][head, FIRST : FIRST + 203].double()
        chosen = set(mass(seqs, head, slice(61, 64), FIRST + 200).topk(20).indices.tolist())  # the last page is not full
        pages = [range(at, min(at + 8, 203)) for at in range(0, 203, 8)]
        bounds = page_bounds.definition(keys[None].float(), 8, spread="mean")[0].double()
        query = seqs.queries[0][head, 100].double()
        scores = bounds[:, :64] @ query + bounds[:, 64:] @ query.abs()
        ranked = [token for page in scores.argsort(descending=True).tolist() for token in pages[page] if token not in chosen]
        assert found[head] == {FIRST + token for token in (*chosen, *ranked[:20])}
        assert everything[head] == set(range(FIRST, FIRST + 203))
    for n in (5, 16, 3, 20, 1, 30):
        seqs.append(n)
        assert [len(one) for one in seqs.sets(400)[0]] == [seqs.length[0] - FIRST] * 2


def test_few_layers_choose_their_sets_anew_at_once() -> None:
    began = []
    for layer in range(8):
        seqs = Seqs(lambda context, layer=layer: SMALL(replace(context, layer=layer)), [200], heads=1, group=1)
        for turn in range(4):  # of five tokens, which are an interval together
            seqs.select(40, 100 + turn)
            before = static(seqs)
            seqs.append(5)
            if static(seqs) != before:
                began.append(turn)
    assert len(began) == 8
    assert max(Counter(began).values()) <= 3


def test_a_refresh_of_a_text_within_the_field_is_exact() -> None:
    seqs = Seqs(SMALL, [200], heads=2, group=1)
    seqs.select(40)
    for step in range(110, 120):
        seqs.select(40, step)
    before = static(seqs)
    seqs.append(20)
    end = FIRST + 216  # without the last page
    for head, own in enumerate(static(seqs)):
        best = mass(seqs, head, slice(117, 120), end).topk(20).indices + FIRST
        assert own == sorted(best.tolist()) != before[head]


def test_a_refresh_of_a_longer_text_reads_the_keys_of_the_best_pages() -> None:
    """A key that none of the other 6,000 comes near is found; what is chosen is nearly what all keys would choose."""
    seqs = Seqs(SMALL, [6000], heads=1, group=1, more=40)
    key = 2 * seqs.queries[0][0, 103]
    index = seqs.index
    assert isinstance(index, StaticPageIndex)
    seqs.store.truncate(0, 0)
    seqs.keys[0][0, 3000] = key
    seqs.put(0, FIRST + 6000)
    keys = seqs.keys[0][:, FIRST : FIRST + 6000]
    index.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])
    for step in range(100, 104):
        seqs.select(40, step)
    seqs.append(20)
    weights = mass(seqs, 0, slice(101, 104), FIRST + 6016)
    found = static(seqs)[0]
    assert 3000 in found
    assert weights[torch.tensor(found) - FIRST].sum() > 0.8 * weights.topk(20).values.sum()


def test_an_undone_append_brings_the_static_tokens_back() -> None:
    """And once more given, it chooses the same."""
    seqs = Seqs(SMALL, [123, 90])
    index = seqs.index
    assert isinstance(index, StaticPageIndex)
    changes = 0
    for n in (5, 9, 20, 20):
        start, before, chosen = list(seqs.length), seqs.sets(40), static(seqs)
        outcomes = []
        for _ in range(2):
            for seq, length in enumerate(start):
                if seqs.length[seq] > length:
                    index.undo(seq, length)
            seqs.length = list(start)
            assert (seqs.sets(40), static(seqs)) == (before, chosen)
            for step in (101, 102, 103):
                seqs.select(40, step)
            assert index.reversible
            seqs.append(n)
            outcomes.append((static(seqs), seqs.sets(40)))
        assert outcomes[0] == outcomes[1]
        changes += outcomes[0][0] != chosen
    assert changes == 3


def test_a_cut_text_goes_on_with_all_of_its_tokens() -> None:
    seqs = Seqs(SMALL, [203])
    seqs.append(9)
    for length in (FIRST + 209, FIRST + 130, FIRST + 77):
        seqs.truncate(0, length)
        assert all(FIRST <= position < length for own in static(seqs) for position in own)
        for n in (20, 3, 25):
            seqs.append(n)
            assert seqs.sets(400)[0] == [set(range(FIRST, seqs.length[0]))] * 2
            seqs.sets(40)


def test_without_the_keys_in_the_store_static_tokens_stay() -> None:
    seqs = Seqs(SMALL, [100])
    seqs.select(40)
    before = static(seqs)
    seqs.store.truncate(0, 0)
    keys = seqs.keys[0][None, :, 104:129]
    seqs.index.append([0], keys, keys, None)
    assert static(seqs) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"share": 1.5}, "share is 1.5"), ({"share": "auto"}, "share is 'auto'"), ({"observe": 0}, "observe is 0")],
)
def test_settings_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Seqs(partial(StaticPageIndex, **options), [0])  # type: ignore[arg-type]
