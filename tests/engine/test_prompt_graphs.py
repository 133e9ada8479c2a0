"""Prefills of whole short prompts by a forward that runs without the cache: a request gets the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_architectures import COMMON
from transformers import PreTrainedModel

from kvthaw import Batch, Request, Sampling, Scheduler, detach
from kvthaw.engine.hf import prompt_graphs as module
from kvthaw.engine.hf.prompt_graphs import LENGTHS, PromptGraphs, prompt_graphs
from kvthaw.errors import CacheError
from kvthaw.methods import METHODS
from stand_in import StandIn
from zoo import DISTINCT, MODELS, build, build_exact, build_for, prompt

NEW = 8
SIZES: dict[str, Any] = {"max_seqs": 3, "capacity": 320, "block_size": 16}
IDS = [prompt(1, n, seed=n)[0] for n in (33, 128, 2, 250)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=2)


def replaying(model: PreTrainedModel, method: str, *, capture: bool = False, **sizes: Any) -> Batch:
    """A batch that prefills short prompts by a forward without its cache, which only a GPU's does by itself."""
    batch = Batch(model, method, **SIZES | sizes)
    batch.prompts.graphs = prompt_graphs(model, batch.cache, capture=capture)
    return batch


def served(batch: Batch, ids: list[torch.Tensor], new: int = NEW, **how: Any) -> list[Request]:
    """Requests that came one after the other, of which some decode together."""
    scheduler, requests = Scheduler(batch, step_tokens=1000), list[Request]()
    for each in ids:
        requests.append(scheduler.submit(each, max_new_tokens=new, stop=(), **how))
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    assert not any(request.error for request in requests)
    return requests


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of prompts that ran without the cache."""
    found, plain = list[int](), PromptGraphs.__call__

    def noted(graphs: PromptGraphs, ids: torch.Tensor) -> torch.Tensor:
        found.append(ids.shape[1])
        return plain(graphs, ids)

    monkeypatch.setattr(PromptGraphs, "__call__", noted)
    return found


@pytest.mark.parametrize("method", DISTINCT)
def test_every_method_decodes_the_same_tokens(forwards: list[int], method: str) -> None:
    model = build_for(method)
    sizes: dict[str, Any] = {"dense_layers": 1} if METHODS[method]().dense else {"budget": 48, "dense_layers": 0}
    expected = tokens(served(Batch(model, method, **SIZES, **sizes), IDS))
    batch = replaying(model, method, **sizes)
    assert tokens(served(batch, IDS)) == expected
    on_host = any(layer.on_host for layer in batch.cache.kv.offloaded)
    if batch.prompts.graphs is None or METHODS[method]().prompt_queries is None:
        assert not forwards
    else:  # the first prompt allocates the layers, after which an index is known to be on the host
        assert forwards == [len(each) for each in IDS[: 1 if on_host else None]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in COMMON])
def test_every_architecture_decodes_the_same_tokens(name: str) -> None:
    model = build_exact(name)
    expected = tokens(served(Batch(model, "oracle", **SIZES, budget=160), IDS, 4))
    assert tokens(served(replaying(model, "oracle", budget=160), IDS, 4)) == expected


def test_what_was_in_the_buffers_before_does_not_matter(model: PreTrainedModel) -> None:
    expected = tokens(served(Batch(model, "oracle", **SIZES, budget=320), IDS))
    batch = replaying(model, "oracle", budget=320)
    served(batch, IDS[-1:])
    assert batch.prompts.graphs is not None
    for layer in batch.prompts.graphs._layers:
        for tensor in (layer.kv, layer.queries):
            tensor.fill_(float("nan"))
    assert tokens(served(batch, IDS)) == expected


def test_sampling_and_log_probabilities_are_the_same(model: PreTrainedModel) -> None:
    how = {"sampling": Sampling(temperature=1.0, seed=3, logprobs=2)}
    expected, found = (served(batch, IDS, **how) for batch in (Batch(model, **SIZES), replaying(model, "auto")))
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]


def test_a_prompt_that_needs_the_log_probabilities_of_its_tokens_runs_with_the_cache(
    model: PreTrainedModel, forwards: list[int]
) -> None:
    served(replaying(model, "auto"), IDS[:1], sampling=Sampling(prompt_logprobs=1))
    assert not forwards


def test_longer_prompts_run_with_the_cache(model: PreTrainedModel) -> None:
    graphs = replaying(build_exact("llama", max_position_embeddings=4096), "full", capacity=3000).prompts.graphs
    assert graphs is not None
    assert graphs.lengths == [*LENGTHS]
    assert graphs.serves(LENGTHS[-1])
    assert not graphs.serves(LENGTHS[-1] + 1)
    assert not graphs.serves(1)
    batch = replaying(model, "full", prefill_chunk=64)
    short, longer = (batch.join(ids, max_new_tokens=1) for ids in IDS[:2])
    assert batch.prompts.replays(short)
    assert not batch.prompts.replays(longer)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_position_is_beyond_those_that_the_model_has(name: str) -> None:
    model = build_exact(name, max_position_embeddings=300)
    batch = replaying(model, "oracle", capacity=300, budget=48)
    assert batch.prompts.graphs is not None
    assert batch.prompts.graphs.lengths == [128, 256, 300]
    ids = [prompt(1, n, seed=n)[0] for n in (270, 290)]
    assert tokens(served(batch, ids)) == tokens(served(Batch(model, "oracle", **SIZES | {"capacity": 300}, budget=48), ids))


@pytest.mark.parametrize("method", ["h2o", "full:queries=None", "icecache-digest"])
def test_methods_that_no_captured_prefill_serves_have_none(model: PreTrainedModel, method: str) -> None:
    assert replaying(model, method).prompts.graphs is None


def test_windows_have_none() -> None:
    assert replaying(build_exact("gemma2"), "oracle", budget=48).prompts.graphs is None


def test_the_mode_of_the_first_caller_does_not_matter(model: PreTrainedModel) -> None:
    batch = replaying(model, "oracle", budget=48)
    with torch.inference_mode():
        first = tokens(served(batch, IDS[:1]))
    assert tokens(served(batch, IDS[:1])) == first


def test_a_detached_model_is_refused(model: PreTrainedModel) -> None:
    batch = replaying(model, "oracle", budget=48)
    served(batch, IDS[:1])
    detach(model)
    request = batch.join(IDS[0], max_new_tokens=1, stop=())
    with pytest.raises(CacheError, match="attach it again"):
        batch.prefill(request)


def test_many_short_prompts_share_a_forward(model: PreTrainedModel, forwards: list[int]) -> None:
    batch = replaying(model, "oracle", budget=48, max_seqs=16)
    scheduler = Scheduler(batch, step_tokens=1000)
    for seed in range(16):
        scheduler.submit(prompt(1, 30, seed=seed)[0], max_new_tokens=1, stop=())
    while scheduler.busy:
        scheduler.step()
    assert forwards == [30], "the first prompt, which tells the sizes"


@pytest.mark.parametrize("fails", [False, True])
def test_the_second_prompt_of_a_length_is_captured(
    model: PreTrainedModel, forwards: list[int], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Whether that works or not, its forward runs once. After a capture that failed, prompts run with the cache."""

    class Graph(StandIn):
        def __init__(self, pool: None) -> None:
            super().__init__()

        def __enter__(self) -> StandIn:
            if fails:
                raise RuntimeError("the model needs the host")
            return self

    runs, plain = list[int](), PromptGraphs._run
    monkeypatch.setattr(module, "SegmentedGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(PromptGraphs, "_run", lambda graphs, length: (runs.append(length), plain(graphs, length)))
    expected = tokens(served(Batch(model, "oracle", **SIZES, budget=48), IDS[:1]))
    batch = replaying(model, "oracle", capture=True, budget=48)
    for _ in range(2):
        assert tokens(served(batch, IDS[:1])) == expected
    assert batch.prompts.graphs is not None
    assert (runs, batch.prompts.graphs.captures) == ([128, 128], int(not fails))
    if fails:
        assert tokens(served(batch, IDS[:1])) == expected
        assert forwards == [33, 33]


def test_a_prompt_that_is_not_finite_fails_alone(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = replaying(model, "oracle", budget=48)
    good = served(batch, IDS[:1])
    plain = PromptGraphs._run

    def poisoned(graphs: PromptGraphs, length: int) -> None:
        plain(graphs, length)
        graphs._layers[1].kv[:, :, 5] = float("inf")

    monkeypatch.setattr(PromptGraphs, "_run", poisoned)
    scheduler = Scheduler(batch)
    bad = scheduler.submit(IDS[1], max_new_tokens=NEW, stop=())
    while scheduler.busy:
        scheduler.step()
    assert isinstance(bad.error, CacheError)
    monkeypatch.undo()
    assert tokens(served(batch, IDS[:1])) == tokens(good)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["auto", "full", "thaw", "oracle", "pariskv", "clusterkv-plus"])
def test_captured_prefills_give_the_same_tokens(method: str) -> None:
    model = build("llama", num_hidden_layers=3).to("cuda")
    ids = [each.to("cuda") for each in [*IDS, *IDS[::-1], *IDS]]
    sizes: dict[str, Any] = {} if method in ("auto", "full") else {"budget": 48}
    plain = Batch(model, method, **SIZES, **sizes)
    plain.prompts.graphs = None
    expected = tokens(served(plain, ids))
    batch = replaying(model, method, capture=True, **sizes)
    assert tokens(served(batch, ids)) == expected
    assert batch.prompts.graphs is not None
    assert batch.prompts.graphs.captures == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "gemma2", "gpt2", "phi3"])
def test_captured_prefills_of_other_architectures(name: str) -> None:
    """Experts may need the host, which ends captures; windows are not served, sinks and learned positions are."""
    model = build(name).to("cuda")
    ids = [each.to("cuda") for each in [*IDS, *IDS]]
    plain = Batch(model, "oracle", **SIZES, budget=160)
    plain.prompts.graphs = None
    expected = tokens(served(plain, ids))
    assert tokens(served(replaying(model, "oracle", capture=True, budget=160), ids)) == expected


@pytest.mark.gpu
def test_warming_captures_every_length() -> None:
    model = build("llama", num_hidden_layers=2).to("cuda")
    batch = replaying(model, "auto", capture=True)
    served(batch, [each.to("cuda") for each in IDS[-1:]])
    assert batch.prompts.graphs is not None
    batch.prompts.graphs.warm()
    assert batch.prompts.graphs.captures == len(batch.prompts.graphs.lengths) == 3
    expected = Batch(model, "auto", **SIZES, capture=False)
    ids = [each.to("cuda") for each in IDS]
    assert tokens(served(batch, ids)) == tokens(served(expected, ids))
    assert batch.prompts.graphs.captures == 3
