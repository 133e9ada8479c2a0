"""Threads that generate with one attached model at once, and caches that take turns: each call goes by its own cache."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextIteratorStreamer

import kvthaw
from kvthaw.engine.hf.cache import Cache
from zoo import prompt

PROMPTS = [prompt(1, 100 + 30 * i, seed=i) for i in range(3)] + [prompt(1, 100, seed=9)]


@torch.no_grad()
def generate(model: PreTrainedModel, ids: torch.Tensor, **more: Any) -> list[int]:
    return model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, **more)[0, ids.shape[1] :].tolist()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return what calls return that run in a thread each."""
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        start.wait(10)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


@pytest.mark.parametrize(
    ("method", "attach", "more"),
    [
        ("full", {}, {}),
        ("oracle", {"prefill_chunk": 32}, {}),
        ("icecache-digest", {}, {"prompt_lookup_num_tokens": 4}),
        ("pariskv-plus", {"full_below": 110}, {}),
        ("clusterkv", {}, {}),
        ("snapkv", {}, {}),
        ("infinigen", {}, {}),
        ("oracle", {"prefill_chunk": 32, "progress": lambda done, total: None}, {"num_beams": 2}),
    ],
)
def test_threads_get_the_tokens_of_one_after_the_other(
    llama: PreTrainedModel, method: str, attach: dict[str, Any], more: dict[str, Any]
) -> None:
    budget = {} if method == "full" else {"budget": 64}
    with kvthaw.attach(llama, method, block_size=32, **budget, **attach):
        alone = [generate(llama, ids, **more) for ids in PROMPTS]
        for _ in range(2):
            assert at_once([lambda ids=ids: generate(llama, ids, **more) for ids in PROMPTS]) == alone  # type: ignore[misc]


def test_threads_share_a_prefix_cache(llama: PreTrainedModel) -> None:
    begin = prompt(1, 200, seed=5)
    prompts = [torch.cat([begin, ids], dim=1) for ids in PROMPTS]
    with kvthaw.attach(llama, "oracle", budget=64, block_size=32):
        alone = [generate(llama, ids) for ids in prompts]
    prefix = kvthaw.PrefixCache()
    with kvthaw.attach(llama, "oracle", budget=64, block_size=32, prefix_cache=prefix):
        for _ in range(2):
            assert at_once([lambda ids=ids: generate(llama, ids) for ids in prompts]) == alone  # type: ignore[misc]
    assert prefix.stats().hits


def test_progress_of_threads_is_not_mixed(llama: PreTrainedModel) -> None:
    told: dict[int, list[int]] = {}

    def tell(done: int, total: int) -> None:
        told.setdefault(total, []).append(done)

    with kvthaw.attach(llama, "oracle", budget=64, prefill_chunk=32, progress=tell):
        at_once([lambda ids=ids: generate(llama, ids) for ids in PROMPTS[:3]])  # type: ignore[misc]
    assert sorted(told) == [100, 130, 160]
    assert all(each == sorted(each) and (each[0], each[-1]) == (0, total) for total, each in told.items())


@pytest.mark.parametrize("where", ["make", "rolls_back"])
def test_calls_that_begin_together_have_caches_of_their_own(llama: PreTrainedModel, where: str) -> None:
    met = threading.Barrier(2)

    class Waits(Cache):
        """Waits for another thread's between its making and its use."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == where and value:
                met.wait(10)

    with kvthaw.attach(llama, "full") as handle:
        prompts = [PROMPTS[0], PROMPTS[3]]
        alone = [generate(llama, ids) for ids in prompts]
        make = handle._forward.make

        def waits(sized_for: tuple[int, int, int] | None) -> Cache:
            cache = make(sized_for)
            cache.__class__ = Waits
            if where == "make":
                met.wait(10)
            return cache

        handle._forward.make = waits
        assert at_once([lambda ids=ids: generate(llama, ids) for ids in prompts]) == alone  # type: ignore[misc]


@pytest.mark.parametrize("method", ["oracle", "icecache-digest"])
def test_caches_that_take_turns_stay_what_they_are(llama: PreTrainedModel, method: str) -> None:
    parts = [(0, 70), (70, 71), (71, 100)]
    sizes: list[int] = []  # of what goes through the model at once
    hook = llama.model.layers[0].register_forward_hook(lambda *args: sizes.append(args[-1].shape[1]))

    def took(i: int, start: int, stop: int, given: DynamicCache) -> torch.Tensor:
        return llama(PROMPTS[i][:, start:stop], past_key_values=given).logits[:, -1]

    with kvthaw.attach(llama, method, budget=64, prefill_chunk=32) as handle, torch.no_grad():
        given = [DynamicCache(), DynamicCache()]
        alone = [[took(i, *part, given[i]) for part in parts] for i in (0, 1)]
        apart, given = sorted(sizes), [DynamicCache(), DynamicCache()]
        sizes.clear()
        mixed: list[list[torch.Tensor]] = [[], []]
        for part in parts:
            for i in (0, 1):
                mixed[i].append(took(i, *part, given[i]))
                assert handle.cache.layers is given[i].layers
    hook.remove()
    assert sorted(sizes) == apart
    assert max(apart) == 32
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(alone[i], mixed[i], strict=True))


def test_a_copied_cache_is_served_as_the_first(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=64, prefill_chunk=32) as handle, torch.no_grad():
        given = DynamicCache()
        llama(PROMPTS[0], past_key_values=given)
        twin = copy.deepcopy(given)
        logits = [llama(PROMPTS[3], past_key_values=each).logits for each in (given, twin)]
        assert torch.equal(*logits)
        assert handle.cache.layers is twin.layers is not given.layers


class Words:
    """A tokenizer whose words are the token ids."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{i} " for i in ids)


def test_streamers_in_threads(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=64):
        alone = [generate(llama, ids) for ids in PROMPTS[:2]]
        streamers = [TextIteratorStreamer(Words(), skip_prompt=True, timeout=10) for _ in alone]  # type: ignore[arg-type]
        how = {"max_new_tokens": 4, "do_sample": False}
        threads = [
            threading.Thread(target=llama.generate, kwargs={"input_ids": ids, "streamer": streamer, **how})
            for ids, streamer in zip(PROMPTS, streamers, strict=False)
        ]
        for thread in threads:
            thread.start()
        said = ["".join(streamer).split() for streamer in streamers]
        for thread in threads:
            thread.join()
    assert [[int(word) for word in words] for words in said] == alone
