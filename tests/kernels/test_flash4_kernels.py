"""FlashAttention 4's kernels against the definition, on a GPU that has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import flash_attention_4
from kvthaw.kernels.dense import definition

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def installed(device: torch.device) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    if not flash_attention_4.serves(torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)):
        pytest.skip("no kernels for this GPU")


def drawn(heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> Tensor:
    return torch.randn(batch, tokens, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)  # strided as a projection's


def near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert float((one.float() - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "group", "dtype", "softcap"),
    [
        (64, 4, torch.bfloat16, None),
        (96, 1, torch.float16, None),
        (128, 4, torch.float16, None),
        (128, 7, torch.bfloat16, None),
        (128, 8, torch.bfloat16, 30.0),
        (192, 2, torch.bfloat16, None),
        (256, 2, torch.bfloat16, 50.0),
    ],
)
def test_attend(dim: int, group: int, dtype: torch.dtype, softcap: float | None, causal: bool) -> None:
    """Queries of a whole prompt, and of its last tokens, in two rows."""
    for queries, tokens in ((200, 200), (300, 700)):
        q, (k, v) = drawn(2 * group, queries, dim, dtype, 2), (drawn(2, tokens, dim, dtype, 2) for _ in range(2))
        how = {"scale": 2 / math.sqrt(dim), "causal": causal, "softcap": softcap}
        near(flash_attention_4.attend(q, k, v, **how), definition(q, k, v, **how))  # type: ignore[arg-type]


LENGTHS = (130, 1, 257, 64)


def packed(q: Tensor, k: Tensor, v: Tensor, dim: int, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, *LENGTHS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return flash_attention_4.packed(q, k, v, ends, max(LENGTHS), scale=dim**-0.5, softcap=softcap)


@pytest.mark.parametrize(("dim", "group", "softcap"), [(64, 4, None), (128, 7, None), (256, 2, 50.0)])
def test_packed(dim: int, group: int, softcap: float | None) -> None:
    """Each prompt attends to itself alone."""
    q, (k, v) = drawn(2 * group, sum(LENGTHS), dim), (drawn(2, sum(LENGTHS), dim) for _ in range(2))
    outs = packed(q, k, v, dim, softcap)
    for out in zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v, *outs)), strict=True):
        near(out[3:], definition(*out[:3], scale=dim**-0.5, causal=True, softcap=softcap))


def test_captured_on_a_side_stream() -> None:
    """A replay attends to what the tensors hold by then."""
    q, (k, v) = drawn(8, sum(LENGTHS), 128), (drawn(2, sum(LENGTHS), 128) for _ in range(2))
    ends = torch.tensor([0, *LENGTHS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def attend() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        together = flash_attention_4.packed(q, k, v, ends, max(LENGTHS), scale=0.1)
        return flash_attention_4.attend(q, k, v, scale=0.1, causal=True), together

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    with torch.cuda.graph(graph, stream=stream):
        alone, together = attend()
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    near(alone, definition(q, k, v, scale=0.1, causal=True))
    first = [x[:, :, : LENGTHS[0]] for x in (q, k, v, *together)]
    near((first[3], first[4]), definition(*first[:3], scale=0.1, causal=True))


def test_a_prompt_that_is_not_finite_stays_alone() -> None:
    """Its neighbours in the row get finite outputs."""
    q, (k, v) = drawn(8, sum(LENGTHS), 128), (drawn(2, sum(LENGTHS), 128) for _ in range(2))
    begin = LENGTHS[0] + LENGTHS[1]
    v[:, :, begin : begin + LENGTHS[2]] = torch.nan
    out = packed(q, k, v, 128)[0]
    prompts = out.split(LENGTHS, dim=2)
    assert prompts[2].isnan().any()
    for other in (0, 1, 3):
        assert prompts[other].isfinite().all(), other
