"""Bad input gets a clear error, and nothing is lost by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import kvthaw
from kvthaw import CacheError, ConfigError, HostMemoryError, UnsupportedModelError
from kvthaw.config import CacheConfig
from kvthaw.engine.hf.cache_argument import CACHE
from zoo import REFUSED, ROLLS_BACK_SLIDING, build, prompt, ragged

IDS = prompt(1, 60)


def forward(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def still_works(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor = IDS) -> None:
    """An empty cache takes a prompt as if nothing had happened."""
    assert cache.get_seq_length() == 0
    fresh = kvthaw.Cache(model, "oracle", budget=64)
    assert torch.equal(forward(model, cache, ids), forward(model, fresh, ids))
    assert torch.equal(forward(model, cache, ids[:, :1]), forward(model, fresh, ids[:, :1]))


# Settings


def test_unknown_method_names_the_nearest(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"'orakle'; did you mean 'oracle'.*There are: auto, full"):
        kvthaw.attach(llama, "orakle")
    assert llama.config._attn_implementation == "sdpa", "a refused attach leaves the model alone"
    with pytest.raises(ConfigError, match=r"method is 'zzz'; there are"):
        kvthaw.Cache(llama, "zzz")


def test_what_is_no_model_is_refused() -> None:
    for make in (kvthaw.attach, kvthaw.Cache):
        with pytest.raises(UnsupportedModelError, match="model is a str; it must be a model of transformers"):
            make("meta-llama/Llama-3.1-8B", "oracle")  # type: ignore[operator]


def test_settings_that_are_checked_are_handed_on(llama: PreTrainedModel) -> None:
    config = CacheConfig(budget=64, dense_layers=0)
    batch = kvthaw.Batch(llama, "quest", max_seqs=1, capacity=64, config=config)
    assert batch.cache.config is kvthaw.Cache(llama, "quest:sink=4", config=config).config is config
    with kvthaw.attach(llama, "quest", config=config) as handle:
        assert handle._forward.settings.budget == 64
    for make in (kvthaw.attach, kvthaw.Cache):
        with pytest.raises(ConfigError, match="method quest has no option 'config'"):
            make(llama, "quest", config={"budget": 64})  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"budget is 0\.5; a batch needs a number of tokens"):
        kvthaw.Batch(llama, "quest", max_seqs=1, capacity=64, config=CacheConfig(budget=0.5))


def test_unknown_option(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"method oracle has no option 'colour'; there are: policy"):
        kvthaw.Cache(llama, "oracle", colour=3)
    with pytest.raises(ConfigError, match=r"method streaming has no option 'p'; there are: sink"):
        kvthaw.Cache(llama, "streaming:p=1")
    with pytest.raises(ConfigError, match=r"policy is 'median'; it must be one of max, mean, mean_query"):
        kvthaw.Cache(llama, "oracle", policy="median")
    for name, options in (("auto", {"kvdtype": "fp8"}), ("auto:kvdtype=fp8", {})):
        with pytest.raises(ConfigError, match="method auto has no option 'kvdtype'; did you mean 'kv_dtype'"):
            kvthaw.attach(llama, name, **options)
    with pytest.raises(ConfigError, match=r"options \['policy'\]"):
        kvthaw.Cache(llama, kvthaw.METHODS["oracle"](), policy="max")


@pytest.mark.parametrize(("method", "least"), [("oracle", 16), ("streaming", 6)])
def test_budget_too_small_names_the_smallest(llama: PreTrainedModel, method: str, least: int) -> None:
    for budget in (least - 1, 0, -3):
        with pytest.raises(ConfigError, match=rf"budget is {budget}; the smallest .* {least} tokens"):
            kvthaw.Cache(llama, method, budget=budget)
    assert forward(llama, kvthaw.Cache(llama, method, budget=least), IDS).isfinite().all()


def test_fraction_too_small_names_the_smallest(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=0.01)
    with pytest.raises(ConfigError, match=r"budget is 1; the smallest .* 16 tokens"):
        forward(llama, cache, IDS)
    cache = kvthaw.Cache(llama, "oracle", budget=0.5)
    assert forward(llama, cache, IDS).isfinite().all()
    assert cache.stats().budget == 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 64, "retrieved": 10}, "budget is 64?.*retrieved is 10|retrieved is 10.*budget is 64|give one of them"),
        ({"budget": 1.5}, "budget is 1.5; a fraction of the length must lie between 0 and 1"),
        ({"budget": "256"}, "budget is '256'; it must be a number or None"),
        ({"budget": True}, "budget is True; it must be a number"),
        ({"retrieved": "8"}, "retrieved is '8'; it must be a number or None"),
        ({"dense_layers": 1.5}, "dense_layers is 1.5; it must be a whole number"),
        ({"seed": "x"}, "seed is 'x'; it must be a whole number"),
        ({"retrieved": 0}, "retrieved is 0; it must be at least 1"),
        ({"dense_layers": -1}, "dense_layers is -1; it must be at least 0"),
        ({"dense_layers": 99}, "dense_layers is 99; that leaves no layer to oracle, of 2"),
        ({"sparse_queries": 0}, "sparse_queries is 0; it must be at least 1"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range(llama: PreTrainedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kvthaw.Cache(llama, "oracle", **settings)
    with pytest.raises(ConfigError, match=message):
        kvthaw.attach(llama, "oracle", **settings)
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        llama.generate(IDS, max_new_tokens=2, do_sample=False)
        assert handle.stats().budget == 64


@pytest.mark.parametrize("chunk", [1.5, "5", True, 0])
def test_chunks_are_whole_numbers(llama: PreTrainedModel, chunk: Any) -> None:
    with pytest.raises(ConfigError, match=r"prefill_chunk is .*; it must be (a whole number|at least 1)"):
        kvthaw.attach(llama, prefill_chunk=chunk)
    with pytest.raises(ConfigError, match=r"prefill_chunk is .*; it must be (a whole number|at least 1)"):
        kvthaw.Batch(llama, max_seqs=1, capacity=9, prefill_chunk=chunk)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("method", "message"),
    [(None, "method is None; it must be a name in METHODS or a Method"), (5, "method is 5; it must be a name"),
     (kvthaw.METHODS["oracle"], r"it must be a name in METHODS or a Method; call it, oracle\(\)")],
    ids=["None", "5", "function"],
)  # fmt: skip
def test_what_is_no_method(llama: PreTrainedModel, method: Any, message: str) -> None:
    for make in (kvthaw.attach, kvthaw.Cache):
        with pytest.raises(ConfigError, match=message):
            make(llama, method)


def test_a_method_has_regions() -> None:
    for regions in ({}, {"regions": None}, {"regions": (4, 32, 16)}):
        with pytest.raises(ConfigError, match=r"regions is .*Regions\(sink, window, buffer\)"):
            kvthaw.Method("mine", paper="-", unit="token", index=None, **regions)


def test_seeds_of_63_bits(llama: PreTrainedModel) -> None:
    for seed, message in ((-1, "at least 0"), (2**63, r"less than 2\^63")):
        with pytest.raises(ConfigError, match=rf"seed is {seed}; it must be {message}"):
            kvthaw.attach(llama, "pariskv", seed=seed)


@pytest.mark.parametrize("method", ["retroinfer", "omnikv"])
def test_attention_of_its_own_knows_no_softcap(method: str) -> None:
    model = build("gemma2")
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=rf"{method} attends to some tokens itself, without the softcap of 5.0"):
        kvthaw.attach(model, method)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("method", kvthaw.METHODS)
def test_double_precision_and_the_largest_seed_are_served(llama: PreTrainedModel, method: str) -> None:
    llama.double()
    with kvthaw.attach(llama, method, budget=32, seed=2**63 - 1):
        assert llama.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 63)


def test_retrieved_wants_a_method_that_retrieves(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"retrieved is 5"):
        kvthaw.Cache(llama, "streaming", retrieved=5)


# Models


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "gptj" or CACHE != "cache"])
def test_refused_models(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    reason = {"deepseek_v2": "latent attention", "deepseek_v3": "latent attention", "mamba": "no full-attention layer"}
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} .*{reason.get(name, 'AttentionInterface')}"):
        kvthaw.attach(model, "oracle")
    assert model.config._attn_implementation == before
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 62)


def test_encoders_are_refused() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(UnsupportedModelError, match=r"BertModel is an encoder, whose tokens attend both ways"):
        kvthaw.attach(BertModel(BertConfig(**sizes)), "oracle")
    assert kvthaw.Cache(BertLMHeadModel(BertConfig(**sizes, is_decoder=True)), "oracle").get_seq_length() == 0


def test_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration is an encoder-decoder"):
        kvthaw.attach(T5ForConditionalGeneration(config), "oracle")


@pytest.mark.parametrize(
    ("prefix", "own"),
    [
        ("DiffLlama", {"num_key_value_heads": 2}),
        ("JetMoe", {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 2}),
    ],
)
def test_models_that_change_keys_after_caching_are_refused(prefix: str, own: dict[str, Any]) -> None:
    import transformers

    settings = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = getattr(transformers, prefix + "Config")(
        **settings, num_attention_heads=4, pad_token_id=0, bos_token_id=None, eos_token_id=None, **own
    )
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    with kvthaw.attach(model, "oracle", budget=64), pytest.raises(UnsupportedModelError, match=r"changes .* after caching"):
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 62)


# Prompts


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_prompt_longer_than_the_positions(name: str) -> None:
    if name.startswith("gemma") and not ROLLS_BACK_SLIDING:
        pytest.skip("this version of transformers fails to roll back its own sliding-window layers")
    model = build(name)
    cache = kvthaw.Cache(model, "oracle", budget=64)
    with pytest.raises((ConfigError, IndexError), match=r"the prompt has 600 tokens; the model's positions end at 512|index"):
        forward(model, cache, prompt(1, 600))
    still_works(model, cache)
    with pytest.raises((ConfigError, IndexError), match=r"the prompt has 561 tokens; the model's positions end at 512|index"):
        forward(model, cache, prompt(1, 500))
    if name == "gemma3":  # transformers' own layers come first there and have taken the prompt in
        with pytest.raises(CacheError, match=r"layer 0 holds 562 tokens and layer 1 61: .*reset"):
            forward(model, cache, IDS[:, :1])
        cache.reset()
        still_works(model, cache)
    else:
        assert cache.get_seq_length() == 61
        assert forward(model, cache, IDS[:, :1]).isfinite().all()


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_host_memory_that_will_not_fit(name: str, dense_layers: int) -> None:
    if name.startswith("gemma") and not ROLLS_BACK_SLIDING:
        pytest.skip("this version of transformers fails to roll back its own sliding-window layers")
    model = build(name)
    cache = kvthaw.Cache(model, "oracle", budget=64, host_bytes=1, dense_layers=dense_layers, block_size=20)
    layers = len(cache.kv.offloaded)
    need = 2 * 60 * 2 * 16 * 4 * layers
    with pytest.raises(HostMemoryError, match=rf"{need:,} bytes.* 1 are free"):
        forward(model, cache, IDS)
    for layer in cache.layers:
        assert layer.get_seq_length() == 0
    assert cache.stats().kv_host_bytes == cache.stats().kv_device_bytes == cache.stats().kv_dense_bytes == 0
    with pytest.raises(HostMemoryError):
        forward(model, cache, IDS)

    room = kvthaw.Cache(model, "oracle", budget=64, host_bytes=need, dense_layers=dense_layers, block_size=20)
    assert forward(model, room, IDS).isfinite().all()
    if name == "llama":
        with pytest.raises(HostMemoryError, match=rf"{need:,} bytes.* 0 are free"):
            forward(model, room, IDS)
        assert room.get_seq_length() == 60
        assert forward(model, room, IDS[:, :1]).isfinite().all()
    with kvthaw.attach(model, "oracle", budget=64, host_bytes=1, dense_layers=dense_layers):
        for _ in range(2):
            with pytest.raises(HostMemoryError):
                model.generate(IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("method", "where"),
    [(method, ("k_proj", "v_proj")[turn % 2]) for turn, method in enumerate(kvthaw.METHODS) if method != "full"],
)
def test_nan_in_keys_or_values(llama: PreTrainedModel, method: str, where: str) -> None:
    good = {name: value.clone() for name, value in llama.state_dict().items()}
    with torch.no_grad():
        getattr(llama.model.layers[1].self_attn, where).weight[3, 5] = torch.nan
    cache = kvthaw.Cache(llama, method, budget=64)
    with pytest.raises(CacheError, match=r"not finite in layer 1"):
        llama.generate(IDS, past_key_values=cache, max_new_tokens=3, do_sample=False)
    for _ in range(2):
        with pytest.raises(CacheError, match=r"not finite in layer 1"):
            cache.wait()
    llama.load_state_dict(good)
    cache.reset()
    assert llama.generate(IDS, past_key_values=cache, max_new_tokens=3, do_sample=False).shape == (1, 63)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 1, 1, 1, 0, 0], "on the left only"),
        ([0, 1, 0, 1, 1, 1], "on the left only"),
        ([1, 1, 1], "covers 3 tokens"),
    ],
)
def test_masks_with_right_padding_or_holes(llama: PreTrainedModel, mask: list[int], message: str) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    with pytest.raises(CacheError, match=message):
        forward(llama, cache, IDS[:, :6], torch.tensor([mask]))
    still_works(llama, cache)


def test_a_mask_of_every_query(llama: PreTrainedModel) -> None:
    """Taken with a first prompt, whatever it lets tokens see, as long as the last one sees all; later only if it is causal."""
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    both_ways = causal.clone()
    both_ways[..., 1:4, 1:4] = True
    for mask in (causal, both_ways):
        expected = forward(llama, DynamicCache(config=llama.config), IDS[:, :6], mask)
        torch.testing.assert_close(forward(llama, cache, IDS[:, :6], mask), expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(CacheError, match=r"every query's own.*with the first prompt"):
            forward(llama, cache, IDS[:, :6], torch.cat((causal | True, both_ways), dim=3))
        expected = forward(llama, cache, IDS[:, :6], torch.cat((causal | True, causal), dim=3))
        cache.crop(-6)
        torch.testing.assert_close(expected, forward(llama, cache, IDS[:, :6]), atol=1e-4, rtol=1e-4)
        cache.reset()
    with pytest.raises(CacheError, match=r"attention_mask is torch.float32 of shape \[1, 1, 6, 6\].*2-D.*or of 0 and -inf"):
        forward(llama, cache, IDS[:, :6], torch.full((1, 1, 6, 6), -1.0))
    with pytest.raises(CacheError, match=r"on the left only"):
        forward(llama, cache, IDS[:, :6], both_ways.transpose(2, 3))
    still_works(llama, cache)


@pytest.mark.parametrize(
    ("name", "attached", "method"),
    [("llama", True, "oracle"), ("llama", False, "full"), ("gemma3", False, "oracle"), ("gemma3", True, "full")],
)
def test_masks_of_a_step(name: str, attached: bool, method: str) -> None:
    model = build(name)
    batch = ragged([60, 40])
    cache = kvthaw.Cache(model, method, budget=512)
    handle = kvthaw.attach(model, method) if attached else None
    forward(model, cache, batch["input_ids"], batch["attention_mask"])
    good = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
    hole, more, less = good.clone(), good.clone(), good.clone()
    hole[1, 30] = 0
    more[1, 20] = 0
    less[1, 19] = 1
    cases = {
        "on the left only": hole,
        "hides 21 tokens of row 1; the cache knows 20": more,
        "hides 19 tokens of row 1; the cache knows 20": less,
        "covers 7 tokens; it must cover the 60 in the cache and 1 new": good[:, :7],
        "covers 62 tokens": torch.cat((good, good[:, -1:]), dim=1),
    }
    if name == "llama":
        cases["has 3 rows; the tokens have 2"] = good[[0, 1, 1]]
    twin = copy.deepcopy(cache)
    for message, mask in cases.items():
        with pytest.raises(CacheError, match=message):
            forward(model, copy.deepcopy(cache), prompt(2, 1), mask)
    assert torch.equal(forward(model, cache, prompt(2, 1), good), forward(model, twin, prompt(2, 1), None))
    if handle is not None:
        handle.detach()


def test_a_mask_of_other_rows(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    with pytest.raises(CacheError, match=r"attention_mask has 3 rows; the tokens have 2"):
        forward(llama, cache, prompt(2, 9), torch.ones(3, 9, dtype=torch.long))
    still_works(llama, cache)


def test_padding_that_changes(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    batch = ragged([60, 40])
    forward(llama, cache, batch["input_ids"], batch["attention_mask"])
    more = prompt(2, 20)
    mask = torch.cat((batch["attention_mask"], torch.ones_like(more)), dim=1)
    wrong = mask.clone()
    wrong[1, 20] = 0
    with pytest.raises(CacheError, match=r"hides 21 tokens of row 1; the cache knows 20"):
        forward(llama, cache, more, wrong)
    twin = kvthaw.Cache(llama, "oracle", budget=64)
    forward(llama, twin, batch["input_ids"], batch["attention_mask"])
    expected = forward(llama, twin, more, mask)
    assert torch.equal(forward(llama, cache, more), expected), "without a mask the padding is still known"


def test_batch_that_changes(llama: PreTrainedModel) -> None:
    for method in ("oracle", "full", "streaming"):
        cache = kvthaw.Cache(llama, method, budget=64)
        forward(llama, cache, prompt(2, 30))
        with pytest.raises(CacheError, match=r"holds 2 rows and was given 3"):
            forward(llama, cache, prompt(3, 1))
        assert forward(llama, cache, prompt(2, 1)).isfinite().all()
        assert cache.get_seq_length() == 31


# Caches and handles


@pytest.mark.parametrize("attached", [True, False])
def test_cache_of_another_model(llama: PreTrainedModel, attached: bool) -> None:
    cache, other = kvthaw.Cache(llama, "oracle", budget=64), build("llama", seed=1)
    if attached:
        handle = kvthaw.attach(other, "oracle", budget=64)
    error = (CacheError, "belongs to another model") if attached else (UnsupportedModelError, "given to a model")
    with pytest.raises(error[0], match=error[1]):
        forward(other, cache, IDS)
    still_works(llama, cache)
    if attached:
        handle.detach()


def test_cache_after_detach(llama: PreTrainedModel) -> None:
    handle = kvthaw.attach(llama, "oracle", budget=64)
    llama.generate(IDS, max_new_tokens=3, do_sample=False)
    cache = handle.cache
    handle.detach()
    with pytest.raises(CacheError, match=r"attach it again"):
        forward(llama, cache, IDS[:, :1])
    with kvthaw.attach(llama, "oracle", budget=64):
        assert forward(llama, cache, IDS[:, :1]).isfinite().all()


def test_closed_handle(llama: PreTrainedModel) -> None:
    handle = kvthaw.attach(llama, "oracle", budget=64)
    for use in (handle.stats, lambda: handle.cache):
        with pytest.raises(CacheError, match=r"nothing was generated yet"):
            use()
    handle.detach()
    handle.detach()  # once is enough
    for use in (lambda: handle.cache, handle.__enter__):
        with pytest.raises(CacheError, match=r"handle is closed; attach the model again"):
            use()
    with kvthaw.attach(llama, "oracle", budget=64) as again:
        llama.generate(IDS, max_new_tokens=2, do_sample=False)
        assert again.stats().sparse_steps > 0
        again.detach()  # leaving the block afterwards is fine
    assert again.stats().sparse_steps > 0, "the last numbers stay"


def test_attach_twice(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=64):
        with pytest.raises(CacheError, match=r"attached already; detach its handle first"):
            kvthaw.attach(llama, "full")
        assert llama.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 62)
    assert llama.config._attn_implementation == "sdpa"


def test_attach_after_an_explicit_cache(llama: PreTrainedModel) -> None:
    kvthaw.Cache(llama, "oracle", budget=64)
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        llama.generate(IDS, max_new_tokens=2, do_sample=False)
        assert handle.stats().sparse_steps > 0
    assert llama.config._attn_implementation == "sdpa", "detach gives back what was before the first cache"


@pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized"])
def test_other_caches(llama: PreTrainedModel, implementation: str) -> None:
    if implementation == "offloaded" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers makes a stream for it, which a CUDA build without a GPU refuses")
    with kvthaw.attach(llama, "oracle", budget=64):
        with pytest.raises((CacheError, ImportError), match=r"kvthaw|quanto"):
            llama.generate(IDS, max_new_tokens=2, cache_implementation=implementation, disable_compile=True)
        with pytest.raises(CacheError, match=r"StaticCache; kvthaw works with its own Cache or a DynamicCache"):
            forward(llama, StaticCache(config=llama.config, max_cache_len=100), IDS)
        assert llama.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 62)


# What is not bad at all


def test_gradients_are_refused(llama: PreTrainedModel) -> None:
    llama.requires_grad_(True)

    def gradient() -> Tensor:
        llama.zero_grad()
        llama(IDS, labels=IDS, use_cache=False).loss.backward()
        return llama.model.layers[0].self_attn.q_proj.weight.grad

    expected = gradient()
    with kvthaw.attach(llama, "oracle", budget=512):
        with pytest.raises(CacheError, match=r"gradients are on.*torch.no_grad\(\).*use_cache=False"):
            llama(IDS, labels=IDS)
        torch.testing.assert_close(gradient(), expected)
        llama.requires_grad_(False)
        assert llama(IDS).logits.isfinite().all()


def test_modes_of_autograd(llama: PreTrainedModel) -> None:
    expected = llama.generate(IDS, max_new_tokens=30, do_sample=False)
    cache = kvthaw.Cache(llama, "oracle", budget=1024)
    with torch.inference_mode():
        llama(IDS[:, :40], past_key_values=cache)
    with torch.no_grad():
        llama(IDS[:, 40:59], past_key_values=cache)
    assert torch.equal(llama.generate(IDS, past_key_values=cache, max_new_tokens=30, do_sample=False), expected)


def test_plain_caches_work_on_a_model_that_is_not_detached(llama: PreTrainedModel) -> None:
    batch = ragged([50, 31])
    plain = [DynamicCache(config=llama.config) for _ in range(2)]
    steps = [(batch["input_ids"], batch["attention_mask"])]
    steps.append((prompt(2, 9), torch.cat((batch["attention_mask"], torch.ones(2, 9, dtype=torch.long)), dim=1)))
    expected = [forward(llama, plain[0], *step) for step in steps]
    alone = forward(llama, None, IDS)
    kvthaw.Cache(llama, "oracle")
    found = [forward(llama, plain[1], *step) for step in steps]
    for a, b, (_, mask) in zip(found, expected, steps, strict=True):
        seen = mask[:, -a.shape[1] :].bool()
        torch.testing.assert_close(a[seen], b[seen], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(forward(llama, None, IDS), alone, atol=1e-4, rtol=1e-4)
