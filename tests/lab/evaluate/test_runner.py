"""The runner: forks equal fresh caches, protocols, resuming, and what a line says."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvthaw
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.engine.chat_template import Chat, split_prompt
from kvthaw.engine.decode import forward, generate
from kvthaw.engine.hf.model import load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import ConfigError
from kvthaw.evaluate.evaluator import Piece, Progress
from kvthaw.evaluate.machine import fingerprint
from kvthaw.evaluate.results import ResultsFile, mean
from kvthaw.evaluate.variant import FULL, Variant
from kvthaw.index.units import UnitIndex
from kvthaw.methods import METHODS
from lab.evaluate import runner as run_of
from lab.evaluate.answers import Answers, AnswerText
from lab.evaluate.job import EVEN_DEPTHS, Job
from lab.evaluate.metrics import wilson
from lab.evaluate.prefills import part, prefilled
from lab.evaluate.runner import Runner, summarize
from lab.evaluate.tasks import TASKS, Sample, Task, find

ORACLE, STREAMING = Variant("oracle", 64), Variant("streaming", 64)


def runner(loaded: tuple[Any, Any], results: ResultsFile | None = None) -> Runner:
    return Runner(*loaded, results)


def count_forwards(model: Any) -> list[int]:
    """Tokens of every forward from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return seen


@pytest.mark.parametrize("question", ["dense", "sparse"])
def test_full_is_what_transformers_generates(loaded: tuple[Any, Any], folder: Path, question: Any) -> None:
    tokenizer = loaded[1]
    line = runner(loaded).run(Job("passkey", 600, 1, question=question), [])[FULL][0]
    sample = TASKS["passkey"].sample(tokenizer, length=600, seed=0, depth=0.0)
    ids = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = plain.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=257)
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    body = text.lstrip()
    assert line["output"] == text[: len(text) - len(body)] + body.partition("\n")[0]
    assert line["prompt"] == ids.shape[1] == 600
    assert line["sparse_steps"] == line["kv_host_bytes"] == 0
    assert line["kv_device_bytes"] == 2 * 2 * 2 * 16 * 4 * (line["prompt"] + line["new_tokens"] - 1)


@pytest.mark.parametrize("question", ["dense", "sparse"])
def test_room_for_everything_equals_full(loaded: tuple[Any, Any], question: Any) -> None:
    wide = Variant("oracle", 2000)
    found = runner(loaded).run(Job("passkey", 400, 2, question=question), [wide])
    assert [line["output"] for line in found[wide]] == [line["output"] for line in found[FULL]]
    assert all(line["attention_mass"] == pytest.approx(1, abs=1e-5) for line in found[wide])


@pytest.mark.parametrize(("question", "first"), [("dense", 1.0), ("sparse", 2.0)])
def test_a_question_after_the_prefill_waits_for_the_index(
    loaded: tuple[Any, Any], question: Any, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is a second later: one to index, one to each token."""
    clock = itertools.count()
    monkeypatch.setattr(run_of, "now", lambda _: float(next(clock)))
    line = runner(loaded).run(Job("passkey", 300, 1, question=question, probe=0), [ORACLE])[ORACLE][0]
    assert line["index_s"] == 1
    assert line["ttft_s"] - line["prefill_s"] == pytest.approx(first)
    assert line["tt2t_s"] - line["prefill_s"] == pytest.approx(3.0)


def test_one_prefill_serves_all_and_sparse_layers_ran(loaded: tuple[Any, Any]) -> None:
    seen = count_forwards(loaded[0])
    found = runner(loaded).run(Job("passkey", 600, 1), [ORACLE, STREAMING])
    assert [n for n in seen if n > 1] == [found[FULL][0]["prompt"]]
    for variant in (ORACLE, STREAMING):
        line = found[variant][0]
        assert line["sparse_steps"] == 2 * (line["new_tokens"] - 1)
        assert line["attended_max"] is not None
        assert line["attended_max"] <= 64 == line["held_budget"]
        assert line["attention_mass"] is not None
        assert 0 < line["attention_mass"] < 1
        assert line["kv_device_bytes"] < found[FULL][0]["kv_device_bytes"]
    assert found[ORACLE][0]["recall_at_k"] == 1
    assert found[STREAMING][0]["recall_at_k"] is None


@pytest.mark.parametrize(("question", "samples"), [("dense", 2), ("sparse", 1)])
def test_without_full_attention_each_method_prefills_for_itself(loaded: tuple[Any, Any], question: Any, samples: int) -> None:
    job, variants = Job("passkey", 250, samples, question=question), [ORACLE, STREAMING]
    shared, seen = runner(loaded).run(job, variants), count_forwards(loaded[0])
    alone = Runner(*loaded, **prefilled(loaded[0], full=False)).run(job, variants)
    assert FULL not in alone
    assert sum(n > 150 for n in seen) == samples * len(variants)
    for variant in variants:
        for mine, theirs in zip(alone[variant], shared[variant], strict=True):
            assert mine.key == theirs.key
            assert (mine["output"], mine["prompt"], mine["attended_max"]) == tuple(
                theirs[name] for name in ("output", "prompt", "attended_max")
            )
        assert summarize(alone[variant], ())["full_accuracy"] is None
    assert alone[ORACLE][0]["recall_at_k"] == pytest.approx(shared[ORACLE][0]["recall_at_k"])
    with pytest.raises(ConfigError, match="batch is 2; without full attention"):
        prefilled(loaded[0], full=False, batch=2)


def test_shards_take_the_samples_by_turns(loaded: tuple[Any, Any]) -> None:
    job, some = Job("passkey", 300, 3), [part(runner(loaded).places(Job("passkey", 300, 3)), (i, 2)) for i in (1, 2)]
    parts = [runner(loaded).run(job, [ORACLE], places=places) for places in some]
    assert [[record["seed"] for record in found[ORACLE]] for found in parts] == [[0, 2], [1]]
    whole = runner(loaded).run(job, [ORACLE])[ORACLE]
    assert sorted(record["output"] for found in parts for record in found[ORACLE]) == sorted(one["output"] for one in whole)


@dataclass(frozen=True)
class Uneven:
    """Pass keys in prompts of different lengths, the question's too."""

    task: Task
    name: str = "passkey"
    max_new_tokens: int = 8
    stops: tuple[str, ...] = ("\n", "7")

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        found = self.task.sample(tokenizer, length=length - 30 * seed, seed=seed, depth=depth, text=text)
        return replace(found, question="\nIt is" + " so" * seed)

    def score(self, sample: Sample, output: str) -> float:
        return self.task.score(sample, output)


SECONDS = ("prefill_s", "index_s", "ttft_s", "tt2t_s", "tpot_s")


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ("dense", ("full", "icecache-digest", "streaming")),
        (
            "sparse",
            ("full", "h2o", "icecache-reuse", "pariskv", "infinigen"),
        ),
    ],
)
def test_a_row_of_a_batch_gives_the_line_of_the_sample_alone(
    loaded: tuple[Any, Any], question: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded[0].double()  # rounding, which depends on the rows beside, decides nothing
    monkeypatch.setitem(TASKS, "passkey", Uneven(TASKS["passkey"]))
    monkeypatch.setattr("lab.evaluate.answers.stop_tokens", lambda *_: frozenset(range(0, 258, 7)))
    variants = [Variant(name) if name == "full" else Variant(name, 64) for name in names]
    job = Job("passkey", 320, 3, question=question, probe=2 if len(names) == 3 else 0)
    alone = Runner(*loaded, batch=1).run(job, variants)
    seen = count_forwards(loaded[0])
    together = Runner(*loaded, batch=3).run(job, variants)
    assert sum(n > 100 for n in seen) == len({line["prompt"] for line in together[FULL]}) == 3
    assert any(len({line["new_tokens"] for line in lines}) > 1 for lines in together.values())
    for variant in variants:
        for one, row in zip(alone[variant], together[variant], strict=True):
            assert row.setting == one.setting
            mine, theirs = dict(row.measures), dict(one.measures)
            for name in ("attention_mass", "recall_at_k", "output_error"):
                left, right = mine.pop(name), theirs.pop(name)
                assert left == (right if right is None else pytest.approx(right, abs=1e-4)), (variant, name)
            for name in SECONDS:
                assert mine.pop(name) is None
                del theirs[name]
            assert (mine.pop("rows"), theirs.pop("rows")) == (3, 1)
            del mine["step_s"], theirs["step_s"]
            assert mine == theirs, variant
            assert variant == FULL or (row["sparse_steps"] > 0 and row["attended_max"] <= 64 == row["held_budget"])


def test_one_index_serves_the_budgets_of_a_method(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    inner = UnitIndex.build

    def build(self: Any, seq: int, *args: Any) -> None:
        built.append(seq)
        inner(self, seq, *args)

    monkeypatch.setattr(UnitIndex, "build", build)
    names = ("quest", "quest:page=8", "quest")
    variants = [Variant(name, budget, dense_layers=0) for name in names for budget in (64, 128, 96)]
    job = Job("passkey", 400, 2, probe=0)
    alone = Runner(*loaded, batch=1).run(job, variants)
    assert len(built) == 2 * 2 * 6, "two layers, two samples, six variants: seconds are of one's own index"
    built.clear()
    together = Runner(*loaded, batch=2).run(job, variants)
    assert len(built) == 2 * 2 * 2
    for variant in variants:
        for one, row in zip(alone[variant], together[variant], strict=True):
            assert row.setting == one.setting
            mine, theirs = dict(row.measures), dict(one.measures)
            for name in (*SECONDS, "step_s", "rows"):
                del mine[name], theirs[name]
            assert mine == theirs, variant


@pytest.mark.parametrize("places", [1, 2])
def test_nothing_of_a_unit_is_left_when_it_is_done(
    loaded: tuple[Any, Any], places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Any]] = []
    inner = DenseLayer.offloaded

    def offloaded(self: DenseLayer, *how: Any) -> Any:
        seen.extend((weakref.ref(self), weakref.ref(inner(self, *how))))
        return inner(self, *how)

    monkeypatch.setattr(DenseLayer, "offloaded", offloaded)
    job = Job("passkey", 320, places, probe=0)
    piece = Piece(job, tuple(job.cells()), (FULL, Variant("quest", 64, dense_layers=0), Variant("h2o", 64, dense_layers=0)))
    gc.collect()
    gc.disable()
    try:
        assert len(list(Runner(*loaded, batch=places).compute(piece))) == 3
        assert len(seen) == 2 * 2 * 2
        assert [one() for one in seen] == [None] * 8
    finally:
        gc.enable()


@pytest.mark.gpu
def test_rows_on_a_gpu_share_what_is_offloaded_and_indexed() -> None:
    model, tokenizer = load(device="cuda", dtype="float32")
    names = [name for name in METHODS if name != "full"]
    variants = [Variant(name, budget, dense_layers=0) for name in names for budget in (96, 128)]
    job = Job("passkey", 2500, 3, probe=0)  # two full blocks, and some tokens that are each fork's own
    alone = Runner(model, tokenizer, batch=1).run(job, variants)
    together = Runner(model, tokenizer, batch=3).run(job, variants)
    pairs = [pair for one in variants for pair in zip(alone[one], together[one], strict=True)]
    for one, row in pairs:
        assert (row["kv_device_bytes"], row["kv_host_bytes"]) == (one["kv_device_bytes"], one["kv_host_bytes"]), one.setting
    differ = [one.setting["method"] for one, row in pairs if one["output"] != row["output"]]
    assert len(differ) <= len(pairs) // 20, differ  # rounding may change what lies at a boundary, sharing nothing


def test_batches_are_even_and_bounded(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    many = Runner(*loaded, batch=None)
    assert [len(unit.places) for unit in many.missing(Job("passkey", 400, 80), [FULL])] == [40, 40]
    monkeypatch.setattr("kvthaw.evaluate.prefills.MOST_BYTES", 1600 * 2 * 2 * 2 * 16 * 4)
    assert [len(unit.places) for unit in many.missing(Job("passkey", 400, 10), [FULL])] == [3, 3, 4]
    assert [len(unit.places) for unit in many.missing(Job("passkey", 400, 2), [Variant("oracle", 0.5, dense_layers=0)])] == [
        1,
        1,
    ]
    with pytest.raises(ConfigError, match="batch is 0"):
        Runner(*loaded, batch=0)
    asked = Runner(*loaded, batch=7).missing(Job("passkey", 400, 14), [FULL])
    assert [len(unit.places) for unit in asked] == [7, 7]


def test_sparse_question_goes_through_the_sparse_path_token_by_token(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    line = runner(loaded).run(Job("passkey", 600, 1, question="sparse"), [ORACLE])[ORACLE][0]
    sample = TASKS["passkey"].sample(tokenizer, length=600, seed=0, depth=0.0)
    context, question = split_prompt(tokenizer, sample.context, sample.question)
    assert line["sparse_steps"] == 2 * (len(question) + line["new_tokens"] - 1)
    cache = kvthaw.Cache(model, "oracle", budget=64)  # the same, without the runner
    logits = prefill(model, cache, context)
    for token in question:
        logits = forward(model, cache, [[token]])[0]
    answer = Answers(model, tokenizer, cache)
    assert len(list(answer.stream(logits[None], [[]], 8))) > 0
    assert answer.texts == [line["output"]]


def test_dense_layers_are_counted_beside(loaded: tuple[Any, Any]) -> None:
    some = Variant("oracle", 64, dense_layers=1)
    line = runner(loaded).run(Job("passkey", 600, 1), [some])[some][0]
    assert line["sparse_steps"] == line["new_tokens"] - 1
    assert line["kv_dense_bytes"] == 2 * 2 * 16 * 4 * (line["prompt"] + line["new_tokens"] - 1)
    assert line["kv_device_bytes"] == 2 * 2 * 16 * 4 * 64


def test_run_continues_where_the_file_ends(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 2), [ORACLE])
    assert len(path.read_text().splitlines()) == 4
    seen = count_forwards(loaded[0])
    again = runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 2), [ORACLE])
    assert seen == []
    assert again == first
    more = runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 3), [ORACLE, STREAMING])
    assert len(path.read_text().splitlines()) == 4 + 2 + 3  # full attention and oracle for the third sample, streaming for all
    assert sum(n > 1 for n in seen) == 3
    assert len(more[STREAMING]) == 3
    loaded[0].lm_head.weight.data[0] += 1  # other weights, other results
    runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 1), [])
    assert len(path.read_text().splitlines()) == 10
    path.write_text(path.read_text() + '{"not": "a result"}\n')
    with pytest.raises(ConfigError, match="line 11 is not a result"):
        ResultsFile(path)


def test_a_torn_last_line_is_run_again(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 2), [])
    text = path.read_text()
    path.write_text(text[:-40])
    runner(loaded, ResultsFile(path)).run(Job("passkey", 400, 2), [])
    assert [json.loads(line)["setting"]["seed"] for line in path.read_text().splitlines()] == [0, 1]


def test_two_processes_that_share_a_file_write_each_line_once(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ResultsFile(path), ResultsFile(path)  # neither has seen the other's lines
    for results in (first, second):
        runner(loaded, results).run(Job("passkey", 400, 2), [])
    assert [json.loads(line)["setting"]["seed"] for line in path.read_text().splitlines()] == [0, 1]
    assert list(ResultsFile(path)) == list(second)


def test_summary_has_the_means(loaded: tuple[Any, Any]) -> None:
    found = runner(loaded).run(Job("passkey", 400, 3, seed=5), [ORACLE])
    summary = summarize(found[ORACLE], found[FULL])
    record = json.loads(json.dumps(summary))
    expected = {"task": "passkey", "method": "oracle", "budget": 64, "length": 400, "n": 3, "seed": 5}
    assert {name: record[name] for name in expected} == expected
    assert record["hit_rate"] == pytest.approx(sum(line["hit_rate"] or 0 for line in found[ORACLE]) / 3)
    assert record["tpot_s"] == pytest.approx(sum(line["tpot_s"] or 0 for line in found[ORACLE]) / 3)


def test_progress_tells_prefill_and_samples(loaded: tuple[Any, Any]) -> None:
    told: list[Progress] = []
    runner(loaded).run(Job("passkey", 400, 2), [], told.append)
    assert (told[0].samples, told[0].of, told[0].doing, told[0].tokens) == (0, 2, "prefill", 0)
    assert 300 < told[2].tokens == told[2].prompt
    assert told[-1].samples == 2


def test_samples_spread_over_the_depths() -> None:
    forty = Job("passkey", 400, 40).cells()
    assert sorted(depth for _, depth in forty[:20]) == sorted(depth for _, depth in forty[20:]) == list(EVEN_DEPTHS)
    for few in (1, 4, 16):
        assert Job("passkey", 400, few).cells() == forty[:few], "more samples add to those of fewer"
    four = sorted(depth for _, depth in forty[:4])
    assert four[0] < 0.25
    assert four[-1] >= 0.75
    for count in range(1, 12):
        depths = tuple(i / 20 for i in range(count))
        assert sorted(d for _, d in Job("passkey", 400, count, depths=depths).cells()) == list(depths)
    assert Job("passkey", 400, 2, seed=7, depths=()).cells() == [(7, None), (8, None)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "paskey"}, "task is 'paskey'"),
        ({"samples": 0}, "samples is 0"),
        ({"question": "both"}, "question is 'both'"),
        ({"depths": (1.5,)}, "a depth is 1.5"),
        ({"probe": -1}, "probe is -1"),
    ],
)
def test_bad_jobs_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Job(**{"task": "passkey", "length": 400, "samples": 1, **settings})


def test_bad_settings_cost_no_prefill(loaded: tuple[Any, Any]) -> None:
    seen = count_forwards(loaded[0])
    with pytest.raises(ConfigError, match="budget is 3"):
        runner(loaded).run(Job("passkey", 400, 1), [Variant("oracle", 3)])
    with pytest.raises(ConfigError, match="length 20 is too short"):
        runner(loaded).run(Job("passkey", 20, 1), [])
    with pytest.raises(ConfigError, match=r"positions end at 2,048"):
        runner(loaded).run(Job("passkey", 3000, 1), [])
    assert seen == []


def test_a_length_beyond_the_model_is_refused_before_a_prompt_is_made(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> None:
        pytest.fail("a prompt was made")

    monkeypatch.setattr(Runner, "_sample", made)
    with pytest.raises(ConfigError, match="the prompt has 3,000 tokens; the model's positions end at 2,048"):
        runner(loaded).run(Job("passkey", 3000, 1), [])


def test_prompt_is_split_where_the_tokens_are_the_same(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    context, question = split_prompt(tokenizer, "some text", "\nWhat?")
    assert context + question == tokenizer("some text\nWhat?")["input_ids"]
    assert tokenizer.decode(question) == "\nWhat?"


def test_answers_end_at_a_newline_after_the_first_word(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]

    def read(text: str, *stops: str, after: bool = True) -> tuple[str, bool]:
        answer = AnswerText(tokenizer, stops, after_first_word=after)
        shown = "".join(answer.push(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
        assert shown + answer.finish() == answer.text
        return answer.text, answer.stopped_by is not None

    assert [read(text, "\n") for text in ("", "\n", "\n 12")] == [("", False), ("\n", False), ("\n 12", False)]
    assert [read(text, "\n") for text in (" 12\n", "12\nand", "\n12\n")] == [(" 12", True), ("12", True), ("\n12", True)]
    assert read(" a\nb. c! d", "!", ".") == (" a\nb", True)
    assert read("\n 12", "\n", after=False) == ("", True)
    assert read("x" * 100 + "…end", "…end", "\n\n", after=False) == ("x" * 100, True)
    assert read("a… b") == ("a… b", False)


def test_other_texts_and_files_are_other_results(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    text, file = "Snow fell. Nobody spoke! Why? " * 9, tmp_path / "kv.jsonl"
    file.write_text(json.dumps({"ordered_kv_records": [["a-b", "c-d"], ["e-f", "g-h"]], "key": "e-f", "value": "g-h"}))
    run = runner(loaded)
    jobs = [Job("passkey", 400, 1), Job("passkey", 400, 1, text=text), Job("kv_retrieval", 400, 1, data=file)]
    usual, snow, read = (run.run(job, [])[FULL][0] for job in jobs)
    assert usual.setting["source"] == ""
    assert len({line.setting["source"] for line in (usual, snow, read)}) == 3
    assert read["answers"] == ["g-h"]
    assert (usual["prompt"], snow["prompt"]) == (400, 400)
    assert usual["output"] != snow["output"]
    with pytest.raises(ConfigError, match="holds 1 samples"):
        run.run(Job("kv_retrieval", 400, 2, data=file), [])


def test_chunked_prefill_is_exact_and_counts(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    ids, told = torch.randint(0, 256, (300,)).tolist(), []
    whole, parts = (kvthaw.Cache(model, "oracle", budget=64) for _ in range(2))
    one = prefill(model, whole, ids)
    many = prefill(model, parts, ids, chunk=100, progress=lambda done, total: told.append((done, total)))
    torch.testing.assert_close(one, many, atol=1e-4, rtol=1e-4)
    assert told == [(done, 300) for done in (0, 50, 100, 150, 200, 250, 300)]


def test_tokens_follow_their_seed_and_end_at_the_limit_or_a_stop(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded

    def tokens(limit: int = 12, stops: frozenset[int] = frozenset(), **how: Any) -> list[int]:
        cache = kvthaw.Cache(model, "oracle", budget=64)
        logits = prefill(model, cache, list(range(3, 90)))
        return list(generate(model, cache, logits, limit=limit, stops=stops, sampling=Sampling(**how)))

    drawn = tokens(temperature=2.0, seed=1)
    assert drawn == tokens(temperature=2.0, seed=1) != tokens(temperature=2.0, seed=2)
    assert tokens(temperature=2.0, seed=1, stops=frozenset(drawn[5:6])) == drawn[: drawn.index(drawn[5])]
    assert tokens(limit=0) == []
    assert len(tokens(limit=1)) == 1


def test_rows_take_as_many_tokens_as_they_were_given(loaded: tuple[Any, Any]) -> None:
    """The last token of an answer is sent to no cache."""
    model, tokenizer = loaded
    cache = kvthaw.Cache(model, "full")
    logits = prefill(model, cache, list(range(3, 90)))
    answers = Answers(model, tokenizer, cache, until=())
    pieces = list(answers.stream(logits[None], [[]], 5))
    assert len(pieces) == answers.new_tokens[0] == 5 == answers.steps[0] + 1
    assert cache.get_seq_length() == 87 + 4
    assert torch.isfinite(forward(model, cache, [[5]])).all()


def test_settings_that_need_the_tokens_so_far_are_refused(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    cache = kvthaw.Cache(model, "full")
    prefill(model, cache, list(range(3, 90)))
    for how in ({"presence_penalty": 1.0}, {"min_tokens": 2}, {"logit_bias": {5: 1.0}}, {"grammar": object()}):
        with pytest.raises(ConfigError, match="needs the tokens so far"):
            Answers(model, tokenizer, cache, sampling=Sampling(**how))
    with pytest.raises(ValueError, match="1 rows of a cache and settings for 2"):
        Answers(model, tokenizer, cache, sampling=[Sampling()] * 2)


def test_wilson_against_known_values() -> None:
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 0) == (0.0, 1.0)
    assert mean([None, 1.0, float("nan"), 2.0]) == 1.5
    assert mean([None]) is None


def test_fingerprint_follows_the_weights(folder: Path) -> None:
    one, two = load(str(folder))[0], load(str(folder))[0]
    assert fingerprint(one) == fingerprint(two)
    two.model.norm.weight.data[3] += 0.5
    assert fingerprint(one) != fingerprint(two)


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_through_a_chat_template_has_room_for_a_sentence(name: str) -> None:
    task = find(name)
    assert Job(name, 4096, 1).limit(task) == task.max_new_tokens
    assert Job(name, 4096, 1, chat=Chat()).limit(task) >= task.max_new_tokens + 16
    assert Job(name, 4096, 1, chat=Chat(), max_new_tokens=3).limit(task) == 3
