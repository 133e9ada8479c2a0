"""From coarse scores to rows in one launch, against the definitions of the three steps: on a GPU, and as fibres of a CPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paris import Case, poisoned
from torch import Tensor

from kvthaw.kernels import bucket_topk, choose_rows, rerank, topk
from kvthaw.kernels.collide import BINS, CHUNK, Scores
from kvthaw.kernels.encode import Summaries
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.query import in_bytes, rotate_queries

pytestmark = pytest.mark.slow

FIRST, SCALE = 5, 128**-0.5
HERE = Path(__file__).parent
Change = Callable[[Tensor, Tensor], Any]


def random_scores(most: int) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda shape: (torch.rand(shape) ** 3 * (most + 1)).int().clamp(max=most)


def crowded(begin: int, end: int) -> Callable[[tuple[int, ...]], Tensor]:
    place = torch.arange(1 << 16)
    return lambda shape: torch.where((place >= begin) & (place < end), 90, 0)[: shape[2]].expand(shape)


def alike(codes: Tensor, weights: Tensor) -> None:
    codes.fill_(0x12345678)
    weights.fill_(1.0)


def of_two_kinds(codes: Tensor, weights: Tensor) -> None:
    alike(codes, weights)
    weights[:, :, ::7] = 1.5


CASES = [  # lengths, query heads, rows, coarse scores, what becomes of codes and weights
    ((5000,), 4, 100, random_scores(96), None),
    ((1,), 4, 10, random_scores(96), None),
    ((1, 0, 63, 2048, 4097, 300), 4, 30, random_scores(96), None),
    ((50, 120), 4, 100, random_scores(96), None),
    ((5000,), 1, 100, random_scores(96), None),
    ((5000, 64), 2, 10, random_scores(96), None),
    ((3000,), 3, 64, random_scores(96), None),
    ((3000,), 5, 64, random_scores(96), None),
    ((3000, 17), 8, 256, random_scores(96), None),
    ((9000, 2100), 4, 50, random_scores(1), None),
    ((5000,), 4, 50, random_scores(0), None),
    ((30000,), 4, 100, crowded(100, 700), None),
    ((30000,), 4, 100, crowded(28000, 30000), None),
    ((9000,), 4, 100, random_scores(96), alike),
    ((20000,), 1, 200, random_scores(96), alike),
    ((20000,), 4, 256, random_scores(96), of_two_kinds),
    ((9000,), 4, 100, random_scores(96), lambda codes, weights: weights.mul_(1e-3)),
    ((9000,), 4, 100, random_scores(96), lambda codes, weights: weights.mul_(100)),
]


@functools.cache
def on_cpu(_: torch.device, scored: int, blocks: int) -> Callable[..., None]:
    """The kernel compiled for a CPU; launched as the other."""
    with tempfile.TemporaryDirectory() as folder:
        library, kernels = f"{folder}/rows.so", Path(choose_rows.__file__).parent
        given = [f"-D{name}={value}" for name, value in choose_rows.constants(scored, blocks).items()]
        command = ["g++", "-O1", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{kernels}", *given, str(HERE / "rows_on_cpu.cpp")]
        subprocess.run([*command, "-o", library], check=True, timeout=100)
        loaded = ctypes.CDLL(library)

    def launch(grid: tuple[int, int, int], threads: int, shared: int, *given: Any) -> None:
        assert (grid[0], threads) == (blocks, choose_rows.constants(scored, blocks)["THREADS"])
        values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in given]
        loaded.run(*values, ctypes.c_int(grid[2]), ctypes.c_long(shared), ctypes.c_uint(len(given)))

    return launch


@pytest.mark.parametrize(
    ("where", "blocks"),
    [
        pytest.param("cpu", 8, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")),
        pytest.param("cuda", 8, marks=pytest.mark.gpu),
        pytest.param("cuda", 16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("lengths", "group", "k", "draw", "change"), CASES)
def test_rows(
    lengths: tuple[int, ...],
    group: int,
    k: int,
    draw: Callable[..., Tensor],
    change: Change | None,
    where: str,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device(where, 0) if where == "cuda" else torch.device(where)
    if where == "cuda" and not nvidia(device, (9, 0)):
        pytest.skip("needs clusters of blocks")
    if where == "cpu":
        monkeypatch.setattr(choose_rows, "_kernel", on_cpu)
    case = Case(128, group, lengths, torch.bfloat16, device, k)
    rotated = in_bytes(rotate_queries(case.query, case.heads, case.rotation, mean=False))
    now = roomy(case.summaries)
    if change is not None:
        change(now.codes, now.weights)
    n = -(-max(lengths) // CHUNK) * CHUNK
    scores = draw((len(lengths), case.heads, n)).to(torch.uint8).contiguous().to(device)
    candidates = bucket_topk.definition(scores, case.lengths, case.wanted, case.width)
    estimates = rerank.definition(rotated, now.codes, now.weights, candidates, case.quantizer)
    merged = topk.merge(estimates, SCALE, "max")
    want, wanted = topk.definition(merged, candidates, k, FIRST)
    with poisoned():
        rows, counts = choose_rows.launch(
            counted(scores, case.lengths), case.lengths, case.wanted, rotated, now, case.quantizer, case.width, k, FIRST, SCALE,
            blocks,
        )  # fmt: skip
    assert torch.equal(counts, wanted)
    assert torch.equal(rows < 0, want < 0)
    if change in (alike, of_two_kinds):
        assert torch.equal(rows, want)
    assert ((rows[:, :, 1:] > rows[:, :, :-1]) | (rows[:, :, 1:] < 0)).all()
    for got, row, at, value in zip(*(x.flatten(0, 1) for x in (rows, want, candidates, merged)), strict=True):
        taken, best = (value[torch.isin(at, x[x >= 0] - FIRST) & (at >= 0)].sort().values for x in (got, row))
        torch.testing.assert_close(taken, best, atol=1e-4, rtol=1e-5)  # the same but for near ties


def roomy(now: Summaries) -> Summaries:
    """With room for more keys than are scored."""
    codes, weights = (torch.nn.functional.pad(x, (0, 0, 0, CHUNK), value=77) for x in (now.codes, now.weights))
    return Summaries(torch.nn.functional.pad(now.ids, (0, CHUNK)), codes, weights, now.sizes)


def counted(scores: Tensor, lengths: Tensor) -> Scores:
    """With the histograms that signs would leave."""
    known = torch.arange(scores.shape[2], device=scores.device) < lengths[:, None]
    chunks = torch.where(known[:, None], scores.int(), -1).unflatten(2, (-1, CHUNK))
    counts = (chunks[:, :, None] >= torch.arange(BINS, device=scores.device)[:, None, None]).sum(dim=4, dtype=torch.int32)
    return Scores(scores, counts.contiguous(), counts.sum(dim=3, dtype=torch.int32))
