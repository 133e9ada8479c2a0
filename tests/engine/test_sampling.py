"""Sampling: the tokens drawn follow the definition and transformers' processors, and depend on nothing but settings and seed."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from sampling_definition import distribution
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvthaw.counter_rng import gumbel
from kvthaw.engine import sampling as sampling_module
from kvthaw.engine.logprobs import logprobs, score, top
from kvthaw.engine.sampling import Sampler, Sampling
from kvthaw.errors import ConfigError
from sampled import sample

VOCAB = 1500  # more than top_k can ask of torch.topk
PROMPT = [3, 7, 7, 250, 1499]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.3, "top_k": 1200},
    {"temperature": 1.3, "top_k": 10**6},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.2},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.5, "min_p": 0.02, "top_p": 0.7, "top_k": 100},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    {"temperature": 0.9, "repetition_penalty": 0.8, "top_k": 50},
    {"temperature": 0.9, "frequency_penalty": 2.0, "presence_penalty": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "logit_bias": {5: 9.5, 250: -3.25, 9: 8.0}, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 2.0, "logit_bias": {3: 12.0, 7: 12.0, 250: 12.0, 9: 8.0}},  # those of the prompt
    {"temperature": 1e-9},
    {"min_tokens": 4, "logit_bias": {17: 100.0}},
    {"temperature": 1.1, "min_tokens": 3, "logit_bias": {17: 100.0, 18: 100.0}, "repetition_penalty": 1.2},
]
STOPS = [17, 18]


def random_logits(rows: int, vocabulary: int = VOCAB, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def run(sampler: Sampler, seqs: list[int], steps: int, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """Tokens of some sequences of a batch, whose logits depend on the step and on which of `seqs` they are; others get others."""
    tokens: list[list[int]] = [[] for _ in seqs]
    for step in range(steps):
        logits = random_logits(sampler.seqs, seed=1000 + step, dtype=dtype)
        for i, seq in enumerate(seqs):
            logits[seq] = random_logits(1, seed=step * 100 + i, dtype=dtype)[0]
        chosen = sampler(logits, torch.full((sampler.seqs,), len(PROMPT) + step)).fetch()()[0]
        for i, seq in enumerate(seqs):
            tokens[i].append(chosen[seq])
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tokens_equal_the_definition_in_any_company(dtype: torch.dtype) -> None:
    """bfloat16 has many equal logits. Each sequence alone, and all together in another order, with others between them."""
    steps, expected = 6, []
    for i, kind in enumerate(SETTINGS):
        sampling, output = Sampling(seed=i, **kind), list[int]()
        for step in range(steps):
            logits = random_logits(1, seed=step * 100 + i, dtype=dtype)[0]
            shares = distribution(logits, sampling, prompt=PROMPT, output=output, stops=STOPS)
            noise = gumbel(torch.tensor([i]), torch.tensor([len(PROMPT) + step]), torch.arange(VOCAB)[None])[0]
            output.append(int((shares.log() + noise).argmax()))
        expected.append(output)
    batch = Sampler(2 * len(SETTINGS) + 1, VOCAB)
    places = [2 * i + 1 for i in reversed(range(len(SETTINGS)))]
    for seq in range(batch.seqs):
        batch.join(seq, Sampling(temperature=1.0, repetition_penalty=3.0, seed=seq, logit_bias={1: 5.0}), [1, 2], STOPS)
    run(batch, [], 2, dtype)  # what sequences leave behind is not inherited
    for seq, kind, seed in zip(places, SETTINGS, range(len(SETTINGS)), strict=True):
        batch.join(seq, Sampling(seed=seed, **kind), PROMPT, STOPS)
    assert run(batch, places, steps, dtype) == expected
    for i, kind in enumerate(SETTINGS):
        alone = Sampler(1, VOCAB)
        alone.join(0, Sampling(seed=i, **kind), PROMPT, STOPS)
        logits = [random_logits(1, seed=step * 100 + i, dtype=dtype) for step in range(steps)]
        assert [alone(x, torch.tensor([len(PROMPT) + n])).fetch()()[0][0] for n, x in enumerate(logits)] == expected[i]


@pytest.mark.parametrize(("penalty", "seen"), [(5e-324, True), (1e-300, True), (1e-30, True), (1e300, False), (1.7e308, False)])
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.0}, {"temperature": 1e-9}, {"temperature": 1.0, "top_k": 9, "min_p": 0.1}]
)
def test_a_penalty_of_any_size_is_served(penalty: float, seen: bool, more: dict[str, Any]) -> None:
    """An infinite logit would draw token 0, which is neither."""
    logits = torch.linspace(-5, 5, VOCAB)[None].repeat(20, 1)
    logits[:, 0] = -4
    sampler = Sampler(20, VOCAB)
    for seq in range(20):
        sampler.join(seq, Sampling(repetition_penalty=penalty, seed=seq, **more), [1498, 1499])
    tokens = sampler(logits, torch.full((20,), 2)).fetch()()[0]
    assert all((token in (1498, 1499)) == seen for token in tokens)
    assert 0 not in tokens


def test_a_sequence_of_a_batch_is_sampled_by_itself() -> None:
    """The first token of a prompt comes before the others' next ones."""
    sampling = Sampling(temperature=1.0, top_k=50, frequency_penalty=1.0, seed=4)
    batch, alone = Sampler(3, VOCAB), Sampler(1, VOCAB)
    for sampler, seq in ((batch, 1), (alone, 0)):
        sampler.join(seq, sampling, PROMPT)
    logits, at = random_logits(3), torch.tensor([len(PROMPT)])
    first = batch(logits[:1], at, slice(1, 2)).fetch()()
    assert first == alone(logits[:1], at).fetch()()
    together = batch(logits, (at + 1).expand(3)).fetch()()[0]
    assert together[1] == alone(logits[1:2], at + 1).fetch()()[0][0]
    batch.leave(1)
    assert batch(logits, at.expand(3)).fetch()()[0] == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.5, "top_k": 9}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(9)]),
        ({"temperature": 1.5, "top_k": 1100}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(1100)]),
        ({"temperature": 1.5, "top_p": 0.7}, [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.7)]),
        ({"temperature": 2.5, "min_p": 0.05}, [TemperatureLogitsWarper(2.5), MinPLogitsWarper(0.05)]),
        (
            {"temperature": 2.5, "min_p": 0.05, "top_k": 40},
            [TemperatureLogitsWarper(2.5), TopKLogitsWarper(40), MinPLogitsWarper(0.05)],
        ),
        (
            {"temperature": 1.5, "repetition_penalty": 1.3, "top_p": 0.9},
            [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.9)],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_distribution_is_that_of_transformers(settings: dict[str, Any], processors: list[Any]) -> None:
    output = [40, 41, 40]
    draws, allowed = 0, 0
    for seed in range(5):
        logits = random_logits(1, seed=seed)
        scores = LogitsProcessorList(processors)(torch.tensor([PROMPT + output]), logits.double())
        expected = torch.softmax(scores[0], dim=0)
        found = distribution(logits[0], Sampling(**settings), prompt=PROMPT, output=output)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        sampler = Sampler(50, VOCAB)
        for seq in range(50):
            sampler.join(seq, Sampling(seed=seq, **settings), PROMPT + output)
        tokens = sampler(logits.expand(50, -1), torch.full((50,), len(PROMPT) + 3)).fetch()()[0]
        draws += 50
        allowed += sum(expected[token] > 0 for token in tokens)
    assert allowed == draws


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 6},
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "logit_bias": {2: 1.0, 30: -1.0}},
    ],
    ids="-".join,
)
def test_draws_are_distributed_as_defined(settings: dict[str, Any]) -> None:
    """Pearson's chi-square over 20 draws of 1,000 seeds each; its standard deviation is sqrt(2 df)."""
    vocabulary, seeds, steps, prompt = 40, 1000, 20, [1, 2, 3]
    logits = random_logits(1, vocabulary, seed=8) / 2
    sampler = Sampler(seeds, vocabulary)
    for seed in range(seeds):
        sampler.join(seed, Sampling(seed=seed, **settings), prompt)
    counts = torch.zeros(vocabulary)
    for step in range(steps):
        tokens = sampler(logits.expand(seeds, -1), torch.full((seeds,), len(prompt) + step)).tokens
        counts += tokens.bincount(minlength=vocabulary)
    expected = seeds * steps * distribution(logits[0], Sampling(**settings), prompt=prompt)
    assert (counts[expected == 0] == 0).all()
    many = expected >= 5
    rest = torch.stack([counts[~many].sum(), expected[~many].sum()])
    chi = (((counts - expected) ** 2 / expected)[many]).sum() + ((rest[0] - rest[1]) ** 2 / rest[1] if rest[1] else 0)
    freedom = int(many.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_a_seed_draws_the_same_tokens_for_ever() -> None:
    """Written down when the draw was made; results that name a seed depend on them."""
    logits = (torch.arange(1000) * 37 % 101 / 16.0).expand(6, 1000)
    for settings, tokens in (
        (Sampling(temperature=0.8, seed=3), [611, 29, 158, 857, 131, 60]),
        (Sampling(temperature=1.5, top_k=40, seed=-7), [939, 322, 767, 636, 524, 595]),
        (Sampling(temperature=1.0, top_p=0.2, seed=1 << 40), [262, 868, 999, 737, 969, 232]),
        (Sampling(temperature=0.9, top_k=300, top_p=0.5), [120, 191, 603, 19, 371, 816]),
    ):
        assert sample(logits, [settings] * 6, torch.arange(6) * 100).tolist() == tokens


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_k": 1100}, {"top_p": 0.5}, {"min_p": 0.3}, {"logit_bias": {4: 1.0}}])
def test_one_possible_token_is_drawn(how: dict[str, Any]) -> None:
    logits = torch.full((4, VOCAB), -torch.inf)
    logits[torch.arange(4), torch.tensor([0, 7, 700, VOCAB - 1])] = torch.tensor([-5.0, 0.0, 3.0, 1e30])
    for temperature in (0.0, 1e-30, 1e-3, 1.0, 1e6):
        sampler = Sampler(4, VOCAB)
        for seq in range(4):
            sampler.join(seq, Sampling(temperature=temperature, seed=seq, **how))
        assert sampler(logits, torch.arange(4)).fetch()()[0] == [0, 7, 700, VOCAB - 1]


def test_equal_logits_are_ranked_by_the_lowest_id() -> None:
    rows, positions = 300, torch.arange(300)
    logits = torch.zeros(VOCAB)
    logits[::2] = -0.0  # equal to 0
    logits[[3, 4, 900, 1200]] = torch.tensor([1.0, -1.0, 1.0, 1.0])
    expanded = logits.expand(rows, -1)
    for how, expected in (
        ({"top_k": 2}, {3, 900}),
        ({"top_k": 5}, {3, 900, 1200, 0, 1}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 1100, "top_p": 1e-9}, {3}),
        ({"min_p": 0.9}, {3, 900, 1200}),
    ):
        found = sample(expanded, [Sampling(temperature=100.0 if "min_p" not in how else 1.0, **how)] * rows, positions)
        assert set(found.tolist()) == expected
    assert sample(expanded[:1], [Sampling()], positions[:1]).item() == 3
    for k in (6, 1024, VOCAB):
        values, places = top(expanded[:2], k)
        order = logits.sort(descending=True, stable=True)
        assert torch.equal(places[1], order.indices[:k])
        assert torch.equal(values[1], order.values[:k])


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(8)
    for how in ({}, {"top_k": 10}, {"top_p": 0.5}):
        assert torch.equal(sample(logits, [Sampling(temperature=1e-6, **how)] * 8, torch.arange(8)), logits.argmax(dim=1))


def test_shares_that_reach_top_p_exactly_end_the_choice() -> None:
    """At any temperature, however large logits / temperature are: of two halves the second is one too many."""
    logits = torch.full((200, VOCAB), -1000.0)
    logits[:, [5, 900]] = 3.3
    for temperature in (1e-6, 0.3, 7.0):
        for how in ({"top_p": 0.5}, {"top_p": 0.5, "top_k": 10}):
            assert set(sample(logits, [Sampling(temperature=temperature, **how)] * 200, torch.arange(200)).tolist()) == {5}


def test_what_some_ask_changes_nothing_for_others() -> None:
    """A sequence whose settings need no sort, next to one whose settings do."""
    logits, positions = random_logits(3), torch.arange(3)
    kinds = [Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_k=7, seed=2), Sampling()]
    for other in (Sampling(temperature=1.0, top_p=0.4), Sampling(temperature=1.0, top_k=900), Sampling()):
        rows = torch.cat([logits, random_logits(1, seed=3)])
        tokens = sample(rows, [*kinds, other], torch.arange(4))[:3].tolist()
        assert tokens == [sample(logits[i : i + 1], [kinds[i]], positions[i : i + 1]).item() for i in range(3)]


def test_each_output_token_counts_once() -> None:
    """The likeliest token gives way to a frequency penalty after it has come three times, to a presence penalty at once."""
    for how, expected in (({"frequency_penalty": 0.4}, [0, 0, 0, 1, 0, 1]), ({"presence_penalty": 1.4}, [0, 1, 0, 0, 0, 0])):
        logits, sampling, sampler = torch.tensor([2.0, 1.0, -9.0]), Sampling(**how), Sampler(1, 3)
        output: list[int] = []
        sampler.join(0, sampling, [0])
        for position in range(1, 7):
            assert int(distribution(logits, sampling, prompt=[0], output=output).argmax()) == expected[position - 1]
            output.extend(sampler(logits[None], torch.tensor([position])).fetch()()[0])
        assert output == expected


def test_a_penalty_of_one_rounds_nothing_of_another() -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.float64)
    logits[:, 900], logits[:, 901] = 1.0, 1.0 + 1e-12
    sampler = Sampler(2, VOCAB)
    sampler.join(0, Sampling(frequency_penalty=1.0))
    for expected in ([901, 901], [900, 901]):
        assert sampler(logits, torch.arange(2)).fetch()()[0] == expected


def test_min_tokens_keeps_stop_tokens_back() -> None:
    sampler = Sampler(2, 6)
    for seq, sampling in enumerate((Sampling(min_tokens=2), Sampling(min_tokens=2, temperature=1.0, top_k=2))):
        sampler.join(seq, sampling, [1, 2, 3], stops=[5, 4])
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 50.0, 60.0]).expand(2, -1)
    found = [sampler(logits, torch.full((2,), position)).fetch()()[0] for position in (3, 4, 5)]
    assert [row[0] for row in found] == [3, 3, 5]
    assert max(found[0][1], found[1][1]) < 4 <= found[2][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprobs_are_those_of_the_model(dtype: torch.dtype) -> None:
    """Before temperature, bias and penalties; each request gets as many of the likeliest as it asked for at least."""
    sampler, logits = Sampler(3, VOCAB), random_logits(3, dtype=dtype)
    sampler.join(0, Sampling(temperature=1.0, logit_bias={3: 100.0}, logprobs=2))
    sampler.join(1, Sampling(logprobs=0))
    tokens, found = sampler(logits, torch.arange(3)).fetch()()
    assert found is not None
    exact = torch.log_softmax(logits.double(), dim=1)
    ranked = logits.sort(dim=1, descending=True, stable=True).indices
    for seq in range(3):
        assert found[seq].token == tokens[seq]
        assert found[seq].logprob == pytest.approx(exact[seq, tokens[seq]].item(), abs=1e-6)
        assert [token for token, _ in found[seq].top] == ranked[seq, :2].tolist()
        assert [value for _, value in found[seq].top] == pytest.approx(exact[seq, ranked[seq, :2]].tolist(), abs=1e-6)
    assert tokens[0] == 3
    sampler.leave(0)
    sampler.leave(1)
    assert sampler(logits, torch.arange(3)).fetch()() == (logits.argmax(dim=1).tolist(), None)


def test_scores_of_many_rows_are_those_of_each() -> None:
    logits, tokens = random_logits(150, 30), torch.arange(150) % 30
    whole = logprobs(score(logits, tokens, 99))
    assert whole == [logprobs(score(logits[i : i + 1], tokens[i : i + 1], 99))[0] for i in range(150)]
    assert {len(one.top) for one in whole} == {30}
    assert sum(math.exp(value) for _, value in whole[0].top) == pytest.approx(1)


def test_inference_mode_may_come_and_go() -> None:
    sampling = Sampling(temperature=1.0, frequency_penalty=1.0, logit_bias={2: 1.0}, min_tokens=1, logprobs=1)
    found = []
    for modes in ([False] * 4, [True, True, False, True]):
        with torch.inference_mode(modes[0]):
            sampler = Sampler(2, VOCAB)
        with torch.inference_mode(modes[1]):
            sampler.join(1, sampling, PROMPT, STOPS)
        for i in (2, 3):
            with torch.inference_mode(modes[i]):
                found.append(sampler(random_logits(2, seed=i), torch.full((2,), len(PROMPT) + i)).fetch()())
    assert found[:2] == found[2:]


def test_state_is_allocated_when_it_is_needed_and_a_step_reads_nothing_back() -> None:
    """Fake tensors raise where a value is asked of them."""
    with FakeTensorMode():
        sampler = Sampler(len(SETTINGS) + 1, VOCAB)
        for seq, kind in enumerate(SETTINGS):
            sampler.join(seq, Sampling(logprobs=seq % 4, **kind), PROMPT, STOPS)
        drawn = sampler(torch.empty(sampler.seqs, VOCAB), torch.empty(sampler.seqs, dtype=torch.int64))
        assert drawn.tokens.shape == (sampler.seqs,)
        assert drawn.scores is not None
    plain = Sampler(100, 10**9)  # a table of such rows would not fit anywhere
    plain.join(4, Sampling(temperature=1.0, top_p=0.9, seed=3), PROMPT)


@pytest.mark.gpu
def test_a_step_can_be_captured() -> None:
    """A capture fails where the host waits for the device. Replays choose and count as eager steps do."""
    inputs = [random_logits(len(SETTINGS), seed=seed).cuda() for seed in range(4)]
    found = []
    for captured in (False, True):
        sampler = Sampler(len(SETTINGS), VOCAB, "cuda")
        for seq, kind in enumerate(SETTINGS):
            sampler.join(seq, Sampling(seed=seq, logprobs=2, **kind), PROMPT, STOPS)
        logits, positions = inputs[0].clone(), torch.full((len(SETTINGS),), len(PROMPT), device="cuda")
        steps = [sampler(logits, positions).fetch()()]
        graph = torch.cuda.CUDAGraph()
        if captured:
            gc.disable()  # collecting a graph of another test would end the capture
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    drawn = sampler(logits, positions)
            finally:
                gc.enable()
        for one in inputs[1:]:
            logits.copy_(one)
            positions += 1
            if captured:
                graph.replay()
            else:
                drawn = sampler(logits, positions)
            steps.append(drawn.fetch()())
        found.append(steps)
    assert found[0] == found[1]


def test_split_gives_each_output_its_own_seed() -> None:
    parts = Sampling(temperature=1.0, top_k=5, seed=(1 << 63) - 2).split(3)
    assert [part.seed for part in parts] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
    assert {part.top_k for part in parts} == {5}
    assert len(set(parts)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0 and finite"),
        ({"temperature": math.nan}, "temperature is nan; it must be"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_p": 0}, "top_p is 0; it must be above 0"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be from 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0 to 1"),
        ({"top_k": 10**400}, "top_k is 1000"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"repetition_penalty": 10**400}, "repetition_penalty is 1000"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; it must be above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf; it must be at least 0 and finite"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3; it must be from -2 to 2"),
        ({"presence_penalty": -2.1}, "presence_penalty is -2.1; it must be from -2 to 2"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 is 101; it must be from -100 to 100"),
        ({"logit_bias": {"5": 1}}, "a token of logit_bias is '5'; it must be a whole number"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808; it must be from -9223372036854775808 to 9223372036854775807"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must be at most max_tokens, 8"),
        ({"logprobs": -1}, "logprobs is -1; it must be at least 0"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True; it must be a whole number"),
        ({"stop": ["a", ""]}, "a stop string must have at least one character"),
        ({"stop": [5]}, "stop is .5,.; it must be a tuple, each of it a word"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids is .'5',.; it must be"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)


def test_a_sampler_refuses_what_is_not_the_models() -> None:
    sampler, logits = Sampler(1, 40), random_logits(1, 40)
    sampler.join(0, Sampling(temperature=1.0, seed=2))
    expected = sample(logits, [Sampling(temperature=1.0, seed=2)], torch.arange(1))
    for settings, message in (
        (Sampling(logit_bias={40: 1.0}), "a token of logit_bias is 40; it must be from 0 to 39"),
        (Sampling(stop_token_ids=[50]), "a token of stop_token_ids is 50; it must be from 0 to 39"),
        (Sampling(logprobs=41), "logprobs is 41; it must be from 0 to 40"),
    ):
        with pytest.raises(ConfigError, match=message):
            sampler.join(0, settings)
    assert torch.equal(sampler(logits, torch.arange(1)).tokens, expected)


def test_changed_settings_are_written_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next draw, if they are others than the device has."""
    sent, real = list[int](), sampling_module.sent
    monkeypatch.setattr(sampling_module, "sent", lambda x, device: (sent.append(len(x)), real(x, device))[1])
    sampler, alone = Sampler(4, VOCAB), Sampler(1, VOCAB)
    hot = [Sampling(temperature=1.0, seed=seed, min_tokens=seed) for seed in range(4)]
    sent.clear()
    for seq in (3, 1):
        sampler.join(seq, hot[seq], stops=[5])
    assert sent == []
    logits = random_logits(4)
    first = sampler(logits, torch.zeros(4, dtype=torch.int64)).fetch()()[0]
    assert sent == [2]
    for seq in (3, 1):
        sampler.leave(seq)
        sampler.join(seq, hot[seq], stops=[5])
    sampler.move(3, 0)
    moved = sampler(logits[[3, 1, 2, 0]], torch.zeros(4, dtype=torch.int64)).fetch()()[0]
    assert moved[:2] == [first[3], first[1]]
    assert sent == [2, 2], "of the sequence that moved, and of its former place"
    alone.join(0, hot[3], stops=[5])
    assert alone(logits[3:], torch.zeros(1, dtype=torch.int64)).fetch()()[0] == [first[3]]


def test_settings_whose_copy_failed_are_written_with_the_next_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, hot, logits = Sampler(2, VOCAB), Sampling(temperature=2.0, seed=3), random_logits(2)
    sampler.join(1, hot)
    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "sent", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError):
            sampler(logits, torch.zeros(2, dtype=torch.int64))
    alone = Sampler(1, VOCAB)
    alone.join(0, hot)
    expected = alone(logits[1:], torch.zeros(1, dtype=torch.int64)).fetch()()[0]
    assert sampler(logits, torch.zeros(2, dtype=torch.int64)).fetch()()[0][1:] == expected
