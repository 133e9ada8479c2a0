"""Modules with kernels compute what they compute without, in every architecture, and are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import kvthaw
from kvthaw.engine.hf import fused, projections, recognised
from kvthaw.kernels import gated, linear, rms_norm, rotate
from kvthaw.kernels.weights import Float8Weight, Int4Weight
from zoo import MODELS, build, prompt

KINDS = {
    "llama": {"_norm": 5, "_mlp": 2, "forward": 2, "_layer": 2, "product": 15},
    "gemma3": {"_norm": 25, "_mlp": 4, "forward": 4, "_layer": 0, "product": 29},
    "gpt_oss": {"_norm": 9, "_mlp": 0, "_layer": 0},
    "gpt2": {"product": 1, "_norm": 0},
}
"""Modules of some models that have kernels, by their forward."""


def modules(model: PreTrainedModel) -> list[tuple[Module, Callable[..., Any]]]:
    return [(module, forward) for ref, forward in fused.find(model) if (module := ref()) is not None]


def logits(model: PreTrainedModel) -> Tensor:
    out: Tensor = model(prompt(1, 30).to(model.device)).logits
    return out


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in MODELS])
def test_definitions_give_the_same_logits(name: str) -> None:
    model = build(name)
    plain, found = logits(model), modules(model)
    with fused.swapped(found):
        assert torch.equal(logits(model), plain)
    assert not any("forward" in vars(module) for module in model.modules())
    for forward, count in KINDS.get(name, {}).items():
        assert sum(one.__name__ == forward for _, one in found) == count


def test_kernels_give_the_logits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched = list[str]()

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: (launched.append(name), launch(*args, **how))[1]

    model = build("qwen3").to(device)
    plain = logits(model)
    kernels = {"rms_norm": rms_norm.launch, "add_rms_norm": rms_norm.add_launch, "gated": gated.launch, "rotate": rotate.launch}
    for where in (fused, projections, recognised):
        for name, launch in kernels.items():
            monkeypatch.setattr(where, name, noted(name, launch), raising=False)
    with fused.swapped(modules(model)):
        assert torch.allclose(logits(model), plain, rtol=1e-4, atol=1e-4)
    assert [launched.count(name) for name in kernels] == [7, 2, 2, 2]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_weights_of_one_product_follow_each_other(name: str, device: torch.device) -> None:
    model = build(name).to(device)
    before, known = copy.deepcopy(model.state_dict()), list(map(id, model.parameters()))
    fused.find(model)
    for layer in model.model.layers:
        own = layer.self_attn
        groups = [[own.q_proj, own.k_proj, own.v_proj], [layer.mlp.gate_proj, layer.mlp.up_proj]]
        for group in groups:
            weight = projections.adjacent([one.weight for one in group])
            assert weight is not None
            assert torch.equal(weight, torch.cat([one.weight for one in group]))
        if own.q_proj.bias is not None:
            assert projections.adjacent([one.bias for one in groups[0]]) is not None
    assert list(map(id, model.parameters())) == known
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    places = [one.data_ptr() for one in model.parameters()]
    fused.find(model)
    assert [one.data_ptr() for one in model.parameters()] == places


def test_a_model_whose_weights_were_moved_is_saved_and_copied(tmp_path: Path) -> None:
    model = build("llama")
    plain = logits(model)
    fused.find(model)
    model.save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.05 * sum(one.nbytes for one in model.parameters())
    for twin in (AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(logits(twin), plain)


def test_a_copy_of_a_model_finds_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_on_gpu", lambda model: True)
    model = build("llama")
    with fused.fused(model):
        known = vars(model)["_kvthaw_modules"]
    twin = copy.deepcopy(model)
    for one in (twin, model):
        with fused.fused(one):
            assert "forward" in vars(one.model.norm)
        assert "forward" not in vars(one.model.norm)
    assert vars(model)["_kvthaw_modules"] is known


def test_weights_that_share_memory_stay_where_they_are() -> None:
    whole = torch.randn(24, 8)
    layers = [Linear(8, 8, bias=False) for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.weight.data = whole[8 * (2 - i) :][:8]  # in another order
    places = [layer.weight.data_ptr() for layer in layers]
    projections.place_together(layers)
    assert [layer.weight.data_ptr() for layer in layers] == places
    assert projections.adjacent([layer.weight for layer in layers]) is None
    assert projections.adjacent([layer.weight for layer in layers[::-1]]) is not None
    x = torch.randn(2, 8)
    found = projections.together(x, [one for layer in layers if (one := projections.Projection.of(layer, x)) is not None])
    assert [torch.equal(y, layer(x)) for y, layer in zip(found, layers, strict=True)] == [True] * 3


@torch.no_grad()
def steps(model: PreTrainedModel, ids: Tensor, count: int = 4) -> Tensor:
    """The logits of steps of one token behind a prompt."""
    cache, found = DynamicCache(config=model.config), list[Tensor]()
    last = model(ids, past_key_values=cache, logits_to_keep=1).logits
    for _ in range(count):
        last = model(last.argmax(-1), past_key_values=cache).logits
        found.append(last)
    return torch.cat(found, 1)


JOINED = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 0, "smollm3": 0}
"""Architectures whose layers join the launches of a step, and the layers whose q and k their product turns."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in JOINED else pytest.mark.slow) for name in MODELS])
def test_steps_of_one_token_give_the_same_logits(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By definitions on the CPU and by the kernels on a GPU, in prompts' forwards and steps, of one row and of two."""
    model, met = build(name).to(device), list[int]()

    def noted(x: Tensor, weights: Sequence[Tensor], *given: Any, **how: Any) -> list[Tensor]:
        met.append(len(weights))
        turns.append(how.get("turn") is not None)
        return linear.linear(x, weights, *given, **how)

    monkeypatch.setattr(projections, "linear", noted)
    turns = list[bool]()
    for rows in (1, 2):
        ids = prompt(rows, 30).to(device)
        plain = steps(model, ids)
        met.clear()
        turns.clear()
        with fused.swapped(modules(model)):
            found = steps(model, ids)
        if rows > 1:
            assert met == []
        elif name in JOINED:
            assert met == [1] + ([3, 1, 2, 1] * 2 + [1]) * 4  # the head after the prompt, then layers and the head
            assert sum(turns) == 4 * JOINED[name]
        assert torch.allclose(found, plain, rtol=1e-4, atol=1e-4)
        assert device.type != "cpu" or torch.equal(found, plain)
    assert not any("forward" in vars(module) for module in model.modules())


def test_biases_and_dtypes_are_those_of_the_modules(device: torch.device) -> None:
    model = build("llama", attention_bias=True, mlp_bias=True).to(device, torch.float64)
    ids = prompt(1, 30).to(device)
    plain = steps(model, ids)
    with fused.swapped(modules(model)):
        assert torch.equal(steps(model, ids), plain)  # float64 has no kernels
    model.float()
    plain = steps(model, ids)
    with fused.swapped(modules(model)):
        assert torch.allclose(steps(model, ids), plain, rtol=1e-4, atol=1e-4)


def test_hooks_see_what_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose input or output somebody reads computes by itself."""
    model, ids = build("llama"), prompt(1, 30)

    def seen(model: PreTrainedModel) -> list[Tensor]:
        found = list[Tensor]()
        handles = []
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.mlp, layer.input_layernorm, layer.self_attn.q_proj, layer.mlp.down_proj):
                handles.append(module.register_forward_hook(lambda module, given, out: found.append(_first(out))))
            handles.append(layer.mlp.register_forward_pre_hook(lambda module, given: found.append(given[0])))
        steps(model, ids, 1)
        for handle in handles:
            handle.remove()
        return found

    plain = seen(model)
    with fused.swapped(modules(model)):
        found = seen(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    ("of", "alone"),
    [("self_attn", 6), ("mlp", 6), ("self_attn.q_proj", 5), ("mlp.down_proj", 6), ("input_layernorm", 6)],
)
def test_one_hook_is_enough(of: str, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, found = build("llama"), prompt(1, 30), list[Tensor]()
    hooked = model.model.layers[1].get_submodule(of)
    hooked.register_forward_hook(lambda module, given, out: found.append(_first(out)))
    plain = steps(model, ids)
    expected, count = list(found), list[int]()
    found.clear()
    monkeypatch.setattr(projections, "linear", lambda *given, **how: (count.append(1), linear.linear(*given, **how))[1])
    with fused.swapped(modules(model)):
        assert torch.equal(steps(model, ids), plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(count) == 1 + 4 * (4 + alone + 1)  # of the other layer, of this one, and of the head


def by_torchao(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    """The model with weights that torchao quantised to 8 bits."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig(set_inductor_config=False, **config))
    return model


@pytest.mark.parametrize("single", [False, True])
def test_weights_of_torchao_are_read_as_they_are(single: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of one token, by definitions on the CPU and by the kernels on a GPU."""
    model, met = build("llama").to(device, torch.bfloat16), list[tuple[type, int]]()
    granularity = pytest.importorskip("torchao.quantization").PerTensor() if single else None
    model = by_torchao(model, granularity=granularity)

    def noted(x: Tensor, weights: Sequence[Any], *given: Any, **how: Any) -> list[Tensor]:
        met.append((type(weights[0]), len(weights)))
        return linear.linear(x, weights, *given, **how)

    monkeypatch.setattr(projections, "linear", noted)
    ids = prompt(1, 30).to(device)
    plain = steps(model, ids)
    with fused.swapped(modules(model)):
        found = steps(model, ids)
    assert met == [(Float8Weight, count) for count in [1] + ([3, 1, 2, 1] * 2 + [1]) * 4]
    assert float((found - plain).norm() / plain.norm()) < 2e-2


def test_weights_of_several_kinds_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, met = build("llama").bfloat16(), list[int]()
    by_torchao(model.model.layers[0].self_attn.q_proj)
    by_torchao(model.model.layers[1].mlp.up_proj)
    monkeypatch.setattr(
        projections, "linear", lambda *given, **how: (met.append(len(given[1])), linear.linear(*given, **how))[1]
    )
    ids = prompt(1, 30)
    plain = steps(model, ids, 1)
    with fused.swapped(modules(model)):
        assert torch.allclose(steps(model, ids, 1), plain, rtol=3e-2, atol=3e-2)
    assert met == [1] + [1, 1, 1, 1, 2, 1] + [1] * 7 + [1]  # a gate of the first layer's two


def tiled(rows: int, width: int, device: torch.device | str = "cpu", group: int = 64, **other: Any) -> Linear:
    """A layer with a weight of torchao's tiles of 4-bit numbers, which torchao itself makes and multiplies on GPUs alone."""
    kind = pytest.importorskip("torchao.quantization").Int4TilePackedTo4dTensor
    high, wide = -(-rows // 8), -(-width // 1024) * 1024
    codes = torch.randint(-(1 << 31), 1 << 31, (high, wide // 128, 32, 4), dtype=torch.int32, device=device)
    scales = (torch.rand(wide // group, 8 * high, 2, device=device) * width**-0.5).bfloat16()
    layer = Linear(width, rows, bias=False, device="meta")
    layer.weight = Parameter(kind(codes, scales, [1, group], torch.Size((rows, width)), **other), requires_grad=False)
    return layer


def test_tiles_of_torchao_are_read_as_they_are(device: torch.device) -> None:
    layer, x = tiled(40, 1088, device), torch.randn(1, 1, 1088, device=device, dtype=torch.bfloat16)
    found = projections.Projection.of(layer, x)
    assert found is not None
    assert isinstance(found.weight, Int4Weight)
    assert found.weight.codes is layer.weight.qdata
    expected = x.double() @ found.weight.dense(torch.float64).T
    assert torch.allclose(projections.product(layer, x).double(), expected, rtol=3e-2, atol=3e-2)
    assert projections.Projection.of(layer, x.float()) is None


def test_weights_that_torchao_lays_out_otherwise_are_left_to_it() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    x, kind = torch.randn(1, 128).bfloat16(), quantization.Float8Tensor
    weight = torch.randn(32, 128).bfloat16()

    def read(weight: Tensor) -> Any:
        layer = Linear(weight.shape[1], len(weight), bias=False, device="meta")
        layer.weight = Parameter(weight, requires_grad=False)
        return projections.Projection.of(layer, x)

    eight = kind.from_hp(weight)
    assert read(eight) is not None
    assert read(kind.from_hp(weight, granularity=quantization.PerGroup(32))) is None
    assert read(kind.from_hp(weight, float8_dtype=torch.float8_e5m2)) is None
    activations = object()
    assert read(kind(eight.qdata, eight.scale, eight.block_size, act_quant_kwargs=activations, dtype=torch.bfloat16)) is None
    assert read(kind(eight.qdata.T.contiguous().T, eight.scale, eight.block_size, dtype=torch.bfloat16)) is None
    assert projections.Projection.of(tiled(16, 128, act_pre_scale=torch.ones(128)), x) is None
    whole = tiled(16, 128).weight
    parts = whole.qdata, whole.scale_and_zero
    assert read(type(whole)(parts[0][:1], parts[1], [1, 64], torch.Size((16, 128)))) is None
    assert read(type(whole)(*parts, [1, 128], torch.Size((16, 128)))) is None
    assert read(type(whole)(*parts, [1, 64], torch.Size((16, 128)))) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int4", "int4-32"])
@pytest.mark.parametrize(("width", "rows"), [(4096, 6144), (14336, 4096), (1536, 264), (8192, 1280)])
def test_gpu_products_of_torchao(kind: str, width: int, rows: int, device: torch.device) -> None:
    """Against torchao's own, eagerly and in a graph that is replayed with new tokens."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = Linear(width, rows, bias=True, device=device, dtype=torch.bfloat16).requires_grad_(False)
    how = {"group_size": 32 if kind == "int4-32" else 128, "int4_packing_format": "tile_packed_to_4d"} if "int4" in kind else {}
    config = quantization.Int4WeightOnlyConfig if how else quantization.Float8WeightOnlyConfig
    quantization.quantize_(layer, config(set_inductor_config=False, **how))
    x = torch.randn(1, 1, width, device=device, dtype=torch.bfloat16)
    projection = projections.Projection.of(layer, x)
    assert projection is not None
    assert isinstance(projection.weight, Int4Weight if how else Float8Weight)
    projections.product(layer, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = projections.product(layer, x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = layer(x).double()
        assert torch.equal(captured, projections.product(layer, x))
        assert float((captured.double() - expected).norm() / expected.norm()) < 1e-2


def _first(out: Any) -> Tensor:
    first: Tensor = (out[0] if isinstance(out, tuple) else out).clone()
    return first


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_modules_take_their_input_by_its_name(name: str) -> None:
    model, x = build(name), torch.randn(1, 3, 64)
    layer = model.model.layers[0]
    named = (
        ("hidden_states" if name == "llama" else "x", layer.input_layernorm),
        ("x", layer.mlp),
        ("input", layer.mlp.gate_proj),
    )
    expected = [module(**{of: x}) for of, module in named]
    with fused.swapped(modules(model)):
        assert all(torch.equal(module(**{of: x}), right) for (of, module), right in zip(named, expected, strict=True))


def test_what_has_a_forward_of_its_own_keeps_it() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = own = torch.zeros_like
    with fused.swapped(modules(model)):
        assert vars(norm)["forward"] is own
    assert vars(norm)["forward"] is own


def test_gradients_go_through_the_modules_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").requires_grad_()
    for where, name in ((fused, "rms_norm"), (fused, "gated"), (recognised, "rotate"), (projections, "linear")):
        monkeypatch.setattr(where, name, None)
    with fused.swapped(modules(model)):
        logits(model).sum().backward()
    assert model.model.norm.weight.grad is not None


def test_other_activations_are_left_alone() -> None:
    assert not [one for _, one in modules(build("llama", hidden_act="gelu")) if one is fused._mlp]


def test_a_batch_and_an_attached_model_compute_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here as if the model were on one."""
    monkeypatch.setattr(fused, "_on_gpu", lambda model: True)
    model, seen = build("llama"), set[int]()
    model.model.norm.register_forward_hook(lambda module, given, out: seen.add("forward" in vars(module)))
    ids = prompt(1, 30)
    batch = kvthaw.Batch(model, "full", max_seqs=1, capacity=64)
    request = batch.join(ids[0], max_new_tokens=4, stop=())
    while not request.finished:
        batch.step()
    assert seen == {True}
    with kvthaw.attach(model, "full"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
        copied = copy.deepcopy(model)
    assert seen == {True}
    assert "forward" not in vars(copied.model.norm)
    logits(model)
    assert seen == {True, False}
