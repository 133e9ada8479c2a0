"""lm-evaluation-harness's local-completions, asked through HTTP, finds what kvthaw lm-eval does; skipped, visibly, without it."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from servers import serving

import bytemodel
from kvthaw.engine.hf.model import load

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


def test_scores_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval
        from lm_eval.tasks import TaskManager

        from kvthaw.evaluate.harness import KvthawLM

    folder = bytemodel.save(tmp_path / "model")
    records = [{"q": f"{TEXT[: 20 + 31 * i]}Which animal is number {i}?", "gold": i % 3} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'data.jsonl'}\ntest_split: train\n"
    tasks = {
        "chosen": "output_type: multiple_choice\ndoc_to_choice: [' fox', ' an owl', ' dogs']\ndoc_to_target: gold\n",
        "said": "output_type: generate_until\ndoc_to_target: x\ngeneration_kwargs:\n  until: ['~~']\n  max_gen_toks: 12\n",
    }
    for name, text in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{common}doc_to_text: '{{{{q}}}}'\n{text}")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluate(model: Any, arguments: Any = None) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = lm_eval.simple_evaluate(
                model=model, model_args=arguments, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=True
            )
        assert found is not None
        return found

    ours = KvthawLM(pretrained=str(folder), device="cpu", dtype="float32", method="icecache", budget=64)
    wanted = evaluate(ours)
    ours.handle.detach()
    with serving(*load(str(folder), dtype="float32")) as served:
        arguments = {"model": "tiny", "base_url": f"{served.url}/v1/completions", "tokenizer": str(folder)}
        found = evaluate("local-completions", arguments | {"num_concurrent": 2, "tokenizer_backend": "huggingface"})
    for name in tasks:
        for metric, value in wanted["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, abs=1e-3), metric
    for a, b in zip(found["samples"]["chosen"], wanted["samples"]["chosen"], strict=True):
        scores = [[score for score, _ in one["filtered_resps"]] for one in (a, b)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    texts = [[one["resps"][0][0] for one in run["samples"]["said"]] for run in (found, wanted)]
    assert texts[0] == texts[1]
    assert all(texts[0])
