"""kvthaw as a model of lm-evaluation-harness; skipped, visibly, where that is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvthaw
from kvthaw.cli import app
from kvthaw.cli.harness import with_path
from kvthaw.engine.hf.model import load, shipped_path
from kvthaw.errors import ConfigError

RUN = (sys.executable, "-W", "ignore", "-c", "from kvthaw.cli import main; main()", "lm-eval")
TEXT = "The quick brown fox jumps over the lazy dog. " * 6
there = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness")
slow = pytest.mark.slow


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings, of which the harness has many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_command_says_what_to_install() -> None:
    said = CliRunner().invoke(app, ["lm-eval", "--tasks", "gsm8k"])
    assert said.exit_code == 1
    assert "lm-evaluation-harness is not installed (No module named 'lm_eval'): pip install kvthaw[lm-eval]" in said.stderr


def test_the_name_of_the_model_that_ships_becomes_its_folder() -> None:
    where = f"pretrained={shipped_path()}"
    assert with_path(["--model_args", "method=quest,pretrained=shipped,budget=64"])[1] == f"method=quest,{where},budget=64"
    assert with_path(["--model_args=pretrained=shipped"]) == [f"--model_args={where}"]
    others = ["pretrained=shipped-more", "not_pretrained=shipped", "shipped", "--tasks", "pretrained=my/shipped"]
    assert with_path(others) == others


class Request:
    """What the harness asks."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def made(folder: Path) -> Any:
    """Makes models of the harness, and detaches them afterwards."""
    with quiet():
        from kvthaw.evaluate.harness import KvthawLM

    models: list[Any] = []

    def make(**arguments: Any) -> Any:
        models.append(KvthawLM(pretrained=str(folder), device="cpu", dtype="float32", **arguments))
        return models[-1]

    yield make
    for model in models:
        model.handle.detach()


@there
@slow
@quiet()
def test_likelihoods_are_full_attentions_or_the_methods(made: Any, folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    requests = [Request(TEXT, more) for more in (" cat", " dogs")] + [Request("x", " cat")]
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32").loglikelihood(requests)
    dense = made(method="streaming", budget=64, batch_size=2).loglikelihood(requests)
    full = made(method="full", sparse_tokens=8).loglikelihood(requests)
    sparse = made(method="streaming", budget=64, sparse_tokens=8).loglikelihood(requests)
    for (a, _), (b, _), (c, _) in zip(theirs, dense, full, strict=True):
        assert a == pytest.approx(b, abs=1e-3) == pytest.approx(c, abs=1e-3)
    assert all(abs(a[0] - d[0]) > 1e-2 for a, d in zip(theirs[:2], sparse[:2], strict=True))
    assert sparse[2][0] == pytest.approx(theirs[2][0], abs=1e-3)  # the budget holds all of a short prompt


@there
@slow
@quiet()
@pytest.mark.parametrize("sparse_tokens", [0, 8])
def test_answers_are_decoded_through_the_method(made: Any, folder: Path, sparse_tokens: int) -> None:
    ask = [Request(TEXT, {"until": ["never"], "max_gen_toks": 12}), Request("Who", {"until": ["never"], "max_gen_toks": 6})]
    lm = made(method="oracle", budget=64, sparse_tokens=sparse_tokens)
    answers = lm.generate_until(ask)
    model, tokenizer = load(str(folder))
    expected = []
    for request in ask:
        ids = tokenizer(request.args[0], return_tensors="pt")["input_ids"]
        cache = kvthaw.Cache(model, "oracle", budget=64)
        if sparse_tokens:
            split = max(1, ids.shape[1] - sparse_tokens)
            model(ids[:, :split], past_key_values=cache)
            for place in range(split, ids.shape[1] - 1):
                model(ids[:, place : place + 1], past_key_values=cache)
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=request.args[1]["max_gen_toks"], do_sample=False, pad_token_id=257
        )
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert answers == expected
    assert 0 < lm.handle.stats().attended_max <= 64


@there
@quiet()
def test_settings_that_do_not_fit_are_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match="sparse_tokens is -1"):
        made(sparse_tokens=-1)
    with pytest.raises(ConfigError, match="batch_size is 4; with sparse_tokens it must be 1"):
        made(sparse_tokens=2, batch_size=4)
    with pytest.raises(ConfigError, match="method is 'nothing'"):
        made(method="nothing")


@there
@slow
def test_the_harness_runs_a_task_of_ones_own(folder: Path, tmp_path: Path) -> None:
    records = [{"q": f"{TEXT}Which animal is number {i}?", "a": "fox", "b": "owl"} for i in range(2)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'data.jsonl'}\ntest_split: train\n"
    asked = 'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
    answer = "output_type: generate_until\ngeneration_kwargs:\n  until: [never]\n  max_gen_toks: 8\n"
    tasks = {
        "mine_generated": f"{asked}{answer}metric_list:\n  - metric: exact_match\n",
        "mine_chosen": "doc_to_text: '{{q}}'\noutput_type: multiple_choice\ndoc_to_choice: ['fox', 'owl']\ndoc_to_target: 0\n",
    }
    (tmp_path / "tasks").mkdir()
    for name, text in tasks.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{common}{text}")
    done = subprocess.run(
        [
            *(
                *RUN,
                "--model_args",
                f"pretrained={folder},method=icecache-digest:promote=0.1,budget=64,dtype=float32,sparse_tokens=4",
            ),
            *("--tasks", ",".join(tasks), "--include_path", str(tmp_path / "tasks"), "--device", "cpu"),
            *("--output_path", str(tmp_path / "out"), "--log_samples"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    assert results["mine_generated"]["exact_match,none"] == 0.0
    assert results["mine_chosen"]["acc,none"] in (0.0, 0.5, 1.0)
    samples = next((tmp_path / "out").rglob("samples_mine_generated*.jsonl")).read_text()
    assert all(json.loads(line)["resps"][0][0] for line in samples.splitlines())
