"""Dense attention against its definition and torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvthaw.kernels import dense, flash_attention_4, packed
from kvthaw.kernels.dense import attend, causal_attention, continued, definition, packed_attention, with_sinks
from shapes import DTYPES, Shape, close, over_shapes

SCALE = 0.2


def test_definition_is_softmax_attention() -> None:
    shape = Shape(tokens=9)
    q, k, v = shape.query(5), shape.keys(), shape.keys()
    out, lse = definition(q, k, v, scale=SCALE, causal=True)
    for head in range(shape.q_heads):
        for i in range(5):
            scores = q[1, head, i] @ k[1, head // shape.group, : 9 - 5 + i + 1].T * SCALE
            close(out[1, head, i], torch.softmax(scores, 0) @ v[1, head // shape.group, : 9 - 5 + i + 1])
            close(lse[1, head, i], scores.logsumexp(0))


def test_definition_where_nothing_is_visible() -> None:
    shape = Shape(tokens=0)
    out, lse = definition(shape.query(3), shape.keys(), shape.keys(), scale=SCALE, causal=False)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    shape = Shape(tokens=2)  # more queries than keys: the first see none
    out, lse = definition(shape.query(5), shape.keys(), shape.keys(), scale=SCALE, causal=True)
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert (lse[:, :, 3:] > -torch.inf).all()


@over_shapes
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("steps", [None, 1, 7])
def test_attend(shape: Shape, softcap: float | None, steps: int | None) -> None:
    """Causal with as many queries as keys, and without a mask for few queries."""
    q, k, v = shape.query(steps or shape.tokens), shape.keys(), shape.keys()
    causal = steps is None
    out, lse = attend(q, k, v, scale=SCALE, causal=causal, softcap=softcap)
    expected, expected_lse = definition(q, k, v, scale=SCALE, causal=causal, softcap=softcap)
    assert out.dtype == shape.dtype
    assert lse.dtype == torch.float32
    close(out, expected)
    close(lse, expected_lse, shape.dtype)


@over_shapes
@pytest.mark.parametrize(("softcap", "sinks", "past"), [(None, False, 0), (3.0, True, 1), (None, True, 40), (3.0, False, 40)])
def test_causal_attention(shape: Shape, softcap: float | None, sinks: bool, past: int) -> None:
    q, k, v = shape.query(shape.tokens), shape.keys(shape.tokens + past), shape.keys(shape.tokens + past)
    logits = torch.randn(shape.q_heads) if sinks else None
    out = causal_attention(q, k, v, scale=SCALE, softcap=softcap, sinks=logits)
    expected = with_sinks(*definition(q, k, v, scale=SCALE, causal=True, softcap=softcap), logits)
    assert out.dtype == shape.dtype
    close(out, expected)


def test_sinks_are_a_column_of_the_softmax() -> None:
    shape = Shape(tokens=11)
    q, k, v, sinks = shape.query(11), shape.keys(), shape.keys(), torch.randn(8)
    scores = q @ k.repeat_interleave(4, 1).transpose(2, 3) * SCALE
    scores = scores.masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), -torch.inf)
    column = sinks[None, :, None, None].expand(2, -1, 11, 1)
    weights = torch.softmax(torch.cat((scores, column), dim=3), dim=3)[..., :-1]
    close(causal_attention(q, k, v, scale=SCALE, sinks=sinks), weights @ v.repeat_interleave(4, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_the_plain_path(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Queries taken in pieces see what they would see together."""
    shape = Shape(tokens=65, dtype=dtype)
    q, k, v = shape.query(33), shape.keys(), shape.keys()
    expected = definition(q, k, v, scale=SCALE, causal=True, softcap=3.0)
    monkeypatch.setattr(dense, "_SCORES", 16 * 65 * 5)
    out, lse = attend(q, k, v, scale=SCALE, causal=True, softcap=3.0)
    close(out, expected[0])
    close(lse, expected[1])


def test_keys_of_a_slab_are_views() -> None:
    """Keys and values with strides, as the cache hands them over."""
    shape = Shape()
    rows = torch.randn(2, 2, 65, 2, 64)
    q = shape.query(65)
    expected = F.scaled_dot_product_attention(
        q, rows[:, :, :, 0].contiguous(), rows[:, :, :, 1].contiguous(), is_causal=True, scale=SCALE, enable_gqa=True
    )
    close(causal_attention(q, rows[:, :, :, 0], rows[:, :, :, 1], scale=SCALE), expected)


@over_shapes
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_continued(shape: Shape, softcap: float | None) -> None:
    """A past that comes in parts, none of them longer than the new tokens need."""
    q, k, v = shape.query(shape.tokens), shape.keys(shape.tokens + 40), shape.keys(shape.tokens + 40)
    past = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 1), (1, 17), (17, 17), (17, 40))]
    logits = torch.randn(shape.q_heads)
    out = continued(q, k[:, :, 40:], v[:, :, 40:], iter(past), scale=SCALE, softcap=softcap, sinks=logits)
    expected = with_sinks(*definition(q, k, v, scale=SCALE, causal=True, softcap=softcap), logits)
    assert out.dtype == shape.dtype
    close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("steps", [16, 1000, 1024])
def test_gpu_attend_with_its_log_sum_exp(dtype: torch.dtype, dim: int, steps: int, device: torch.device) -> None:
    """Whichever library attends: rows of a block, as they lie there, and new tokens."""
    shape = Shape(batch=1, heads=2, group=4, head_dim=dim, dtype=dtype)
    rows = torch.randn(1, 2, 1000 + steps, 2, dim).to(device, dtype)
    q, k, v = shape.query(steps).to(device), rows[:, :, :, 0], rows[:, :, :, 1]
    for causal, part in ((False, slice(0, 1000)), (True, slice(1000, None))):
        out, lse = attend(q, k[:, :, part], v[:, :, part], scale=SCALE, causal=causal)
        expected = definition(q, k[:, :, part], v[:, :, part], scale=SCALE, causal=causal)
        close(out, expected[0])
        close(lse, expected[1], dtype)
    past = ((k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 512), (512, 1000)))
    out = continued(q, k[:, :, 1000:], v[:, :, 1000:], past, scale=SCALE)
    close(out, definition(q, k, v, scale=SCALE, causal=True)[0])


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (3.0, False), (None, True)])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 64)])
def test_prompts_in_one_row_attend_to_themselves_alone(
    dtype: torch.dtype, dim: int, softcap: float | None, *, sinks: bool, group: int, device: torch.device
) -> None:
    lengths, heads = [1, 130, 17, 64], 2
    made = [torch.randn(1, sum(lengths), n * heads, dim, device=device).to(dtype).transpose(1, 2) for n in (group, 1, 1)]
    learned = torch.randn(group * heads, device=device) if sinks else None
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    how: dict[str, Any] = {"scale": SCALE, "softcap": softcap, "sinks": learned}
    outs = [packed_attention(*made, lengths, ends, **how)]
    if dtype.itemsize == 2:
        outs.append(packed.launch(*made, lengths, ends, **how))
    for start, stop in zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True):
        expected, lse = definition(*(x[:, :, start:stop] for x in made), scale=SCALE, causal=True, softcap=softcap)
        for out in outs:
            assert (out.shape, out.dtype) == (made[0].shape, dtype)
            close(out[:, :, start:stop], with_sinks(expected, lse, learned).to(dtype))


def test_a_packed_prompt_that_is_not_finite_stays_alone(device: torch.device) -> None:
    """A kernel that multiplies masked weights of 0 with a neighbour's values would pass them on."""
    lengths, shape = (130, 1, 257, 64), Shape(batch=1, heads=2, group=4, head_dim=128, dtype=torch.bfloat16)
    total, ends = sum(lengths), torch.tensor([0, 130, 131, 388, 452], device=device, dtype=torch.int32)
    query, keys, values = (x.to(device) for x in (shape.query(total), shape.keys(total), shape.keys(total)))
    for spoilt in range(len(lengths)):
        own = values.clone()
        own[:, :, ends[spoilt] : ends[spoilt + 1]] = torch.nan
        out = packed.launch(query, keys, own, lengths, ends, scale=SCALE)
        finite = [bool(part.isfinite().all()) for part in out.split(lengths, dim=2)]
        assert finite == [i != spoilt for i in range(len(lengths))]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 80), (torch.bfloat16, 256)]
)
def test_flash_attention_4_computes_the_definition(
    dtype: torch.dtype, dim: int, softcap: float | None, device: torch.device
) -> None:
    """A prompt, a chunk of one, and a chunk whose past comes in parts; on another stream than the default."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    shape = Shape(batch=2, heads=2, group=4, head_dim=dim, dtype=dtype)
    query = shape.query(300).to(device)
    if not flash_attention_4.serves(query):
        pytest.skip("no kernels for this GPU")
    rows, sinks = torch.randn(2, 2, 700, 2, dim).to(device, dtype), torch.randn(8, device=device)
    k, v = rows[:, :, :, 0], rows[:, :, :, 1]
    expected, lse = definition(query, k, v, scale=SCALE, causal=True, softcap=softcap)
    how: dict[str, Any] = {"scale": SCALE, "softcap": softcap, "flash4": True}
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.inference_mode():
        torch.cuda._sleep(50_000_000)  # what another stream computes would be done by then
        again = query.clone()
        out, found = attend(again, k, v, causal=True, **how)
        own = (x[:, :, 400:] for x in (k, v))
        parts = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 150), (150, 400))]
        merged = continued(again, *own, iter(parts), sinks=sinks, **how)
        causal = causal_attention(again, k, v, sinks=sinks, **how)
    stream.synchronize()
    close(out, expected.to(dtype))
    close(found, lse, dtype)
    for each in (merged, causal):
        close(each, with_sinks(expected, lse, sinks).to(dtype))


def test_flash_attention_4_gets_enough_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not split keys, so that few queries over a long past go to torch."""
    monkeypatch.setattr(flash_attention_4, "nvidia", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dim, served in ((128, True), (256, True), (130, False), (264, False)):
        assert flash_attention_4.serves(torch.empty(1, 32, 4096, dim, dtype=torch.bfloat16), 1 << 17) == served
    assert not flash_attention_4.serves(torch.empty(1, 32, 4096, 128), 1 << 17), "float32"
    for tokens, keys, served in ((256, 1 << 17, True), (255, 1 << 17, False), (16, 4096, True), (16, 4097, False)):
        assert flash_attention_4.serves(torch.empty(1, 32, tokens, 128, dtype=torch.float16), keys) == served


@pytest.mark.gpu
def test_flash_attention_4_is_replayed(device: torch.device) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    shape = Shape(batch=1, heads=2, group=4, head_dim=128, dtype=torch.bfloat16)
    q, k, v = shape.query(130).to(device), shape.keys(130).to(device), shape.keys(130).to(device)
    if not flash_attention_4.serves(q):
        pytest.skip("no kernels for this GPU")
    causal_attention(q, k, v, scale=SCALE, flash4=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = causal_attention(q, k, v, scale=SCALE, flash4=True)
    out.fill_(torch.nan)
    for each in (q, k, v):
        each.normal_()
    graph.replay()
    close(out, definition(q, k, v, scale=SCALE, causal=True)[0].bfloat16())


def test_plans_are_made_for_few_lengths() -> None:
    """A scheduler's chunks, of any group of query heads, over runs of earlier keys; of a prompt's own length if it is long."""
    plan, chunks = dense.worth_a_plan, (512, 1024, 2048, 4096)
    assert all(plan(group * chunk, dense.BLOCK) for group in (1, 4, 7) for chunk in (512, 4096, dense.BLOCK))
    assert plan(131073, 131073)
    assert not any(plan(n, n) for n in (100, 2000, 13457))
    depths = range(0, 131073, 512)
    lengths = {(chunk, n) for chunk in chunks for depth in depths for n in dense.runs(depth, dense.LONG) if plan(4 * chunk, n)}
    assert len(lengths) == 11 * len(chunks)


@pytest.mark.parametrize("most", [32, 4096, dense.BLOCK, dense.LONG])
@pytest.mark.parametrize("keys", [0, 1, 2047, 2048, 5000, 65535, 131072, 200000])
def test_runs(keys: int, most: int) -> None:
    found = dense.runs(keys, most)
    assert sum(found) == keys
    assert found == sorted(found, reverse=True)
    assert len([n for n in found if n < most]) <= 5
    assert all(0 < n <= most and (n == most or n % dense.BLOCK == 0 or n < 2048 or n.bit_count() == 1) for n in found)


@pytest.mark.parametrize(("steps", "n"), [(4, 9), (9, 4), (9, 0)])
def test_flash_attention_4_attends_to_fewer_earlier_keys_than_queries(
    steps: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There warming up makes no plans for torch's attention. Nothing empty reaches it, and no query that sees no key."""
    met = list[bool]()

    def counted(*given: torch.Tensor, causal: bool, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        met.append(causal)
        return definition(*given, causal=causal, **how)

    monkeypatch.setattr(flash_attention_4, "serves", lambda query, keys=1: True)
    monkeypatch.setattr(flash_attention_4, "attend", counted)
    shape = Shape(batch=1, heads=2, group=2, head_dim=8, dtype=torch.float32)
    given = shape.query(steps), shape.keys(n), shape.keys(n)
    for causal in (False, True):
        out, lse = attend(*given, scale=SCALE, causal=causal, flash4=True)
        expected = definition(*given, scale=SCALE, causal=causal)
        close(out, expected[0])
        close(lse, expected[1])
    assert met == [False] * (n > 0) + [True] * (steps <= n)
