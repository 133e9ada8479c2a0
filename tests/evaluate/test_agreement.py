"""Agreement with full attention: its definition in float64, what is fed, one prefill, intervals, resuming, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvthaw.engine.generation_config import stop_tokens
from kvthaw.errors import ConfigError
from kvthaw.evaluate.agreement import (
    Agreement,
    Comparison,
    Prompt,
    divergence,
    interval,
    questions,
    summarize,
    whole_prompts,
    windows,
)
from kvthaw.evaluate.files import read_asset, read_prompts
from kvthaw.evaluate.report import enough
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.evaluate.variant import FULL, Variant

WIDE, NARROW = Variant("oracle", 1000), Variant("streaming", 64)
TEXT = read_asset("book.txt")[:4000]


def forwards(model: Any) -> list[int]:
    """Return a list that takes the tokens of every forward from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return seen


@pytest.fixture
def work(loaded: tuple[Any, Any]) -> Comparison:
    return Comparison(tuple(windows(loaded[1], TEXT, 300, 2, 6)), 6)


def test_full_is_itself_and_a_budget_that_covers_all_is_full(loaded: tuple[Any, Any], work: Comparison) -> None:
    found = {variant: summarize(some) for variant, some in Agreement(*loaded).run(work, [WIDE, NARROW]).items()}
    assert (found[FULL]["kl"], found[FULL]["same_top"], found[FULL]["kl_95"]) == (0.0, 1.0, (0.0, 0.0))
    assert found[WIDE]["kl"] < 1e-6
    assert found[NARROW]["kl"] > 1e-3
    assert found[NARROW]["kl_p99"] >= found[NARROW]["kl"]
    assert found[NARROW]["attended_mean"] <= 64 < found[WIDE]["attended_mean"]


@pytest.mark.parametrize("greedy", [True, False])
def test_what_follows_is_what_plain_transformers_says(
    loaded: tuple[Any, Any], work: Comparison, greedy: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tuple(Prompt(one.tokens, None if greedy else one.follows) for one in work.prompts)
    monkeypatch.setattr("kvthaw.evaluate.agreement.stop_tokens", lambda *_: frozenset())
    fed: list[Any] = []
    reader = Agreement(*loaded)
    follow = reader._follow
    reader._follow = lambda *given: fed.append(follow(*given)) or fed[-1]  # type: ignore[method-assign, func-returns-value]
    reader.run(Comparison(prompts, 6), [NARROW])
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row, prompt in enumerate(prompts):
        ids = list(prompt.tokens)
        with torch.no_grad():
            for step in range(6):
                token = (
                    int(plain(torch.tensor([ids])).logits[0, -1].argmax()) if prompt.follows is None else prompt.follows[step]
                )
                assert int(fed[0].tokens[row, step]) == token
                ids.append(token)
            expected = plain(torch.tensor([ids])).logits[0, -6:]
        own = torch.stack(fed[0].logits)[:, row]
        assert torch.allclose(own, expected, atol=1e-3)


def test_divergence_is_the_definition_in_float64() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(3, 50) * 4, torch.randn(3, 50) * 4
    for row, found in enumerate(divergence(p, q).tolist()):
        a, b = ([float(value) for value in logits[row]] for logits in (p, q))
        wa, wb = ([pow(2.718281828459045, value) for value in one] for one in (a, b))
        pa, pb = ([value / sum(one) for value in one] for one in (wa, wb))
        logs = [torch.tensor([x / y], dtype=torch.float64).log().item() for x, y in zip(pa, pb, strict=True)]
        assert found == pytest.approx(sum(x * log for x, log in zip(pa, logs, strict=True)), rel=1e-9)
    assert divergence(p, p).tolist() == [0.0] * 3
    assert divergence(torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 0.0])).item() == pytest.approx(0.6931471805599453)


def test_one_prefill_a_prompt_serves_all_variants(loaded: tuple[Any, Any], work: Comparison) -> None:
    seen = forwards(loaded[0])
    Agreement(*loaded).run(work, [WIDE, NARROW, Variant("streaming", 128)])
    assert sum(n for n in seen if n > 1) == 2 * 300


def test_an_interval_is_drawn_over_prompts_and_the_same_for_a_seed() -> None:
    values = [[0.1, 0.3], [0.2], [0.9, 0.5, 0.7], *([i / 17] for i in range(13))]
    low, high = interval(values, 3) or (0.0, 0.0)
    assert interval(values, 3) == (low, high) != interval(values, 4)
    assert 0.1 <= low < sum(map(sum, values)) / 19 < high <= 0.7
    assert interval([[0.1, 0.2]]) is None
    assert interval([[0.25, 0.75], [0.5]]) == (0.5, 0.5)


def test_one_sentence_says_which_budget_keeps_99_percent_of_the_tokens() -> None:
    def one(method: str, budget: int | None, same: float, dense: int = 2) -> dict[str, Any]:
        named = {"method": method, "budget": budget, "retrieved": None, "dense_layers": dense}
        return {**named, "same_top": same, "attended_mean": budget}

    full = one("full", None, 1.0)
    near = [one("near", 1024, 1.0), one("near", 64, 0.98), one("near", 256, 0.99)]
    luck = [one("luck", 64, 1.0), one("luck", 256, 0.9), one("luck", 1024, 0.995)]
    found = enough([full, *near, *luck, one("far", 1024, 0.9)])
    assert found == (
        "Budgets from which on 99 % of next tokens are full attention's: 256 for near; 1024 for luck. "
        "None of these is enough for far."
    )
    assert ": 64 for near with 0 dense layers, near with 2 dense layers." in enough([one("near", 64, 1, 0), one("near", 64, 1)])
    assert enough([*near, *(one(f"far{i}", 64, 0.5) for i in range(5))]).endswith(
        "256 for near. None of these is enough for the other 5."
    )
    none = "No method keeps 99 % of full attention's next tokens with these budgets."
    assert enough([one(f"far{i}", 64, 0.5) for i in range(5)]) == none
    assert enough([full]) == ""


def test_an_answer_counts_up_to_its_end(loaded: tuple[Any, Any], work: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tuple(Prompt(one.tokens) for one in work.prompts)
    every = frozenset(range(len(loaded[1])))
    monkeypatch.setattr("kvthaw.evaluate.agreement.stop_tokens", lambda *_: every)
    records = Agreement(*loaded).run(Comparison(prompts, 6), [NARROW])[NARROW]
    assert [len(record["kl"]) for record in records] == [1, 1]
    assert stop_tokens(*loaded) < every


def test_results_are_resumed(loaded: tuple[Any, Any], work: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "agreement.jsonl"
    first = Agreement(*loaded, ResultsFile(path)).run(work, [NARROW])
    seen = forwards(loaded[0])
    again = Agreement(*loaded, ResultsFile(path)).run(work, [NARROW])
    assert not seen
    assert again == first
    assert len(path.read_text().splitlines()) == 4
    assert all(isinstance(record, Record) for record in again[FULL])
    Agreement(*loaded, ResultsFile(path)).run(work, [WIDE])
    assert len(path.read_text().splitlines()) == 6


def test_prompts_are_cut_in_the_middle_and_windows_where_the_text_is(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    tokenizer, path = loaded[1], tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT[:900], "short", "left out")))
    long, short = whole_prompts(tokenizer, read_prompts(path, 2), 101, None)
    whole = tokenizer(TEXT[:900])["input_ids"]
    assert (list(long.tokens), long.cut) == (whole[:50] + whole[-51:], True)
    assert (list(short.tokens), short.cut, short.follows) == (tokenizer("short")["input_ids"], False, None)
    first, last = windows(tokenizer, TEXT, 200, 2, 5)
    body = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert list(last.follows or ()) == body[-5:]
    assert first.tokens[-20:] != last.tokens[-20:]
    for asked in questions(tokenizer, TEXT, "Who is it?", 150, 3, None):
        assert 140 <= len(asked.tokens) <= 150
        assert tokenizer.decode(asked.tokens).endswith("Who is it?")


def test_what_cannot_be_compared_is_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    tokenizer, path = loaded[1], tmp_path / "prompts.jsonl"
    with pytest.raises(ConfigError, match="the text has"):
        windows(tokenizer, TEXT, 10**6, 2, 5)
    with pytest.raises(ConfigError, match="the question alone takes"):
        questions(tokenizer, TEXT, "Who is it? " * 9, 20, 3, None)
    path.write_text('{"prompt": "good"}\n{"prompt": 3}\n')
    with pytest.raises(ConfigError, match="prompt of record 2 is 3"):
        read_prompts(path)
    path.write_text('{"text": "good"}\n')
    with pytest.raises(ConfigError, match="'prompt'"):
        read_prompts(path)
