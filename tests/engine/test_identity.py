"""Keys and values are taken for those of another model, or of the same under other adapters, only where they are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import kvthaw
from kvthaw import Cache, CacheError
from kvthaw.engine.graph_runner import StaticGraphs
from kvthaw.engine.hf.dry_run import weight_bytes
from kvthaw.engine.hf.identity import identity
from kvthaw.evaluate.machine import fingerprint
from stand_in import StandIn, captured_by
from zoo import build, prompt

IDS = prompt(1, 300)


class Lora(nn.Module):
    """A linear layer with adapters, as PEFT's."""

    def __init__(self, linear: nn.Linear, names: tuple[str, ...], seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)

        def random(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False)
            made.weight = nn.Parameter(torch.randn(rows, columns, generator=rng) / 4, requires_grad=False)
            return made

        self.base_layer = linear
        self.lora_A = nn.ModuleDict({name: random(4, linear.in_features) for name in names})
        self.lora_B = nn.ModuleDict({name: random(linear.out_features, 4) for name in names})
        self.scaling = dict.fromkeys(names, 1.0)
        self._disable_adapters, self._active_adapter = False, list(names[:1])

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in [] if self._disable_adapters else self._active_adapter:
            out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


class Quantised(nn.Module):
    """A linear layer whose weights lie in buffers, as those of GPTQ and AWQ."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales).T


def adapted(*names: str, base: PreTrainedModel | None = None) -> PreTrainedModel:
    model = base or build("llama")
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name), names, number))
    return model


def switch(model: PreTrainedModel, *names: str, scale: float = 1.0, off: bool = False) -> None:
    for module in model.modules():
        if isinstance(module, Lora):
            module._active_adapter, module._disable_adapters = list(names), off
            module.scaling = dict.fromkeys(module.scaling, scale)


def quantised(*, tuned: bool) -> PreTrainedModel:
    model = build("llama")
    for layer in model.model.layers:
        if tuned:
            layer.mlp.up_proj.weight.data += torch.randn(96, 64, generator=torch.Generator().manual_seed(7)) / 4
        layer.mlp.up_proj = Quantised(layer.mlp.up_proj)
    return model


def text(model: PreTrainedModel, prefix: kvthaw.PrefixCache | None = None, **given: Any) -> tuple[list[int], int]:
    with kvthaw.attach(model, "full", block_size=32, prefix_cache=prefix) as handle, torch.no_grad():
        out = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, **given)[0, 300:].tolist()
        return out, handle.stats().cached_tokens


def other_weights(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, Lora):
            module.lora_B["a"].weight.copy_(module.lora_B["b"].weight)


def other_angles(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 4


CHANGES: dict[str, Any] = {
    "another adapter": lambda model: switch(model, "b"),
    "both": lambda model: switch(model, "a", "b"),
    "none": lambda model: switch(model, "a", off=True),
    "scale": lambda model: switch(model, "a", scale=2.0),
    "another of its name": other_weights,
    "angles": other_angles,
}


@pytest.mark.parametrize("change", ["another adapter", "both", "none", "scale"])
def test_captured_steps_are_captured_again_for_other_adapters(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph computes with the adapters that were active as it was captured."""
    captured_by(monkeypatch, StandIn)
    model = adapted("a", "b")
    batch = kvthaw.Batch(model, "oracle", max_seqs=2, capacity=400, budget=64)
    runner = batch.cache.replay = StaticGraphs(model.forward, batch.cache)

    def captures() -> int:
        """After the steps of a request."""
        request = batch.join(prompt(1, 30)[0], max_new_tokens=8, stop=())
        while not request.finished:
            batch.step()
        return runner.captures

    assert [captures(), captures()] == [1, 1]
    CHANGES[change](model)
    assert [captures(), captures()] == [2, 2]


@pytest.mark.gpu
def test_a_captured_batch_computes_with_the_adapters_of_now() -> None:
    model = adapted("a", "b").to("cuda")

    def answers(batch: kvthaw.Batch, names: str) -> list[list[int]]:
        """Each with one adapter more than once, so that prompts and steps are captured with it."""
        found = []
        for name in names:
            switch(model, name)
            request = batch.join(prompt(1, 150)[0], max_new_tokens=12, stop=())
            while not request.finished:
                batch.step()
            found.append(list(request.tokens))
        return found

    with torch.no_grad():
        sizes: dict[str, Any] = {"max_seqs": 2, "capacity": 400, "budget": 64}
        eager = answers(kvthaw.Batch(model, "full", capture=False, **sizes), "ab")
        assert eager[0] != eager[1]
        assert answers(kvthaw.Batch(model, "full", **sizes), "aaabbba") == [eager[0]] * 3 + [eager[1]] * 3 + [eager[0]]


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_the_model_computes_otherwise_shares_nothing(change: str) -> None:
    model, prefix = adapted("a", "b"), kvthaw.PrefixCache()
    first = text(model)[0]
    assert text(model, prefix) == (first, 0)
    assert text(model, prefix) == (first, 172)
    CHANGES[change](model)
    second = text(model)[0]
    assert second != first
    assert text(model, prefix) == (second, 0)
    assert text(model, prefix) == (second, 172)


def test_adapters_switched_back_find_their_own() -> None:
    model, prefix = adapted("a", "b"), kvthaw.PrefixCache()
    first = text(model, prefix)[0]
    switch(model, "b")
    text(model, prefix)
    switch(model, "a")
    assert text(model, prefix) == (first, 172)


def test_a_running_batch_shares_nothing_among_adapters() -> None:
    model, prefix = adapted("a", "b"), kvthaw.PrefixCache()
    batch = kvthaw.Batch(model, "full", max_seqs=1, capacity=400, prefix_cache=prefix, block_size=32)
    cached = []
    for name in ("a", "b", "a"):
        switch(model, name)
        request = batch.join(IDS[0], max_new_tokens=2)
        while batch.requests:
            batch.step()
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 172]


def test_positions_of_ones_own_are_not_those_of_others() -> None:
    model = build("llama")
    apart = (torch.arange(300) + 100 * (torch.arange(300) >= 40))[None]
    plain, own = text(model)[0], text(model, position_ids=apart)[0]
    prefix = kvthaw.PrefixCache()
    assert plain != own == text(model, prefix, position_ids=apart)[0]
    assert text(model, prefix) == (plain, 0)
    assert text(model, prefix, position_ids=apart) == (own, 0)
    assert text(model, prefix, position_ids=torch.arange(300)[None]) == (plain, 172)


def test_autocast_shares_nothing_with_other_calls() -> None:
    model, prefix = build("llama"), kvthaw.PrefixCache()
    for _ in range(2):
        plain = text(model, prefix)
        with torch.autocast("cpu", torch.bfloat16):
            low = text(model, prefix)
    assert (plain[1], low[1]) == (172, 172)
    assert plain[0] == text(model)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert low[0] == text(model)[0]


def saved(model: PreTrainedModel, path: Path) -> Path:
    with torch.no_grad():
        cache = Cache(model, "full")
        model(input_ids=IDS[:, :60], past_key_values=cache)
        cache.save(path, IDS[:, :60])
    return path


def test_a_saved_cache_is_of_its_adapters(tmp_path: Path) -> None:
    model = adapted("a", "b")
    path = saved(model, tmp_path / "a")
    Cache.load(path, model, "full")
    for change, now in (("another adapter", r"b x 1\.0"), ("none", "none"), ("scale", r"a x 2\.0")):
        CHANGES[change](model)
        with pytest.raises(CacheError, match=rf"another model: adapters is a x 1\.0 .*, not {now}"):
            Cache.load(path, model, "full")
        switch(model, "a")
    other_weights(model)
    with pytest.raises(CacheError, match=r"another model: its weights of model\.layers\.0 differ"):
        Cache.load(path, model, "full")


def resized(model: PreTrainedModel, tokens: int) -> None:
    model.resize_token_embeddings(tokens, mean_resizing=False)


def changed(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def head_of(model: PreTrainedModel, tokens: int) -> None:
    model.set_output_embeddings(nn.Linear(64, tokens, bias=False))


def row_of(model: PreTrainedModel, token: int) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[token] += 1


USED, UNUSED = int(IDS[0, 0]), next(token for token in range(199) if token not in IDS[0, :60])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: resized(model, 260),
        lambda model: head_of(model, 300),
        lambda model: changed(model.get_output_embeddings().weight),
        lambda model: row_of(model, UNUSED),
    ],
    ids=["more tokens", "another head", "other weights of the head", "a token that the text has not"],
)
def test_weights_that_change_no_key_of_the_text_are_no_reason(tmp_path: Path, llama: PreTrainedModel, change: Any) -> None:
    path, other = saved(llama, tmp_path / "doc"), copy.deepcopy(llama)
    change(other)
    assert Cache.load(path, other, "full").get_seq_length() == 60


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: changed(model.model.layers[-1].mlp.down_proj.weight), r"its weights of model\.layers\.2 differ"),
        (lambda model: changed(model.model.norm.weight), r"its weights of model\.norm\.weight differ"),
        (lambda model: row_of(model, USED), "it embeds tokens of the text otherwise"),
        (lambda model: resized(model, 100), r"the text has token 1\d\d, and its vocabulary ends at 100"),
    ],
    ids=["the last MLP", "the last norm", "a token of the text", "fewer tokens"],
)
def test_weights_that_differ_are_named(tmp_path: Path, change: Any, said: str) -> None:
    model = build("llama", num_hidden_layers=3)
    path, other = saved(model, tmp_path / "doc"), copy.deepcopy(model)
    change(other)
    with pytest.raises(CacheError, match=f"another model: {said}"):
        Cache.load(path, other, "full")


@pytest.mark.parametrize(
    "change",
    [lambda model: changed(model.model.layers[0].mlp.down_proj.weight), lambda model: resized(model, 260)],
    ids=["in place", "resized"],
)
def test_a_prefix_cache_shares_nothing_with_weights_that_were_changed(change: Any) -> None:
    model, prefix = build("llama"), kvthaw.PrefixCache()
    text(model, prefix)
    change(model)
    assert text(model, prefix) == (text(model)[0], 0)
    assert text(model, prefix)[1] == 172


def test_adapters_that_are_not_active_change_nothing(tmp_path: Path) -> None:
    base, one, two = build("llama"), adapted("a"), adapted("a", "b")
    switch(one, "a", off=True)
    assert identity(base) == identity(one)
    assert fingerprint(base) == fingerprint(one)
    switch(one, "a")
    assert identity(base) != identity(one)
    assert fingerprint(base) != fingerprint(one)
    assert identity(two) == identity(copy.deepcopy(two))


def test_weights_in_buffers_tell_models_apart(tmp_path: Path) -> None:
    base, tuned = quantised(tuned=False), quantised(tuned=True)
    assert fingerprint(base) != fingerprint(tuned)
    with pytest.raises(CacheError, match=r"another model: its weights of model\.layers\.0 differ"):
        Cache.load(saved(base, tmp_path / "base"), tuned, "full")
    less = sum(layer.mlp.up_proj.qweight.numel() * 3 - 96 * 4 for layer in base.model.layers)
    assert weight_bytes(base) == weight_bytes(build("llama")) - less


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pad_token_id", 7),
        ("eos_token_id", [5, 6]),
        ("output_hidden_states", True),
        ("id2label", {0: "x"}),
        ("use_cache", False),
        ("return_dict", False),
        ("attention_dropout", 0.5),
        ("initializer_range", 1.0),
        ("max_position_embeddings", 4096),
        ("_name_or_path", "elsewhere"),
        ("architectures", ["X"]),
    ],
)
def test_settings_that_change_no_key_are_no_reason(tmp_path: Path, llama: PreTrainedModel, name: str, value: Any) -> None:
    path, other = saved(llama, tmp_path / "doc"), copy.deepcopy(llama)
    setattr(other.config, name, value)
    Cache.load(path, other, "full")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 0.1), ("rope_parameters", {"rope_theta": 77.0, "rope_type": "default"}), ("hidden_act", "gelu")],
)
def test_a_setting_that_differs_is_named(tmp_path: Path, llama: PreTrainedModel, name: str, value: Any) -> None:
    path, other = saved(llama, tmp_path / "doc"), copy.deepcopy(llama)
    setattr(other.config, name, value)
    with pytest.raises(CacheError, match=rf"another model: config\.{name} is .*, not "):
        Cache.load(path, other, "full")


def test_a_saved_cache_is_of_its_rotary_angles(tmp_path: Path, llama: PreTrainedModel) -> None:
    """Some scripts stretch them in the module, and leave the config as it is. Devices round them differently."""
    saved(llama, tmp_path / "doc")
    near, other = copy.deepcopy(llama), copy.deepcopy(llama)
    near.model.rotary_emb.inv_freq *= 1 + 2e-7
    assert Cache.load(tmp_path / "doc", near, "full").get_seq_length()
    other_angles(other)
    with pytest.raises(CacheError, match="angles"):
        Cache.load(tmp_path / "doc", other, "full")


def test_angles_that_follow_the_length_are_the_same_model(tmp_path: Path) -> None:
    model = build(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, max_position_embeddings=64
    )
    before = identity(model)
    with torch.no_grad():
        model(input_ids=IDS[:, :200])
    assert identity(model) == before
