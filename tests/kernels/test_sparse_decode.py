"""Attention over the visible places of a slab against its definition, and the definition against dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvthaw.kernels import dense
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep, TokenOrder
from kvthaw.kernels.flash_decode import definition
from kvthaw.kernels.merge import Partial, merge
from kvthaw.kernels.sparse_decode import sparse_decode
from shapes import Shape, close, over_shapes

SCALE = 0.2


def some(shape: Shape) -> torch.Tensor:
    """[B, H, N] bool: about half of the places, at least one a head."""
    visible = torch.rand(shape.batch, shape.heads, shape.tokens) < 0.5
    visible[:, :, 0] = True
    return visible


@over_shapes
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_definition_is_dense_attention_over_the_visible(shape: Shape, softcap: float | None) -> None:
    q, k, v, visible = shape.query(), shape.keys(), shape.keys(), some(shape)
    found = definition(
        DecodeStep(
            q,
            k.masked_fill(~visible[..., None], torch.nan),
            v.masked_fill(~visible[..., None], torch.nan),
            scale=SCALE,
            softcap=softcap,
        ),
        AnyOrder(visible),
    )
    for b in range(shape.batch):
        for h in range(shape.heads):
            group = slice(h * shape.group, (h + 1) * shape.group)
            seen = visible[b, h]
            out, lse = dense.definition(
                q[b : b + 1, group, None],
                k[b : b + 1, h : h + 1, seen],
                v[b : b + 1, h : h + 1, seen],
                scale=SCALE,
                causal=False,
                softcap=softcap,
            )
            close(found.out[b, group], out[0, :, 0])
            close(found.lse[b, group], lse[0, :, 0])


@over_shapes
@pytest.mark.parametrize("extras", ["", "softcap", "sinks", "weights", "partials", "softcap sinks weights partials"])
def test_sparse_decode(shape: Shape, extras: str) -> None:
    softcap, parts = (3.0 if "softcap" in extras else None), (2 if "partials" in extras else 0)
    sinks, weighed = "sinks" in extras, "weights" in extras
    q, k, v, visible = shape.query(), shape.keys(), shape.keys(), some(shape)
    log_weight = torch.randn(shape.batch, shape.q_heads, shape.tokens) if weighed else None
    if log_weight is not None:
        log_weight[:, :, ::3] = -torch.inf
        log_weight[:, :, 0] = 0
    logits = torch.randn(shape.q_heads) if sinks else None
    partials = [
        Partial(torch.randn(shape.batch, shape.q_heads, shape.head_dim), torch.randn(shape.batch, shape.q_heads))
        for _ in range(parts)
    ]
    step = DecodeStep(q, k, v, scale=SCALE, softcap=softcap, sinks=logits, log_weight=log_weight, partials=partials)
    found = sparse_decode(step, AnyOrder(visible))
    whole = definition(replace(step, sinks=None, partials=()), AnyOrder(visible))
    out, lse = merge([whole.out, *(p.out for p in partials)], [whole.lse, *(p.lse for p in partials)])
    expected = dense.with_sinks(out[:, :, None], lse[:, :, None], logits)[:, :, 0]
    assert found.dtype == shape.dtype
    close(found, expected)


def test_log_weight_is_a_weight_in_the_softmax() -> None:
    shape = Shape(batch=1, heads=1, group=2, tokens=5)
    q, k, v = shape.query(), shape.keys(), shape.keys()
    weight = torch.rand(1, 2, 5)
    found = definition(DecodeStep(q, k, v, scale=SCALE, log_weight=weight.log()), AnyOrder())
    mass = torch.exp(q[0] @ k[0, 0].T * SCALE) * weight[0]
    close(found.out[0], mass @ v[0, 0] / mass.sum(1, keepdim=True))
    close(found.lse[0], mass.sum(1).log())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_head_that_sees_nothing_gives_nothing(softcap: float | None) -> None:
    shape = Shape()
    q, k, v = shape.query(), shape.keys(), shape.keys()
    visible = torch.zeros(2, 2, 65, dtype=torch.bool)
    visible[1] = True
    step = DecodeStep(q, k, v, scale=SCALE, softcap=softcap)
    whole = definition(step, AnyOrder(visible))
    assert (whole.out[0] == 0).all()
    assert (whole.lse[0] == -torch.inf).all()
    assert (sparse_decode(step, AnyOrder(visible))[0] == 0).all()


def test_disjoint_places_merge_to_the_whole() -> None:
    shape = Shape()
    q, k, v = shape.query(), shape.keys(), shape.keys()
    every = torch.ones(2, 2, 65, dtype=torch.bool)
    part = torch.rand(2, 2, 65) < 0.3
    step = DecodeStep(q, k, v, scale=SCALE)
    rest = definition(step, AnyOrder(~part))
    close(sparse_decode(replace(step, partials=[rest]), AnyOrder(part)), definition(step, AnyOrder(every)).out)


@pytest.mark.parametrize("extras", ["", "softcap"])
@over_shapes
def test_newest_in_token_order(shape: Shape, extras: str, device: torch.device) -> None:
    """As the definition, in what it gives and in what it writes: sequences of their own lengths and padding."""
    lengths = torch.tensor([shape.tokens, max(1, shape.tokens // 2)][: shape.batch], dtype=torch.int32, device=device)
    starts = torch.tensor([0, max(0, shape.tokens // 2 - 5)][: shape.batch], dtype=torch.int32, device=device)
    q, k, v, new_k, new_v = (
        x.to(device) for x in (shape.query(), shape.keys(), shape.keys(), shape.keys(1)[:, :, 0], shape.keys(1)[:, :, 0])
    )
    ours, theirs = (k.clone(), v.clone()), (k, v)
    places, softcap = TokenOrder(lengths, (new_k, new_v), starts), 3.0 if extras else None
    mine, its = (DecodeStep(q, *kv, scale=SCALE, softcap=softcap) for kv in (ours, theirs))
    close(sparse_decode(mine, places), definition(its, places).out)
    for written, other in zip(ours, theirs, strict=True):
        assert torch.equal(written, other)


def test_full_sequences_without_padding_are_dense_attention() -> None:
    shape = Shape(tokens=20)
    q, k, v, newest = shape.query(), shape.keys(), shape.keys(), (shape.keys(1)[:, :, 0], shape.keys(1)[:, :, 0])
    lengths = torch.full((2,), 13, dtype=torch.int32)
    found = sparse_decode(DecodeStep(q, k, v, scale=SCALE), TokenOrder(lengths, newest, torch.zeros_like(lengths)))
    assert torch.equal(k[:, :, 12], newest[0])
    out, _ = dense.definition(q[:, :, None], k[:, :, :13], v[:, :, :13], scale=SCALE, causal=False)
    close(found, out[:, :, 0])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sequences_without_tokens_give_nothing(softcap: float | None, device: torch.device) -> None:
    shape = Shape(tokens=20)
    q, k, v = (x.to(device) for x in (shape.query(), shape.keys(), shape.keys()))
    none = torch.zeros(2, dtype=torch.int32, device=device)
    before = k.clone()
    newest = (shape.keys(1)[:, :, 0].to(device), shape.keys(1)[:, :, 0].to(device))
    step = DecodeStep(q, k, v, scale=SCALE, softcap=softcap)
    assert (sparse_decode(step, TokenOrder(none, newest, none)) == 0).all()
    assert torch.equal(k, before)


@pytest.mark.parametrize("starts", [None, (3, 0, 5, 0)])
def test_slots_outside_a_range_are_never_read(starts: tuple[int, ...] | None, device: torch.device) -> None:
    """They may hold an earlier sequence's keys and values, which need not be finite."""
    shape, ends, begins = Shape(tokens=20), (7, 13, 13, 0), starts or (0, 0, 0, 0)
    q, k, v = (torch.cat((x, x.flip(0))).to(device) for x in (shape.query(), shape.keys(), shape.keys()))
    newest = tuple(torch.cat((x, x.flip(0)))[:, :, 0].to(device) for x in (shape.keys(1), shape.keys(1)))
    finite = DecodeStep(q, k.clone(), v.clone(), scale=SCALE)
    for seq, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for held in (k, v):
            held[seq, :, :begin], held[seq, :, end:] = torch.nan, torch.nan
    lengths, first = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, begins))
    places = TokenOrder(lengths, newest, None if starts is None else first)
    found = sparse_decode(DecodeStep(q, k, v, scale=SCALE), places)
    close(found, definition(finite, places).out)
    assert (found[3] == 0).all()
