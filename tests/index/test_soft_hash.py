"""SOCKET's index against its formulas, in float64, one token at a time."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import ConfigError
from kvthaw_baselines.index.soft_hash import SoftHashIndex
from shapes import DTYPES, close

SMALL = partial(SoftHashIndex, bits=4, tables=7)


def scores(query: Tensor, keys: Tensor, lengths: Tensor, directions: Tensor, tau: float) -> list[float]:
    """Of query [D] for keys [n, D] and what weighs them [n], with directions [L, K, D]; float64. Logits are over sqrt(D) tau."""
    found = []
    chances = []
    for table in directions:
        turned = [math.tanh(float(w @ query)) for w in table]
        logits = {
            c: sum(t * s for t, s in zip(turned, c, strict=True)) / math.sqrt(len(query)) / tau
            for c in itertools.product((-1, 1), repeat=len(table))
        }
        total = sum(math.exp(x) for x in logits.values())
        chances.append({c: math.exp(x) / total for c, x in logits.items()})
    for k, v in zip(keys, lengths.tolist(), strict=True):
        signs = [tuple(1 if float(w @ k) >= 0 else -1 for w in table) for table in directions]
        found.append(sum(chance[c] for chance, c in zip(chances, signs, strict=True)) * v)
    return found


def made(shape: IndexContext, **options: object) -> SoftHashIndex:
    return SMALL(shape, **options)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_definitions(dtype: torch.dtype, values: bool) -> None:
    seqs = Seqs(partial(SMALL, values=values), [60, 17], group=3, dim=32, dtype=dtype)
    index = seqs.index
    assert isinstance(index, SoftHashIndex)
    query = 0.3 * seqs.query()
    rows = index.select(query, 12).rows
    for seq, length in enumerate(seqs.length):
        for head in range(2):
            directions = index.planes.directions[head].double().T.unflatten(0, (7, 4))
            keys = seqs.keys[seq][head, FIRST:length].double()
            lengths = keys.norm(dim=1) if values else torch.ones(len(keys))
            heads = [scores(q, keys, lengths, directions, 0.3) for q in query[seq, 3 * head : 3 * head + 3].double()]
            merged = torch.tensor(
                [max(s / sum(own) for s, own in zip(x, heads, strict=True)) for x in zip(*heads, strict=True)]
            )
            # a sign of a product that is all but 0 may differ in float32; none does here
            assert set(rows[seq, head].tolist()) == {FIRST + i for i in merged.topk(12).indices.tolist()}


def test_estimates_are_logs_of_scores() -> None:
    seqs = Seqs(SMALL, [40], dim=32)
    index = seqs.index
    assert isinstance(index, SoftHashIndex)
    query = 0.2 * seqs.query().unflatten(1, (2, 2))
    found = (index.estimate(query, 40) * seqs.context.scale).exp()
    for head in range(2):
        directions = index.planes.directions[head].double().T.unflatten(0, (7, 4))
        keys = seqs.keys[0][head, FIRST : FIRST + 40].double()
        for g in range(2):
            close(
                found[0, head, g],
                torch.tensor(scores(query[0, head, g].double(), keys, keys.norm(dim=1), directions, 0.3)),
                torch.float32,
            )


def test_chances_add_up_and_narrow_with_tau() -> None:
    seqs = Seqs(SMALL, [10], dim=32)
    query = seqs.query().unflatten(1, (2, 2))
    peaks = []
    for tau in (1.0, 0.5, 0.3):
        chances = made(seqs.context, tau=tau).chances(query)
        close(chances.sum(dim=4), torch.ones(chances.shape[:4]))
        peaks.append(float(chances.amax(dim=4).mean()))
    assert peaks == sorted(peaks)


def test_every_corner_has_a_chance_at_the_least_tau() -> None:
    context = Seqs(SMALL, [10], dim=32).context
    sharp = SoftHashIndex(context, bits=12, tables=2, tau=0.05).chances(1e3 * torch.ones(1, 2, 2, 32))
    assert bool((sharp > 0).all())


@pytest.mark.parametrize(("bits", "kind"), [(8, torch.uint8), (10, torch.int16), (12, torch.int16)])
def test_a_key_meets_itself_first(bits: int, kind: torch.dtype) -> None:
    seqs = Seqs(partial(SoftHashIndex, bits=bits, tables=20), [300], group=1)
    index = seqs.index
    assert isinstance(index, SoftHashIndex)
    assert index.tables["buckets"].dtype == kind
    query = seqs.keys[0][None, :, FIRST + 77]
    assert (index.select(query, 1).rows == FIRST + 77).all()


def test_a_value_of_nothing_ranks_last_but_is_a_token() -> None:
    seqs = Seqs(SMALL, [30], build=False)
    keys = seqs.keys[0][:, FIRST : FIRST + 30]
    values = keys.clone()
    values[:, 5] = 0
    seqs.index.build(0, FIRST, keys, values, seqs.queries[0][:, :8])
    assert (seqs.index.select(seqs.query(), 30).counts == 30).all()
    assert FIRST + 5 not in seqs.index.select(seqs.query(), 29).rows[0]


@pytest.mark.parametrize(
    ("options", "words"), [({"bits": 13}, "bits is 13"), ({"tables": 0}, "tables is 0"), ({"tau": 0.001}, r"tau is 0\.001")]
)
def test_settings_out_of_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Seqs(partial(SMALL, **options), [20])
