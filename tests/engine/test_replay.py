"""Captured decoding gives what eager decoding gives. Captures need a GPU; what surrounds them does not."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvthaw
import zoo
from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.engine.graph_runner import ElasticGraph, StaticGraphs, capturable
from kvthaw.engine.hf.fused import fused
from kvthaw.errors import ConfigError
from kvthaw.index.exact import ExactIndex
from kvthaw.methods import resolve
from lab.launches import launches
from stand_in import StandIn, captured_by


def model(device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().to(device=device, dtype=dtype)


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of three layers, of which one may be dense."""
    return zoo.build("llama", num_hidden_layers=3)


def generate(llama: LlamaForCausalLM, ids: torch.Tensor, new: int, **kwargs: object) -> torch.Tensor:
    return llama.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **kwargs)[:, ids.shape[1] :]


def captured_methods() -> list[str]:
    """Those that select on the device, or on the host between graphs; the paper's IceCache with rows that a kernel fetches."""
    names = [name for name in kvthaw.METHODS if name != "infinigen"]
    return [f"{name}:transfer=uva" if name in ("icecache", "icecache-reuse") else name for name in names]


@pytest.mark.gpu
@pytest.mark.parametrize("method", captured_methods())
def test_replayed_tokens_equal_eager_ones(method: str) -> None:
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (3, 900), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    mask[2, :37] = 0
    budget = None if method == "full" else 256
    with kvthaw.attach(llama, method, budget=budget, capture=False) as handle:
        eager = generate(llama, ids, 100, attention_mask=mask)
        expected = handle.stats()
    with kvthaw.attach(llama, method, budget=budget) as handle:
        replayed = generate(llama, ids, 100, attention_mask=mask)
        stats = handle.stats()
        replay = handle.cache.replay
        assert replay is not None
        assert replay.captures >= 1
        again = generate(llama, ids, 100, attention_mask=mask)
    assert torch.equal(replayed, eager)
    assert torch.equal(again, eager)
    assert stats.captures >= 1
    assert stats.capture_seconds > 0
    assert stats.capture_bytes >= 0
    assert replace(stats, captures=0, capture_seconds=0.0, capture_bytes=0) == expected
    assert stats.sparse_steps > 0 or method == "full"


@pytest.mark.gpu
@pytest.mark.parametrize("method", captured_methods())
def test_a_bucket_is_captured_once(method: str) -> None:
    """Within the room that a prompt makes nothing moves; 256 tokens later all of it does, once."""
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 600), device="cuda")
    with kvthaw.attach(llama, method, budget=None if method == "full" else 256) as handle:
        generate(llama, ids, 200, min_new_tokens=200)  # whatever this method's tokens are
        assert handle.stats().captures == 1
        generate(llama, ids, 300, min_new_tokens=300)
        assert handle.stats().captures == (1 if method == "streaming" else 2)  # streaming has nothing that grows


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "icecache-digest"])
def test_logits_of_replayed_steps_are_the_callers_own(method: str) -> None:
    """Also where a step failed while it was captured, and is taken again."""
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 300), device="cuda")
    expected, cache = (kvthaw.Cache(llama, method, budget=128) for _ in range(2))

    def fail(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ZeroDivisionError

    with torch.no_grad():
        with fused(llama):  # as an attached model runs; other roundings choose other rows where scores are nearly equal
            llama(ids[:, :200], past_key_values=expected)
            eager = [llama(token, past_key_values=expected).logits for token in ids[:, 200:].split(1, dim=1)]
        found = []
        with kvthaw.attach(llama, method, budget=128):
            llama(ids[:, :200], past_key_values=cache)
            hook = llama.model.layers[2].register_forward_pre_hook(fail)
            for token in ids[:, 200:].split(1, dim=1):
                try:
                    found.append(llama(token, past_key_values=cache).logits)
                except ZeroDivisionError:
                    hook.remove()
                    found.append(llama(token, past_key_values=cache).logits)
            assert cache.stats().captures == 1  # before detaching, which gives the graphs back
    torch.testing.assert_close(torch.cat(found), torch.cat(eager), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_call_of_one_token_within_padding_is_not_replayed() -> None:
    """A row that has no token yet learns its padding from the mask."""
    llama, ids = model("cuda", torch.float32), torch.randint(3, 512, (2, 60), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    with kvthaw.attach(llama, "oracle", budget=256), torch.no_grad():
        for cuts in ((0, 60), (0, 21, 22, 59, 60)):
            cache = kvthaw.Cache(llama, "oracle", budget=256)
            for start, stop in itertools.pairwise(cuts):
                given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
                logits = llama(ids[:, start:stop], past_key_values=cache, **given).logits[:, -1]
            found.append(logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_capture_outlives_garbage_with_an_earlier_graph() -> None:
    """The collector would destroy it meanwhile, and a capture fails where a graph is destroyed."""
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 600), device="cuda")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
    earlier = [graph]
    del graph

    def litter(*_: object) -> None:
        if earlier and torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [earlier.pop()]
            cycle.append(cycle)
            del cycle
            assert len([[] for _ in range(20_000)]) == 20_000  # enough for the collector to look at what is new

    with llama.model.layers[1].register_forward_pre_hook(litter), kvthaw.attach(llama, "quest", budget=128) as handle:
        generate(llama, ids, 8, min_new_tokens=8)
        assert handle.stats().captures == 1
    assert not earlier
    assert gc.isenabled()


@pytest.mark.gpu
def test_beams_are_decoded_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 300), device="cuda")
    with kvthaw.attach(llama, "quest", budget=128, capture=False):
        expected = generate(llama, ids, 30, num_beams=3)
    with caplog.at_level("INFO", logger="kvthaw"), kvthaw.attach(llama, "quest", budget=128) as handle:
        assert torch.equal(generate(llama, ids, 30, num_beams=3), expected)
        assert handle.stats().captures == 0
    assert sum("beams change places" in record.message for record in caplog.records) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["oracle", "pariskv", "clusterkv", "prkv", "icecache-digest"])
def test_a_captured_cache_can_be_cropped_copied_and_continued(method: str) -> None:
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 700), device="cuda")
    outs = []
    for capture in (False, True):
        with kvthaw.attach(llama, method, budget=128, capture=capture) as handle:
            generate(llama, ids, 40)
            cache = handle.cache
            cache.crop(-20)
            twin = copy.deepcopy(cache)
            more = torch.randint(3, 512, (1, 30), generator=torch.Generator("cuda").manual_seed(1), device="cuda")
            pair = []
            for one in (cache, twin):
                whole = torch.cat((torch.full((1, one.get_seq_length()), 7, device="cuda"), more), dim=1)
                pair.append(generate(llama, whole, 30, past_key_values=one, attention_mask=torch.ones_like(whole)))
            outs.append(torch.cat(pair))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv", "clusterkv", "prkv"])
def test_the_host_waits_for_nothing_between_replayed_steps(method: str) -> None:
    """Nor when tokens leave the ring, every 16 to 32 steps here."""
    llama = model("cuda", torch.float32)
    cache = kvthaw.Cache(llama, method, budget=256)
    with torch.no_grad():
        token = llama(torch.randint(3, 512, (1, 700), device="cuda"), past_key_values=cache).logits[:, -1:].argmax(dim=-1)
    replay = ElasticGraph(llama.forward, cache)

    def steps(start: int, stop: int, token: torch.Tensor) -> torch.Tensor:
        for i in range(start, stop):
            token = replay(token, torch.full((1, 1), 700 + i, device="cuda")).argmax(dim=-1)
        return token

    token = steps(0, 40, token)
    try:
        torch.cuda.set_sync_debug_mode("error")
        steps(40, 100, token)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replay.captures == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "kernels"),
    [
        ("full", ["_attend"]),
        ("streaming", ["_attend"]),
        *((m, ["_admit", "_uva_gather", "_attend"]) for m in ("quest", "pariskv")),
    ],
)
def test_launches_of_a_captured_step(method: str, kernels: list[str]) -> None:
    """Besides choosing rows, a layer is at most three launches: admit, fetch and attention."""
    llama = model("cuda", torch.float32)
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 256}))
    ids = torch.randint(3, 512, (1, 700), device="cuda")
    with torch.no_grad():
        token = llama(ids, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        replay = ElasticGraph(llama.forward, cache)
        for i in range(4):
            token = replay(token, torch.full((1, 1), 700 + i, device="cuda")).argmax(dim=-1)
    assert replay.captures == 1
    found = launches(lambda: replay(token, torch.full((1, 1), 704, device="cuda")))
    of = {kernel["name"]: kernel["launches"] for kernel in found["kernels"]}
    for name in kernels:
        assert of[name] == llama.config.num_hidden_layers, f"one {name} a layer"


def test_every_step_reads_the_same_tensors(llama: PreTrainedModel) -> None:
    """Whatever strides the tokens come with."""
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    seen = []

    def forward(*, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: object) -> object:
        seen.append([(t.data_ptr(), t.stride(), t.tolist()) for t in (input_ids, position_ids)])
        return llama(input_ids=input_ids, position_ids=position_ids, **kwargs)

    with torch.no_grad():
        llama(zoo.prompt(2, 70), past_key_values=cache)
        replay = ElasticGraph(forward, cache)
        for step in range(3):
            ids, positions = torch.tensor([[5 + step, 70 + step]] * 2)[:, :, None].unbind(1)
            assert ids.stride() != (1, 1)
            replay(ids if step else ids.contiguous(), positions)
    assert [[values for *_, values in one] for one in seen] == [[[[5 + i]] * 2, [[70 + i]] * 2] for i in range(3)]
    assert len({tuple(at for at, *_ in one) for one in seen}) == 1
    assert all(stride == (1, 1) for one in seen for _, stride, _ in one)


@pytest.mark.parametrize("method", ["full", "quest"])
def test_layers_count_a_step_while_the_device_takes_it(
    method: str, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host does for every layer comes after the replay's launch, which would else wait for it."""
    cache = kvthaw.Cache(llama, method, **({} if method == "full" else {"budget": 64}))
    counted: list[tuple[int, int]] = []

    class Graph(StandIn):
        def replay(self) -> None:
            counted.append((at, cache.get_seq_length()))

    captured_by(monkeypatch, Graph)
    with torch.no_grad():
        llama(zoo.prompt(1, 70), past_key_values=cache)
        replay = ElasticGraph(llama.forward, cache)
        for at in range(70, 78):
            replay(torch.tensor([[5]]), torch.tensor([[at]]))
    assert len(counted) > 2
    assert all(length == at for at, length in counted[1:])
    assert counted[0][1] == counted[0][0] + 1, "a capture counts its own step"
    assert cache.get_seq_length() == 78


class Device(StandIn):
    """In the place of a captured step: what the device does of it that the host must know. at: where the device counters stood when
    each step began; fails: the host's part of a step raises, behind the first of its graphs."""

    def __init__(self, cache: kvthaw.Cache) -> None:
        super().__init__()
        self.at, self.fails, self.captured = list[list[int]](), False, 0
        self.sequences = cache.kv.sequences

    def __exit__(self, *error: object) -> None:
        self.sequences.on_device.lengths.sub_(self.sequences.on_device.live)  # nothing is done while it is captured
        self.captured += 1

    def replay(self) -> None:
        self.at.append(self.sequences.on_device.lengths.tolist())
        self.sequences.on_device.lengths.add_(self.sequences.on_device.live)
        if self.fails:
            raise ValueError("a query is not finite")


def replayed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, room: int = 0, method: str | kvthaw.Method = "icecache-digest"
) -> tuple[kvthaw.Cache, Device, Callable[[], torch.Tensor]]:
    """A cache after a prompt of 70 tokens, what takes its steps, and a step."""
    cache = kvthaw.Cache(llama, method, budget=128, dense_layers=1)
    cache.kv.sequences.room = room
    with torch.no_grad():
        llama(zoo.prompt(1, 70), past_key_values=cache)
    cache.replay = ElasticGraph(llama.forward, cache)

    def step() -> torch.Tensor:
        assert cache.replay is not None
        return cache.replay(torch.tensor([[5]]), torch.tensor([[cache.get_seq_length()]]))

    device = Device(cache)
    captured_by(monkeypatch, lambda: device)
    return cache, device, step


@pytest.mark.parametrize("steps", [5, 3], ids=["replay", "first replay"])
def test_a_replay_that_fails_counts_nothing_and_can_be_taken_again(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    cache, device, step = replayed(llama, monkeypatch)
    for _ in range(steps):
        step()
    device.fails = True
    with pytest.raises(ValueError, match="not finite"):
        step()
    assert cache.get_seq_length() == 70 + steps
    device.fails = False
    step()
    assert (cache.get_seq_length(), cache.kv.sequences.on_device.lengths.tolist()) == (71 + steps, [71 + steps])
    taken = len(device.at)
    step()
    step()
    assert len(device.at) > taken, "steps are replayed again"
    assert device.at[-1] == [72 + steps]


def test_what_a_forward_does_behind_the_last_layer_may_fail_too(llama: PreTrainedModel) -> None:
    """Its step is not counted: a compiled forward, say, or the last layer's MLP."""
    cache, plain = (kvthaw.Cache(llama, "icecache-digest", budget=128, dense_layers=1) for _ in range(2))

    def forward(**kwargs: Any) -> Any:
        out = llama(**kwargs)
        if fails:
            raise MemoryError("no more")
        return out

    fails = False
    one = torch.tensor([[5]])
    with torch.no_grad():
        for each in (cache, plain):
            llama(zoo.prompt(1, 70), past_key_values=each)
        replay = ElasticGraph(forward, cache, capture=False)
        for t in range(30):
            fails = t % 3 == 1
            if fails:
                with pytest.raises(MemoryError):
                    replay(one, torch.tensor([[70 + t]]))
                fails = False
            assert cache.get_seq_length() == 70 + t
            assert torch.equal(replay(one, torch.tensor([[70 + t]])), llama(one, past_key_values=plain).logits)


def test_a_crop_back_to_where_steps_ended_is_noticed(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens may have come in between for which tensors had to move."""
    cache, device, step = replayed(llama, monkeypatch, room=80)
    for _ in range(9):
        step()
    assert (device.captured, cache.get_seq_length()) == (1, 79)
    with torch.no_grad():
        llama(zoo.prompt(1, 5), past_key_values=cache)
    cache.crop(-5)
    steps = len(device.at)
    step()
    assert len(device.at) == steps, "the captured step reads what has moved"


class Watching:
    """An observer whose work a captured step has in it."""

    graph_safe = True

    def __call__(self, layer: object, query: torch.Tensor, choice: object) -> None:
        """Sees what was chosen."""


def test_steps_of_every_number_of_rows_are_captured_again_for_an_observer(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured_by(monkeypatch, StandIn)
    batch = kvthaw.Batch(llama, "oracle", max_seqs=2, capacity=400, budget=64)
    runner = batch.cache.replay = StaticGraphs(llama.forward, batch.cache)
    batch.join(zoo.prompt(1, 30)[0], max_new_tokens=300, stop=())

    def captures(tokens: int = 0) -> int:
        """After steps, of two rows as long as a second request needs for so many tokens."""
        second = batch.join(zoo.prompt(1, 20)[0], max_new_tokens=tokens, stop=()) if tokens else None
        for _ in range(6 + tokens):
            batch.step()
        assert second is None or second.finished
        return runner.captures

    assert [captures(), captures(8), captures()] == [1, 2, 2]
    batch.cache.kv.streams.observers.append(Watching())
    assert captures(8) == 4, "steps of both numbers of rows were captured without it"


def test_steps_under_autocast_have_a_capture_of_their_own(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are others."""
    captured_by(monkeypatch, StandIn)
    llama = llama.to(torch.bfloat16)
    cache, places = kvthaw.Cache(llama, "oracle", budget=64), itertools.count(80)
    runner, made = ElasticGraph(llama.forward, cache), list[int]()
    with torch.no_grad():
        llama(zoo.prompt(1, 80), past_key_values=cache)
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for _ in range(4):
                    runner(torch.tensor([[5]]), torch.tensor([[next(places)]]))
            made.append(runner.captures)
    assert made == [1, 2, 2, 2]


class Helper:
    """An object of an own index, with a tensor in it."""

    def __init__(self) -> None:
        self.bias = torch.zeros(())


class Helped(ExactIndex):
    """An own index that reads a tensor of a helper object."""

    def __init__(self, shape: IndexContext) -> None:
        super().__init__(shape)
        self.helper = Helper()

    def estimate(self, query: torch.Tensor, tokens: int) -> torch.Tensor:
        return super().estimate(query, tokens) + self.helper.bias

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.helper.bias]


def test_a_tensor_of_an_own_indexs_helper_that_moved_is_noticed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(resolve("oracle"), name="mine", index=Helped)
    cache, device, step = replayed(llama, monkeypatch, room=400, method=own)
    for _ in range(9):
        step()
    assert device.captured == 1
    for moves in (False, True):
        steps = len(device.at)
        with torch.no_grad():
            llama(zoo.prompt(1, 1), past_key_values=cache)
        group = cache.kv.offloaded[-1].retriever
        assert group is not None
        assert isinstance(group.index, Helped)
        if moves:
            group.index.helper.bias = group.index.helper.bias + 1
        step()
        assert len(device.at) == steps + (not moves), "the captured step reads what has moved"


def test_what_is_no_index_is_refused_by_name(llama: PreTrainedModel) -> None:
    class Untold(Index):
        def select(self, query: torch.Tensor, budget: int) -> Selection:
            raise NotImplementedError

    for index, error, says in (
        (Helper, ConfigError, r"index of mine made a Helper; it must make an index that inherits kvthaw.cache.index_api.Index"),
        (Untold, TypeError, "abstract class Untold .*append, build, clone_from, reorder, tensors, truncate"),
    ):
        method = replace(resolve("oracle"), name="mine", index=lambda context, index=index: index())  # type: ignore[arg-type]
        with pytest.raises(error, match=says):
            kvthaw.Cache(llama, method, budget=128)


def test_a_reset_lets_go_of_all_that_a_captured_step_reads(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows on the host among it, by the host's part of the step."""
    cache, device, step = replayed(llama, monkeypatch)
    for _ in range(4):
        step()
    assert device.captured == 1
    store = weakref.ref(cache.kv.offloaded[0].store)
    del device, step
    monkeypatch.undo()
    cache.reset()
    with torch.no_grad():
        llama(zoo.prompt(1, 70), past_key_values=cache)
    gc.collect()
    assert store() is None


def test_what_is_not_captured() -> None:
    whole = {"rope_theta": 1e4, "rope_type": "default"}
    for rope, method, reason in (
        (whole | {"rope_type": "dynamic", "factor": 2.0}, "oracle", "dynamic positions"),
        (whole, "icecache-digest", None),
        (whole, "icecache-digest:transfer=bulk", "icecache-digest has its rows gathered by the host"),
        (whole, "infinigen", "infinigen looks into the model"),
        (whole, "retroinfer", None),
    ):
        llama = zoo.build("llama", rope_parameters=rope)
        cache = kvthaw.Cache(llama, method, budget=64)
        with torch.no_grad():
            llama(zoo.prompt(1, 70), past_key_values=cache)
        found = capturable(cache)
        assert found is None if reason is None else found is not None and reason in found
    cache = kvthaw.Cache(zoo.build("gemma3"), "oracle", budget=64)
    assert "transformers serves itself" in str(capturable(cache))


def test_why_steps_are_eager_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    llama = zoo.build("llama")
    with caplog.at_level("INFO", logger="kvthaw"), kvthaw.attach(llama, "oracle", budget=64):
        for _ in range(2):
            llama.generate(zoo.prompt(1, 40), max_new_tokens=4, do_sample=False)
    told = [(record.levelname, record.message) for record in caplog.records if record.name == "kvthaw.engine.hf.replay"]
    assert told == [("INFO", "steps are taken eagerly: the model is on a CPU")]


@pytest.mark.gpu
def test_gpu_what_is_not_captured_says_why(caplog: pytest.LogCaptureFixture) -> None:
    llama = model("cuda", torch.float32)
    ids = torch.randint(3, 512, (1, 300), device="cuda")
    for method, how in (
        ("icecache-digest:transfer=bulk", "icecache-digest has its rows gathered by the host"),
        ("infinigen", "infinigen looks into the model between its layers"),
    ):
        caplog.clear()
        with caplog.at_level("INFO", logger="kvthaw"), kvthaw.attach(llama, method, budget=128) as handle:
            generate(llama, ids, 40)
            assert handle.stats().captures == 0
        assert [r.message for r in caplog.records if r.name == "kvthaw.engine.hf.replay"] == [f"steps are taken eagerly: {how}"]


def test_beams_are_known() -> None:
    llama = zoo.build("llama")
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        llama.generate(zoo.prompt(1, 40), max_new_tokens=3, do_sample=False)
        assert not handle.cache.reordered
        llama.generate(zoo.prompt(1, 40), max_new_tokens=3, do_sample=False, num_beams=2)
        assert handle.cache.reordered
        handle.cache.reset()
        assert not handle.cache.reordered
