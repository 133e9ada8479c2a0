"""Votes of keys by their signs."""

from __future__ import annotations

import pytest
import torch
from paris import SHAPES, Case, poisoned
from warp import THREAD, run

from kvthaw.kernels import HAS_TRITON, bits, planes
from kvthaw.kernels import signs as op
from kvthaw.kernels.collide import BINS, CHUNK
from kvthaw.kernels.srht import make_rotation, srht


def test_a_key_has_the_votes_of_its_signs() -> None:
    """Half of <q, sign(k)> in float64, in steps of |q| / 3 sqrt(d), or twice that where d is 128: within what rounding may do."""
    for dim, steps in ((64, 1), (128, 2), (256, 4)):
        rotation = make_rotation(dim, 3)
        keys, query = torch.randn(500, dim), torch.randn(1, 3, dim)
        y, q = srht(keys.double(), rotation).double(), srht(query[0].double(), rotation).double()
        ids = ((y.reshape(500, -1, 8) >= 0).long() << torch.arange(8)).sum(dim=2).to(torch.uint8).T[None, None]
        totals = torch.full((1, 1, BINS), 7, dtype=torch.int32)
        _, found = planes.planes(query, rotation, 1, totals, mean=False)
        votes = op.definition(found, ids)[0, 0]
        unit = q.norm(dim=1, keepdim=True) / dim**0.5 / 3
        want = ((q / unit) @ (torch.where(y >= 0, 1.0, -1.0).double() / 2).T).amax(dim=0) / steps + 64
        assert int(votes.max()) <= BINS - 1
        assert float((votes - want).abs().max()) < 4 * dim**0.5 / steps / 3
        assert float((votes - want).mean().abs()) < 2 / steps + 0.7
        assert not totals.any()


def test_votes_by_hand() -> None:
    """Two heads, one key that has the first one's signs and one that has the opposite ones."""
    numbers = torch.randint(-8, 8, (1, 1, 2, 8, 16), dtype=torch.int32)
    alike = ((numbers[0, 0, 0] >= 0).int() << torch.arange(8)[:, None]).sum(dim=0).to(torch.uint8)
    ids = torch.stack((alike, 255 - alike), dim=1)[None, None]
    bit = (ids[0, 0, :, :, None] >> torch.arange(8)) & 1  # subspace, key, coordinate
    halved = torch.einsum("hjb,bnj->hn", numbers[0, 0], bit.int()) - (numbers[0, 0].sum(dim=(1, 2)) >> 1)[:, None]
    assert int(halved[0, 0]) == (int(numbers[0, 0, 0].abs().sum()) + 1) // 2
    want = ((halved.amax(dim=0) >> 1) + 64).clamp(0, 127)
    assert op.definition(planes.pack(numbers), ids).tolist() == [[want.tolist()]]
    assert int(want[0]) == 127


def run_as_typed(code: tuple[str, str], given: list[torch.Tensor]) -> list[torch.Tensor]:
    assert code[1].split(",") == ["=r"] * 4 + ["r"] * len(given)
    return run(code[0], given)


WARPS = [(4, 16), (1, 8), (3, 1), (5, 16), (8, 32)]  # query heads, subspaces


@pytest.mark.parametrize(("heads", "subs"), WARPS)
def test_instructions_of_a_warp(heads: int, subs: int) -> None:
    """Votes of 128 keys and their counts, by the instructions that a GPU is given."""
    numbers = torch.randint(-8, 8, (1, 1, heads, 8, subs), dtype=torch.int32)
    packed = planes.pack(numbers)
    fours, halves = packed.shape[2], packed.shape[5] // 16
    ids = torch.randint(0, 256, (subs, 128), dtype=torch.uint8)
    ids[:, 7] = ((numbers[0, 0, 0] >= 0).int() << torch.arange(8)[:, None]).sum(dim=0).to(torch.uint8)
    want = op.definition(packed, ids[None, None])[0, 0]
    g, t = THREAD // 4, THREAD % 4
    words, columns = ids.view(torch.int32), packed[0, 0].contiguous().view(torch.int32)
    mine = [(i // 4 * 16 + 4 * t + i % 4).clamp(max=subs - 1) for i in range(4 * halves)]
    registers = [words[b, 4 * g + k] for b in mine for k in range(4)]
    plane = [columns[i // 2, i % 2, g, t + 4 * half] for i in range(2 * fours) for half in range(halves) for _ in range(4)]
    of_four, element = 8 * halves, [4 * THREAD + 256 + r for r in range(4)]
    fourth = [[*plane[i * of_four : (i + 1) * of_four], *element] for i in range(fours)]
    start = [x for given in fourth for x in run_as_typed(bits.start(halves), given)]
    given = [*registers, *plane, *start, *element]
    found = run_as_typed(bits.votes(fours, halves, op.shift(subs)), given)
    assert torch.equal(torch.stack(found, dim=1).flatten(), want.long())
    before = torch.randint(0, 99, (128,))
    counts = run_as_typed(bits.count(), [*found, *before.reshape(32, 4).T, *element])
    assert torch.equal(torch.stack(counts, dim=1).flatten(), before + torch.bincount(want, minlength=128))
    elsewhere = [THREAD + 32 * r for r in range(4)]  # laid out otherwise
    for code, rest in (
        (bits.start(halves), fourth[0]),
        (bits.votes(fours, halves, 0), given),
        (bits.count(), [*found, *found, *element]),
    ):
        with pytest.raises(AssertionError, match="stopped"):
            run_as_typed(code, [*rest[:-4], *elsewhere])


KERNELS = [
    ((16, 2, (1, 0, 63), torch.float32), False),
    ((24, 1, (100,), torch.bfloat16), False),
    (SHAPES[4], True),
]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("shape", "mean"), KERNELS)
def test_kernel(
    shape: tuple[int, int, tuple[int, ...], torch.dtype],
    mean: bool,
    device: torch.device,
) -> None:
    dim, group, lengths, dtype = shape
    case = Case(dim, group, lengths, dtype, device)
    totals = torch.full((len(lengths), case.heads, BINS), 99, dtype=torch.int32, device=device)
    _, packed = planes.planes(case.query, case.rotation, case.heads, totals, mean=mean)
    want = op.definition(packed, case.summaries.ids)
    with poisoned():
        found = op.launch(packed, case.summaries.ids, case.lengths, totals)
    for seq, n in enumerate(lengths):
        assert torch.equal(found.scores[seq, :, :n].int(), want[seq, :, :n])
        one_hot = torch.nn.functional.one_hot(want[seq, :, :n].long(), BINS).sum(dim=1)
        at_least = one_hot.flip(1).cumsum(dim=1).flip(1).int()
        assert torch.equal(totals[seq], at_least)
        assert torch.equal(found.counts[seq, :, :, : -(-n // CHUNK)].sum(dim=2).int(), at_least)


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_devices_without_the_instructions_are_known(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert bits.native(torch.device("cuda", 0)) == has
    assert not bits.native(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose GPUs have capabilities above 9.0
    assert not bits.native(torch.device("cuda", 0))
