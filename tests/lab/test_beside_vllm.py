"""vLLM beside kvthaw: order, resuming, failures and the table with a fake vLLM, and kvthaw's side on a tiny model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvthaw.bench.shapes import SHAPES
from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record, ResultsFile
from lab import beside_vllm
from lab.beside import kvthaw_side
from lab.beside.cases import KVTHAW, MARK, VLLM, Case, heard, serve_cases, steps_of
from lab.beside.table import difference, table
from lab.beside_vllm import Command, Run

FAKE = str(Path(__file__).parent / "fake_vllm")
CASE = Case(
    part="first", side=VLLM, method=VLLM, shape="tiny", layers=4, length=120, seqs=1, new=1, rate=0.0, trace="", requests=0, turn=0,
    device="cpu",
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "budget": 64, "retrieved": 8, "new": 12, "places": 2, "commit": "c", "vllm_share": 0.9, "vllm_offload": 0.0,
    "sizes": SHAPES["tiny"], "traces": "", "checkpoint": "",
}  # fmt: skip


def vllm_run(folder: Path, **more: Any) -> Run:
    commands = {VLLM: Command(sys.executable, "lab.beside.vllm_side", FAKE)}
    times: dict[str, Any] = {"limit": 30.0, "start": 60.0, "until": time.monotonic() + 120} | more
    return Run(commands, ResultsFile(folder / "out.jsonl"), OPTIONS, folder, **times)


def test_vllm_measures_what_it_can_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    raises, ends, good = replace(CASE, length=55), replace(CASE, length=77), replace(CASE, part="decode", new=12)
    run = vllm_run(tmp_path)
    run.side(VLLM, [raises, ends, good])
    found = run.known.get(good.setting)
    assert found is not None
    assert (found["steps"], found["about"]["vllm"]) == (5, "0.fake")
    assert run.failed[raises] == "MemoryError: no room for 55 tokens"
    assert run.failed[ends].startswith("its process ended with status 3")
    lines = (tmp_path / "out.jsonl").read_text()
    again = vllm_run(tmp_path)
    again.commands = {}  # a process would need one
    again.side(VLLM, [good])
    assert (tmp_path / "out.jsonl").read_text() == lines


def test_a_case_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    run = vllm_run(tmp_path, limit=2.0)
    slow = replace(CASE, length=99, turn=1)
    run.side(VLLM, [CASE, slow])
    assert run.known.get(CASE.setting) is not None
    assert run.failed == {slow: "it took longer than 2 s"}


def test_a_side_that_never_starts_fails_alone(tmp_path: Path) -> None:
    run = vllm_run(tmp_path)
    run.commands = {VLLM: Command(sys.executable, "no_such_module")}
    run.side(VLLM, [CASE])
    assert "2 processes ended before a case" in run.failed[CASE]
    assert "no_such_module" in run.failed[CASE]
    late = vllm_run(tmp_path, until=time.monotonic() - 1)
    late.side(VLLM, [CASE])
    assert late.failed == {CASE: "no time was left"}


def test_sides_alternate_and_kvthaw_writes_the_weights_first(capsys: pytest.CaptureFixture[str]) -> None:
    order = list[tuple[str, str, int]]()

    class Told(Run):
        def side(self, side: str, cases: Any, *, again: bool = False) -> None:
            order.append((side, cases[0].part, cases[0].turn))
            for case in cases:
                self.known.add(Record(case.setting, {"answers": [], "ttft_s": 1.0, "about": {"vllm": "0"}}))

    run = Told({}, ResultsFile(), OPTIONS, Path(), limit=1, start=1, until=0)
    groups = {
        (part,): [replace(CASE, part=part), replace(CASE, part=part, side=KVTHAW, method="full")]
        for part in ("check", "first", "short")
    }
    assert beside_vllm.measure(run, groups, 2, [VLLM, KVTHAW]) == 1  # no answers, so no agreement
    turn = [(KVTHAW, "check"), (VLLM, "check"), (VLLM, "first"), (KVTHAW, "first"), (KVTHAW, "short"), (VLLM, "short")]
    assert order == [(*one, n) for n in range(2) for one in turn]
    assert "| 120: first token, s | 1.00 | 1.00 | 1.00 |" in capsys.readouterr().out


def test_the_table_has_medians_of_turns_and_failures() -> None:
    ours = replace(CASE, side=KVTHAW, method="full")
    found = [
        (replace(CASE, turn=n), Record({}, {"ttft_s": s, "about": {"vllm": "1.2"}})) for n, s in enumerate((2.0, 9.0, 4.0))
    ]
    batch = replace(CASE, part="batch", length=131072)
    found += [(ours, Record({}, {"ttft_s": 2.0}))]
    found += [(batch, Record({}, {"output_tokens_per_s": 160.4, "seqs": 6, "about": {"vllm": "1.2"}}))]
    failed = {replace(batch, side=KVTHAW, method="full"): "no memory"}
    lines = table(found, failed).splitlines()
    assert lines[0] == "|  | vLLM 1.2 | kvthaw full | kvthaw's best of vLLM's |"
    assert lines[2] == "| 120: first token, s | 4.00 | 2.00 | 0.50 |"
    assert lines[3] == "| 128k, batch: output tokens/s | 160 (6 sequences) | failed |  |"
    assert lines[-1] == "failed: batch, full, 131,072, turn 0: no memory"


def test_outputs_are_compared() -> None:
    check = replace(CASE, part="check")

    def answers(tokens: list[int], value: float) -> Record:
        return Record({}, {"answers": [{"tokens": tokens, "top": [[5, value], [6, -2.0]]}]})

    ours = replace(check, side=KVTHAW, method="full"), answers([5, 6], -1.0)
    near, far = (difference([ours, (check, answers([5, 7], value))]) for value in (-1.05, -1.5))
    assert near is not None
    assert near[0]
    assert "1 of 1 first tokens are equal, 1 of 2 of all" in near[1]
    assert far is not None
    assert not far[0]
    assert difference([ours]) is None


def test_lines_of_libraries_are_no_events(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(case: Case) -> dict[str, Any]:
        print("a library's line")
        raise ValueError

    serve_cases([CASE], measure)
    events = [event for line in capsys.readouterr().out.splitlines() if (event := heard(line)) is not None]
    assert [event["event"] for event in events] == ["begin", "failed"]
    assert events[1]["error"] == "ValueError: no message"
    assert heard(MARK + "{") is None


def test_steps_are_those_of_the_later_half() -> None:
    found = steps_of([0.0, 5.0, 5.1, 5.2, 5.3], seqs=2)
    assert found["tpot_s"] == pytest.approx(0.1)
    assert found["output_tokens_per_s"] == pytest.approx(20)


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_vllm", "--parts", "first,lunch"])
    with pytest.raises(ConfigError, match="'lunch' is none of first, decode"):
        beside_vllm.main()


@pytest.mark.slow
def test_kvthaw_serves_every_part(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"timestamp": 10 * n, "input_length": 20, "output_length": 4}) for n in range(3)))
    base = replace(CASE, side=KVTHAW, method="quest", length=80)
    cases = [
        base,
        replace(base, part="decode", new=12),
        replace(base, part="batch", new=12, seqs=2),
        replace(base, part="short", seqs=3, new=4),
        replace(base, part="trace", length=100, requests=3, trace=trace.name, rate=100.0),
        replace(base, part="check", method="full", seqs=2, new=4),
    ]
    side = kvthaw_side.Side(cases, OPTIONS | {"traces": str(tmp_path), "checkpoint": str(tmp_path)})
    first, decode, batch, short, asked, check = [side.measure(case) for case in cases]
    assert len(first["ttft_all_s"]) == 2
    assert (decode["steps"], batch["steps"], batch["seqs"]) == (5, 5, 2)
    assert (short["requests"], short["output_tokens"]) == (3, 12)
    assert (asked["requests"], asked["output_tokens"]) == (3, 12)
    assert [len(one["tokens"]) for one in check["answers"]] == [4, 4]
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
