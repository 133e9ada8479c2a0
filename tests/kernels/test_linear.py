"""Linear layers of one token against their definition: alone, with a norm, a bias, a gate and a residual, and with weights of 8 and
4 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from warp import THREAD, run

from kvthaw.kernels import linear, linear_int4, nibbles, rms_norm, rotate
from kvthaw.kernels.linear_parts import Blocks
from kvthaw.kernels.rms_norm import Norm
from kvthaw.kernels.weights import Float8Weight, Int4Weight, Weight, dense
from shapes import DTYPES, close

pytest.importorskip("triton")

WIDTHS = [(64, 64), (48, 64), (200, 64), (256, 64), (130, 128)]
"""Columns of the weights and of a block: whole blocks, parts of one, several, and several with a part."""


def drawn(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape).to(like.device, like.dtype)


def plain(n: int, width: int, like: Tensor) -> Tensor:
    return drawn(n, width, like=like) * width**-0.5


def eights(n: int, width: int, like: Tensor) -> Float8Weight:
    codes = torch.randn(n, width, device=like.device).to(torch.float8_e4m3fn)
    return Float8Weight(codes, (torch.rand(n, device=like.device) + 0.5) * width**-0.5)


def single(n: int, width: int, like: Tensor) -> Float8Weight:
    """Weights whose rows have one scale."""
    found = eights(n, width, like)
    return Float8Weight(found.codes, found.scale[:1].clone())


def fours(group: int) -> Callable[[int, int, Tensor], Int4Weight]:
    def make(n: int, width: int, like: Tensor) -> Int4Weight:
        high, wide = -(-n // 8), -(-width // max(128, group)) * max(128, group)
        codes = torch.randint(-(1 << 31), 1 << 31, (high, wide // 128, 32, 4), dtype=torch.int32, device=like.device)
        scales = (
            torch.randn(wide // group, 8 * high, 2, device=like.device) * torch.tensor([0.2, 0.5], device=like.device)
        ) * width**-0.5
        return Int4Weight(codes, scales.bfloat16(), group, torch.Size((n, width)))

    return make


def settings(
    x: Tensor,
    rows: list[int],
    *,
    norm: bool | str,
    bias: bool,
    residual: bool,
    gate: str | None,
    make: Callable[[int, int, Tensor], Weight] = plain,
) -> dict[str, Any]:
    width = x.shape[-1]
    weights = [make(n, width, x) for n in rows]
    return {
        "weights": weights,
        "biases": [drawn(n, like=x) if bias else None for n in rows],
        "norm": Norm(drawn(width, like=x), 1e-5, *((1.0, True) if norm == "gemma" else ())) if norm else None,
        "residual": drawn(1, rows[0], like=x) if residual else None,
        "gate": gate,
    }


def exact(x: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """The definition in float64 where products are concerned; the norm rounds as it does."""
    norm = given["norm"]
    normed = x if norm is None else rms_norm.definition(x, norm)
    wide = {"norm": None, "gate": given["gate"]}
    wide["weights"] = [dense(weight, torch.float64).double() for weight in given["weights"]]
    wide["biases"] = [None if bias is None else bias.double() for bias in given["biases"]]
    wide["residual"] = None if given["residual"] is None else given["residual"].double()
    return [y.to(x.dtype) for y in linear.definition(normed.double(), **wide)]


HOW: list[tuple[list[int], dict[str, Any]]] = [
    ([10], {}),
    ([10], {"residual": True, "bias": True}),
    ([9, 4, 5], {"norm": True}),
    ([8, 8, 3], {"norm": True, "bias": True}),
    ([7, 6], {}),
    ([5], {"norm": "gemma"}),
    ([13, 13], {"norm": True, "gate": "silu"}),
    ([3, 3], {"gate": "gelu_tanh", "bias": True, "residual": True}),
]
"""Rows of the weights, and what is before and behind them."""


def crossed(sizes: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return each of HOW with each of the sizes; the others take turns, so that each pair of values is met."""
    pairs = itertools.product(enumerate(HOW), enumerate(sizes))
    return [(*how, *size, *(other[(i + j) % len(other)] for other in others)) for (i, how), (j, size) in pairs]


NOTHING = {"norm": False, "bias": False, "residual": False, "gate": None}


@pytest.mark.parametrize(("rows", "how", "width", "columns", "dtype"), crossed(WIDTHS, DTYPES), ids=str)
def test_products_are_those_of_the_definition(
    rows: list[int], how: dict[str, Any], width: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(1, 1, width, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, rows, **NOTHING | how)
    for blocks in (Blocks(4, columns, 1, 4), Blocks(2, columns, 4, 4)):
        found = linear.launch(x, **given, blocks=blocks)
        assert [y.shape for y in found] == [(1, 1, n) for n in (rows[:1] if given["gate"] else rows)]
        for y, expected in zip(found, exact(x, given), strict=True):
            close(y, expected)


@pytest.mark.parametrize(
    ("rows", "how", "width", "columns", "make", "dtype"),
    crossed([(64, 64), (48, 64), (200, 64), (132, 128)], [eights, single], DTYPES),
)
def test_products_of_8_bits(
    rows: list[int], how: dict[str, Any], width: int, columns: int, make: Any, dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(1, 1, width, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, rows, **NOTHING | how, make=make)
    for y, expected in zip(linear.launch(x, **given, blocks=Blocks(4, columns, 1, 4)), exact(x, given), strict=True):
        close(y, expected)


@pytest.mark.parametrize(
    ("rows", "how", "width", "columns", "group"),
    crossed([(256, 256), (192, 256), (640, 256), (640, 1024)], [32, 64, 128, 256]),
)
def test_products_of_4_bits(
    rows: list[int], how: dict[str, Any], width: int, columns: int, group: int, device: torch.device
) -> None:
    """Rows of one tile and of several, and tiles that weights fill in part."""
    rows = [3 * n for n in rows]
    x = drawn(1, 1, width, like=torch.empty(0, dtype=torch.bfloat16, device=device))
    given = settings(x, rows, **NOTHING | how, make=fours(group))
    for pairs in (1, 2):
        found = linear.launch(x, **given, blocks=Blocks(pairs, columns, 1, 8))
        assert [y.shape for y in found] == [(1, 1, n) for n in (rows[:1] if given["gate"] else rows)]
        for y, expected in zip(found, exact(x, given), strict=True):
            close(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [plain, eights])
@pytest.mark.parametrize(("heads", "dim", "bias"), [((2, 1), 8, False), ((3, 3), 16, True), ((5, 1), 4, False)])
def test_queries_and_keys_are_turned(
    heads: tuple[int, int], dim: int, bias: bool, make: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Whole blocks of pairs, blocks that a weight fills in part, and a value that is not turned."""
    x = drawn(1, 1, 64, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, [heads[0] * dim, heads[1] * dim, 6], **NOTHING | {"norm": True, "bias": bias}, make=make)
    angle = torch.randn(dim // 2, device=device).repeat(2)
    turn = linear.Turn(angle.cos().to(dtype), angle.sin().to(dtype))
    assert all(turn.fits(weight, dtype) for weight in given["weights"][:2])
    query, key, value = exact(x, given)
    turned = rotate.definition(
        *(y.view(1, -1, 1, dim) for y in (query, key)), *(one.view(1, 1, -1) for one in (turn.cos, turn.sin))
    )
    for rows in (2, 4, 8):
        found = linear.launch(x, **given, turn=turn, blocks=Blocks(rows, 64, 1, 4))
        for y, expected in zip(found, (*turned, value), strict=True):
            close(y, expected.reshape(y.shape))
    assert not turn.fits(drawn(dim + 2, 64, like=x), dtype)
    assert not turn.fits(fours(32)(8 * dim, 128, x), torch.bfloat16)


def packed(q: Tensor) -> Tensor:
    """Numbers [N, K] in tiles, one after the other, as torch's _convert_weight_to_int4pack describes them for CUDA."""
    n, k = q.shape
    codes = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.int64)
    for thread in range(32):
        for word in range(4):
            for p in range(8):
                column = 32 * word + 8 * (p % 4) + 2 * (thread % 4) + p // 4
                codes[:, :, thread, word] |= q[thread // 4 :: 8, column::128].long() << (4 * p)
    return codes.int()


def test_numbers_of_4_bits_are_read_from_their_tiles() -> None:
    q = torch.randint(0, 16, (24, 256))
    scales = torch.rand(4, 24, 2).bfloat16()
    weight = Int4Weight(packed(q), scales, 64, torch.Size((21, 250)))
    assert torch.equal(weight.numbers(), q.int())
    scale, zero = (scales.double()[:, :, i].T.repeat_interleave(64, dim=1) for i in range(2))
    assert torch.equal(weight.dense(torch.float64), ((q - 8) * scale + zero)[:21, :250])


def test_instructions_of_a_warp_for_4_bits() -> None:
    """The sums of 16 rows and 128 columns, and of the token alone, by the instructions that a GPU is given."""
    weight, x = fours(128)(16, 128, torch.empty(0)), torch.randn(128).bfloat16()
    pair = torch.arange(4) * 16 + (4 * torch.arange(4))[:, None, None] + (THREAD % 4)[:, None]  # p, thread, word
    words = x.view(torch.int32)[pair]
    token = [words[p, :, j] for p in range(4) for j in range(4)]
    element = [4 * THREAD + 256 + j for j in range(4)]
    code, types = nibbles.product()
    tiles = [weight.codes[half, 0, :, j] for half in range(2) for j in range(4)]
    assert types.split(",") == ["=&f"] * 8 + ["r"] * 28
    found = (
        torch.stack(run(code, [*tiles, *token, *element], 8)).int().view(torch.float32).view(2, 4, 8, 4)
    )  # rows, thread of it
    products = (weight.numbers() + nibbles.ABOVE).float() * x.float()
    want = products.view(2, 8, 4, 32).sum(dim=3).transpose(1, 2)
    assert torch.allclose(found, want[..., None].expand(-1, -1, -1, 4), rtol=1e-5, atol=1e-3)
    code, types = nibbles.total()
    assert types.split(",") == ["=&f"] * 4 + ["r"] * 20
    found = torch.stack(run(code, [*token, *element])).int().view(torch.float32)
    assert torch.allclose(found, x.float().view(4, 32).sum(dim=1, keepdim=True).expand(-1, 32), rtol=1e-5, atol=1e-4)
    elsewhere = [THREAD + 32 * j for j in range(4)]
    with pytest.raises(AssertionError, match="the kernel was stopped"):
        run(code, [*token, *elsewhere])


def codes(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape).to(dtype)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Float8Weight(codes(4, 6, dtype=torch.float8_e4m3fn), torch.ones(4)), r"codes are .*\[4, 6\]"),
        (lambda: Float8Weight(codes(4, 8, dtype=torch.float8_e4m3fn), torch.ones(3)), r"scale is .*\[3\]; allowed"),
        (lambda: Float8Weight(torch.zeros(4, 8), torch.ones(4)), "codes are torch.float32"),
        (lambda: Int4Weight(codes(1, 1, 32, 4), torch.ones(2, 8, 2), 64, torch.Size((8, 128))), "scales are torch.float32"),
        (lambda: Int4Weight(codes(1, 1, 32, 4), torch.ones(2, 8, 2), 48, torch.Size((8, 128))), "group is 48; allowed"),
        (
            lambda: Int4Weight(torch.zeros(1, 1, 32, 4), torch.ones(2, 8, 2), 64, torch.Size((8, 128))),
            "codes are torch.float32",
        ),
        (lambda: Int4Weight(codes(2, 1, 32, 4), torch.ones(2, 8, 2), 64, torch.Size((8, 128))), r"codes are .*\[2, 1,"),
        (lambda: Int4Weight(codes(1, 1, 32, 4), torch.ones(2, 8, 2), 64, torch.Size((8, 129))), "columns; allowed"),
    ],
)
def test_weights_that_are_laid_out_otherwise_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_a_weight_stay_unread(dtype: torch.dtype, device: torch.device) -> None:
    """Weights are parts of larger tensors whose other rows are not numbers."""
    x = drawn(1, 48, like=torch.empty(0, dtype=dtype, device=device))
    given = settings(x, [5, 3], norm=True, bias=False, residual=False, gate=None)
    around = []
    for weight in given["weights"]:
        whole = torch.full((len(weight) + 8, 48), torch.nan, dtype=dtype, device=device)
        whole[: len(weight)] = weight
        around.append(whole[: len(weight)])
    for y, expected in zip(linear.launch(x, **given | {"weights": around}), linear.launch(x, **given), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("width", [64, 576, 2048, 4096, 5120, 7168, 8192, 14336, 28672])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_have_the_size_that_they_should(width: int, gated: bool) -> None:
    """A block has 4,096 to 8,192 numbers of all its weights, so that a program's registers hold two of them."""
    how = linear.blocks_for(width, gated=gated)
    assert 4096 <= how.rows * how.width * (2 if gated else 1) <= 8192
    assert how.rows & (how.rows - 1) == 0
    assert how.width & (how.width - 1) == 0


@pytest.mark.parametrize("width", [64, 576, 2048, 4096, 5120, 7168, 8192, 14336, 28672])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_8_bits_fill_the_registers(width: int, gated: bool) -> None:
    """Each of 16 warps' threads has 128 numbers, or 64 if a row has several blocks, which need sums of each thread too."""
    how = linear.float8_blocks(width, gated=gated)
    numbers = how.rows * how.width * (2 if gated else 1) // (32 * how.warps)
    assert numbers == (128 if width <= how.width else 64)
    assert how.programs * how.warps == 16
    assert how.rows & (how.rows - 1) == 0


@pytest.mark.parametrize("filled", [1024, 2048, 3072, 4096, 5120, 8192, 14336, 28672])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_4_bits_give_each_thread_four_words(filled: int, gated: bool) -> None:
    """Instructions stop the kernel where a thread has fewer."""
    how = linear_int4.blocks_for(filled, gated=gated)
    assert how.width % (128 * how.warps) == how.width & (how.width - 1) == how.width % 256 == 0
    assert how.programs * how.warps == 16
    assert how.width >= filled or filled > 4096


QUANTISED = {"fp8": eights, "fp8-single": single, "int4-32": fours(32), "int4-128": fours(128), "int4-256": fours(256)}


SIZES = [(4096, 6144), (14336, 4096), (8192, 1288), (2048, 40000), (1536, 8960), (28672, 256)]
AROUND: list[dict[str, Any]] = [
    *({}, {"norm": True, "gate": "silu", "bias": True}, {"norm": True, "parts": 3}, {"residual": True}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "width", "rows", "how"),
    [(kind, *size, AROUND[(n + m) % 4]) for n, kind in enumerate(QUANTISED) for m, size in enumerate(SIZES)],
)
def test_gpu_quantised_weights_of_models(kind: str, width: int, rows: int, how: dict[str, Any], device: torch.device) -> None:
    x, how = torch.randn(1, width, device=device, dtype=torch.bfloat16), dict(how)
    parts = how.pop("parts", 2 if "gate" in how else 1)
    given = settings(x, [rows] * parts, **NOTHING | how, make=QUANTISED[kind])
    for found, expected in zip(linear.launch(x, **given), exact(x, given), strict=True):
        assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_gpu_tiles_are_those_that_torch_packs(group: int, device: torch.device) -> None:
    q = torch.randint(0, 16, (48, 2048))
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(device, torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    assert torch.equal(theirs.cpu(), packed(q))
    weight = Int4Weight(theirs, torch.rand(2048 // group, 48, 2, device=device).bfloat16(), group, torch.Size((48, 2048)))
    x = torch.randn(1, 2048, device=device, dtype=torch.bfloat16)
    expected = torch.ops.aten._weight_int4pack_mm(x, theirs, group, weight.scales)
    (found,) = linear.launch(x, [weight], [None])
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTISED)
def test_gpu_a_chain_of_quantised_layers_waits_for_each_product(kind: str, device: torch.device) -> None:
    """Eagerly and in a graph that is replayed with new tokens."""
    x, make = torch.randn(1, 2048, device=device, dtype=torch.bfloat16), QUANTISED[kind]
    layers = [
        (
            settings(x, [7168, 7168], **NOTHING | {"norm": True, "gate": "silu"}, make=make),
            make(2048, 7168, x),
        )
        for _ in range(3)
    ]

    def step(x: Tensor, product: Any) -> list[Tensor]:
        for gates, down in layers:
            (inner,) = product(x, **gates)
            (x,) = product(inner, [down], [None], residual=x)
        return [x]

    assert_chained(x, step)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 2048, 4096, 5120, 8192])
def test_gpu_a_chain_of_layers_waits_for_each_product(hidden: int, device: torch.device) -> None:
    """Each launch reads what the one before it writes, eagerly and in a graph that is replayed with new tokens."""
    inner, x = hidden * 7 // 2, torch.randn(1, hidden, device=device, dtype=torch.bfloat16)
    layers = []
    for _ in range(3):
        qkv = settings(x, [hidden, hidden // 4, hidden // 4], norm=True, bias=False, residual=False, gate=None)
        gates = settings(x, [inner, inner], norm=True, bias=False, residual=False, gate="silu")
        o, down = drawn(hidden, hidden, like=x) * hidden**-0.5, drawn(hidden, inner, like=x) * inner**-0.5
        layers.append((qkv, o, gates, down))

    def step(x: Tensor, product: Any) -> list[Tensor]:
        found = []
        for qkv, o, gates, down in layers:
            query, key, value = product(x, **qkv)
            (x,) = product(query, [o], [None], residual=x)
            (inner,) = product(x, **gates)
            (x,) = product(inner, [down], [None], residual=x)
            found += [key, value]
        return [*found, x]

    assert_chained(x, step)


def assert_chained(x: Tensor, step: Callable[[Tensor, Any], list[Tensor]]) -> None:
    """Assert that a chain of launches gives the definition's results, eagerly and in a graph that is replayed with new tokens."""
    step(x, linear.launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, linear.launch)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        eager = step(x, linear.launch)
        graph.replay()
        for mine, same, expected in zip(eager, captured, step(x, linear.definition), strict=True):
            assert torch.equal(mine, same)
            assert float((mine.float() - expected.float()).norm() / expected.float().norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), [(4096, 6144), (14336, 4096), (8192, 1280), (2048, 128256)])
def test_gpu_weights_of_models(width: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(1, width, device=device, dtype=dtype)
    weight = torch.randn(rows, width, device=device, dtype=dtype) * width**-0.5
    (found,) = linear.launch(x, [weight], [None])
    expected = (x.double() @ weight.double().T).to(dtype)
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < {torch.float32: 1e-5}.get(
        dtype, 5e-3
    )
