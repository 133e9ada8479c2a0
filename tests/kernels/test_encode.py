"""Keys to ids, codes and weights: the quantizer, the definition's promises, the kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from paris import SEED, SHAPES, blank

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels import encode as op
from kvthaw.kernels.srht import make_rotation, srht

triton_only = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


@pytest.mark.parametrize("count", [4, 8])
def test_the_quantizer_is_the_best_for_its_prior(count: int) -> None:
    thresholds, centres = op.lloyd_max(count)
    table = (0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633)  # the paper's
    assert len(centres) == count
    assert count == 4 or max(abs(a - b) for a, b in zip(centres, table, strict=True)) < 0.0035
    assert all(abs((a + b) / 2 - t) < 1e-12 for (a, b), t in zip(itertools.pairwise(centres), thresholds, strict=True))
    x = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    density = (1 - x.square()) ** 2.5

    def loss(values: tuple[float, ...]) -> float:
        c = torch.tensor(values, dtype=torch.float64)
        edges = (c[1:] + c[:-1]) / 2
        return float(((x - c[torch.bucketize(x, edges)]).square() * density).sum() / density.sum())

    assert count == 4 or loss(centres) < loss(table)
    for i, step in itertools.product(range(count), (-1e-3, 1e-3)):
        moved = tuple(c + step * (i == j) for j, c in enumerate(centres))
        assert loss(centres) < loss(moved)
    bins = torch.bucketize(x, torch.tensor(thresholds, dtype=torch.float64))
    means = torch.zeros(count, dtype=torch.float64).scatter_add_(0, bins, x * density)
    means /= torch.zeros(count, dtype=torch.float64).scatter_add_(0, bins, density)
    torch.testing.assert_close(means, torch.tensor(centres, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("bits", "error", "rounding"), [(4, 0.12, 5e-3), (3, 0.21, 1 / 15)])
def test_codes_decode_to_nearly_the_key(bits: int, error: float, rounding: float) -> None:
    rotation, quantizer = make_rotation(128, SEED), op.make_quantizer(bits=bits)
    keys = torch.randn(2, 300, 128)
    ids, codes, table = op.definition(keys, rotation, quantizer)
    weights, directions = quantizer.weights(codes, table), quantizer.directions(codes)
    assert (ids.shape, codes.shape, weights.shape) == ((2, 16, 300), (2, 300, 16), (2, 300, 16))
    assert (table is None) == (bits == 3)
    y = srht(keys, rotation)
    decoded = (directions * weights[..., None]).flatten(2)
    assert float((decoded - y).norm() / y.norm()) < error
    assert torch.equal(decoded >= 0, y >= 0)
    patterns = ((ids.transpose(1, 2)[..., None].long() >> torch.arange(8)) & 1).flatten(2).bool()
    assert torch.equal(patterns, y >= 0)
    # <v, u> corrects the length exactly along the key itself
    along = (directions * y.reshape(2, 300, 16, 8)).sum(dim=3) * weights
    torch.testing.assert_close(along, y.reshape(2, 300, 16, 8).square().sum(dim=3), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.0), (3, 2.0**-14)])
def test_zero_keys_weigh_next_to_nothing(bits: int, most: float) -> None:
    quantizer = op.make_quantizer(bits=bits)
    _, codes, weights = op.definition(torch.zeros(1, 5, 64), make_rotation(64, SEED), quantizer)
    assert (quantizer.weights(codes, weights) == most).all()


def test_weights_in_codes_are_rounded_to_the_nearest_of_their_numbers() -> None:
    quantizer, nothing = op.make_quantizer(bits=3), torch.zeros(1, 8, dtype=torch.int64)
    numbers = torch.tensor([(1 + m / 8) * 2.0**e for e in range(-14, 18) for m in range(8)])
    assert len(numbers) == 256
    given = torch.cat((numbers, numbers * 1.03, numbers * 0.97, torch.tensor([0.0, 1e-9, 1e9])))
    words, table = quantizer.pack(nothing.expand(len(given), 8), given)
    assert table is None
    found = quantizer.weights(words, None)
    assert torch.equal(found[:256], numbers)
    nearest = (given[:, None] - numbers).abs().argmin(dim=1)
    assert torch.equal(found, numbers[nearest])
    signs = torch.full((len(given), 8), 4) + torch.arange(8) % 4  # the codes do not touch the weights, nor they them
    again, _ = quantizer.pack(signs, given)
    assert torch.equal(quantizer.weights(again, None), found)
    assert torch.equal(quantizer.directions(again), -quantizer.levels[signs - 4])


@triton_only
@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("dim", "group", "lengths", "dtype"), SHAPES)
def test_kernel(dim: int, group: int, lengths: tuple[int, ...], dtype: torch.dtype, bits: int, device: torch.device) -> None:
    rotation, quantizer, heads = make_rotation(dim, SEED, device=device), op.make_quantizer(device, bits), 2
    n, starts = min(300, max(lengths)), [5, 0][: len(lengths)]
    seqs = [len(lengths) - 1, 0][: len(starts)]
    keys = (torch.randn(len(seqs), n, heads, dim) * 2).to(dtype).to(device).transpose(1, 2)
    keys[0, 0, n // 2] = 0
    out = blank(len(lengths), heads, rotation, n + 5, device, bits)
    untouched = out.ids.clone(), out.codes.clone()
    op.launch(keys, rotation, quantizer, [out], seqs, starts)
    cpu = make_rotation(dim, SEED), op.make_quantizer(bits=bits)
    for i, (seq, start) in enumerate(zip(seqs, starts, strict=True)):
        ids, codes, weights = op.definition(keys[i].cpu(), *cpu)
        got = out.codes[seq, :, start : start + n].cpu()
        y = srht(keys[i].cpu(), cpu[0]).reshape(heads, n, -1, 8)
        radius = y.square().sum(dim=3, keepdim=True).sqrt()
        u = y.abs() / torch.where(radius > 0, radius, 1.0)
        near = ((u[..., None] - cpu[1].thresholds).abs().amin(dim=4) < 1e-6) | ((u < 1e-6) & (radius > 0))
        differ = cpu[1].directions(got) != cpu[1].directions(codes)
        assert not (differ & ~near).any()
        assert near.float().mean() < 1e-3
        sure = ~near.any(dim=3)
        assert torch.equal(out.ids[seq, :, :, start : start + n].cpu().transpose(1, 2)[sure], ids.transpose(1, 2)[sure])
        table = None if out.weights is None else out.weights[seq, :, start : start + n].cpu()
        made, want = (cpu[1].weights(*each)[sure] for each in ((got, table), (codes, weights)))
        torch.testing.assert_close(made, want, rtol=2**-7 if bits == 4 else 1 / 8, atol=1e-6)
        assert bits == 4 or float((made != want).float().mean()) < 1e-2  # just about half of a step
        for new, old, axis in ((out.ids, untouched[0], 2), (out.codes, untouched[1], 1)):
            for part in (slice(0, start), slice(start + n, None)):
                assert torch.equal(new[seq].movedim(axis, 0)[part], old[seq].movedim(axis, 0)[part])


@triton_only
def test_kernel_takes_the_centre_off(device: torch.device) -> None:
    rotation, quantizer = make_rotation(80, SEED, device=device), op.make_quantizer(device)
    keys, centre = torch.randn(1, 2, 70, 80, device=device), torch.randn(3, 2, 80, device=device)
    out, want = (blank(3, 2, rotation, 70, device) for _ in range(2))
    op.launch(keys, rotation, quantizer, [out], [1], [0], [centre])
    op.launch(keys - centre[1:2, :, None], rotation, quantizer, [want], [1], [0])
    assert torch.equal(out.codes, want.codes)
    assert torch.equal(out.ids, want.ids)
    op.encode(keys.cpu(), make_rotation(80, SEED), op.make_quantizer(),
              [on_cpu := blank(3, 2, rotation, 70, torch.device("cpu"))], [1], [0], [centre.cpu()])  # fmt: skip
    assert (on_cpu.codes[1, :, :70] != out.codes[1, :, :70].cpu()).float().mean() < 1e-2


@triton_only
@pytest.mark.parametrize("bits", [4, 3])
def test_kernel_summarises_keys_of_several_layers(bits: int, device: torch.device) -> None:
    rotation, quantizer = make_rotation(80, SEED, device=device), op.make_quantizer(device, bits)
    keys, centres = torch.randn(4, 2, 70, 80, device=device), [torch.randn(3, 2, 80, device=device) for _ in range(2)]
    found, alone = ([blank(3, 2, rotation, 90, device, bits) for _ in range(2)] for _ in range(2))
    op.launch(keys, rotation, quantizer, found, [2, 0], [3, 20], centres)
    for i, (into, centre) in enumerate(zip(alone, centres, strict=True)):
        op.launch(keys[2 * i : 2 * i + 2], rotation, quantizer, [into], [2, 0], [3, 20], [centre])
    for mine, theirs in zip(found, alone, strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.codes, theirs.codes)
        if mine.weights is not None:
            torch.testing.assert_close(mine.weights, theirs.weights, rtol=0, atol=0, equal_nan=True)


@triton_only
def test_counting_kernel_adds_and_takes_away(device: torch.device) -> None:
    rotation = make_rotation(64, SEED, device=device)
    out = blank(3, 2, rotation, 6000, device)
    out.ids.random_(0, 256)
    out.ids[0, 0, 0] = 7  # all keys in one cluster
    seqs, starts, stops = [0, 2], [100, 0], [5000, 1]
    op.launch_count(out, seqs, starts, stops)
    want = torch.zeros(3, 2, 8, 256, dtype=torch.int32)
    for seq, start, stop in zip(seqs, starts, stops, strict=True):
        ids = out.ids[seq, :, :, start:stop].cpu().long()
        want[seq].scatter_add_(2, ids, torch.ones_like(ids, dtype=torch.int32))
    assert torch.equal(out.sizes.cpu(), want)
    assert out.sizes[0, 0, 0, 7] == 4900
    op.launch_count(out, seqs, starts, stops, -1)
    assert not out.sizes.any()


@triton_only
@pytest.mark.gpu
def test_encoding_waits_for_nothing(device: torch.device) -> None:
    """The host goes on while the device still works: no copy of sequences and positions waits for what is queued."""
    rotation, quantizer = make_rotation(64, SEED, device=device), op.make_quantizer(device)
    keys, out = torch.randn(1, 2, 70, 64, device=device), blank(1, 2, rotation, 70, device)
    out.ids.zero_()
    try:
        torch.cuda.set_sync_debug_mode("error")
        op.launch(keys, rotation, quantizer, [out], [0], [0])
        op.launch_count(out, [0], [0], [70])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(out.sizes.sum()) == 2 * 8 * 70
