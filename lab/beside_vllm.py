"""vLLM beside kvthaw on one machine: the same requests on both, in alternating order, and one table.

`python -m lab.beside_vllm --vllm-path FOLDER --out lab/results/beside_vllm.jsonl`. Each side runs in a process of its
own, alone on the GPU. `--kvthaw-path` names a folder of packages for kvthaw alone, such as FlashAttention 4. The sides take
turns, and the side that begins changes with each group of parts and each turn. Parts:

- check: both read the same weights of `--check-layers` layers; full attention's greedy tokens and first log-probabilities agree.
- first: seconds to the first token of one prompt. decode: milliseconds a token after it (8B shape, bfloat16, random weights; the
  later half of `--new` tokens). batch: tokens a second of as many sequences of the longest length as fit each side.
- short: 64 and 256 requests of 1,024 tokens at once, 256 new tokens each. trace: requests of `--trace` at `--rates` a second.

vLLM measures with dummy weights, so outputs are compared in `check` alone. kvthaw's batches have drawn keys and values.
`--precision=fp8` measures weights and KV of 8 bits, in kvthaw by torchao's Float8WeightOnlyConfig; kv8: KV alone. `--gpus=2` splits
vLLM's model. `--card=24` gives both sides 24 GiB of the GPU; vLLM then needs `--vllm-offload`, GiB of weights that it keeps in host
memory and reads in every step. A case that takes longer than `--limit` seconds is given up, and its side goes on with the next
case in a new process.
Cases whose lines are in `--out` are not measured again. Exits with 1 if a case failed or the check found different outputs.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvthaw.bench.shapes import SHAPES
from kvthaw.errors import ConfigError, one_of
from kvthaw.evaluate.results import Record, ResultsFile
from lab.beside.cases import CHECK, KVTHAW, LONG, MANY, PARTS, PRECISIONS, SIDES, VLLM, Case, heard
from lab.beside.table import difference, table
from lab.script import options

START = 240.0
"""Seconds within which a process must be ready, unless `--start` says otherwise."""
ROOT = Path(__file__).resolve().parent.parent
STARTS = 2
"""Processes of one side in a row that may end without a case."""


class Command:
    """How a side is started: its interpreter, and folders before PYTHONPATH."""

    def __init__(self, python: str, module: str, path: str = "") -> None:
        self.words = [*shlex.split(python), "-m", module]
        self.environment = os.environ | {"PYTHONPATH": ":".join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))}

    def start(self, plan: Path, log: Path) -> subprocess.Popen[str]:
        """Start a process, the leader of its group."""
        with log.open("a") as errors:
            return subprocess.Popen(
                [*self.words, str(plan)], cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip


class Run:
    """Measures cases in processes of their sides. failed: why a case has no line. limit, start: seconds of a case, and of a
    process until it is ready; until: the time (time.monotonic) after which nothing is measured."""

    def __init__(
        self, commands: Mapping[str, Command], known: ResultsFile, plan: dict[str, Any], logs: Path, *, limit: float, start: float,
        until: float,
    ) -> None:  # fmt: skip
        self.commands, self.known, self.plan, self.logs = commands, known, plan, logs
        self.limit, self.start, self.until = limit, start, until
        self.failed: dict[Case, str] = {}

    def side(self, side: str, cases: Sequence[Case], *, again: bool = False) -> None:
        """Measure the cases of one side that are not known yet, or all of them again, in as many processes as it takes."""
        left, idle = [case for case in cases if again or self.known.get(case.setting) is None], 0
        while left:
            if time.monotonic() >= self.until:
                self.failed |= dict.fromkeys(left, "no time was left")
                return
            done = self._process(side, left)
            idle = 0 if done else idle + 1
            left = [case for case in left if case not in done]
            if idle == STARTS:
                why = f"{STARTS} processes ended before a case: {_last_line(self.logs / f'{side}.err')}"
                self.failed |= dict.fromkeys(left, why)
                return

    def _process(self, side: str, cases: Sequence[Case]) -> list[Case]:
        """Run one process. Returns the cases that it measured or that failed."""
        log, plan = self.logs / f"{side}.err", self.logs / f"{side}.json"
        plan.write_text(json.dumps({"cases": [case.setting for case in cases], "options": self.plan}), encoding="utf-8")
        noted(f"{side}: {len(cases)} cases, from {cases[0]}")
        process, done, current, begun = self.commands[side].start(plan, log), list[Case](), None, time.monotonic()
        try:
            for event in self._events(process):
                if event is None:
                    why = "no time was left" if time.monotonic() >= self.until else f"it took longer than {self.limit:g} s"
                    break
                name = event["event"]
                if name == "ready":
                    noted(f"{side}: ready after {time.monotonic() - begun:.1f} s: {json.dumps(event['about'])}")
                elif name == "begin":
                    current, begun = Case(**event["setting"]), time.monotonic()
                elif name in ("found", "failed") and current is not None:
                    done.append(current)
                    self._keep(current, event, time.monotonic() - begun)
                    current = None
            else:
                why = f"its process ended with status {process.wait()}: {_last_line(log)}"
        finally:
            end(process)
        if current is not None:
            done.append(current)
            self.failed[current] = why
            noted(f"{current}: {why}")
        return done

    def _keep(self, case: Case, event: dict[str, Any], took: float) -> None:
        """Keep the line of a case, or note why there is none."""
        if event["event"] == "failed":
            self.failed[case] = event["error"]
            noted(f"{case}: failed after {took:.1f} s: {event['error']}")
            return
        record = Record(case.setting, {**event["measures"], "took_s": round(took, 1)})
        self.known.add(record)
        noted(f"{case}: {took:.1f} s")

    def _events(self, process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
        """Yield what a process tells, and None, the last, where it is silent for too long."""
        lines: queue.Queue[str | None] = queue.Queue()

        def pump() -> None:
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        deadline = time.monotonic() + self.start
        while True:
            try:
                line = lines.get(timeout=max(0.0, min(deadline, self.until) - time.monotonic()))
            except queue.Empty:
                yield None
                return
            if line is None:
                return
            event = heard(line)
            if event is not None:
                deadline = time.monotonic() + self.limit
                yield event


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, and wait until it is gone: the other side gets the whole GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1][:200] if lines else "it printed nothing"


def noted(text: str) -> None:
    """Print a remark beside the table."""
    print(text, file=sys.stderr, flush=True)


def device_name() -> str:
    """Return the GPU's name without a CUDA context in this process, "cpu" where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "cpu"
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return found[0].strip() if found else "cpu"


def cases_of(given: Any, device: str) -> dict[tuple[str, ...], list[Case]]:
    """Return the cases of one turn of both sides, by the parts that one process serves. Raises ConfigError for an unknown part."""
    parts = given.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"parts is {given.parts!r}; {part!r} is none of {', '.join(PARTS)}")
    if given.gpus > 1 and KVTHAW in given.sides.split(","):
        raise ConfigError(f"gpus is {given.gpus}; kvthaw's steps on several are measured by lab.split: use --sides vllm")
    one_of(PRECISIONS, precision=given.precision)
    lengths = [int(text) for text in given.lengths.split(",")]
    layers = given.layers or SHAPES[given.shape]["num_hidden_layers"]
    base = Case(
        part="", side=VLLM, method=VLLM, shape=given.shape, layers=layers, length=0, seqs=1, new=1, rate=0.0, trace="", requests=0,
        turn=0, device=device, precision=given.precision, gpus=given.gpus, card=given.card,
    )  # fmt: skip
    found = list[Case]()
    if "check" in parts:
        found.append(replace(base, part="check", layers=given.check_layers, length=given.short_length, seqs=4, new=16))
    for length in lengths:
        found += [replace(base, part="first", length=length)] if "first" in parts else []
        found += [replace(base, part="decode", length=length, new=given.new)] if "decode" in parts else []
    if "batch" in parts:
        found.append(replace(base, part="batch", length=max(lengths), seqs=given.seqs, new=given.batch_new))
    for count in given.short.split(",") if "short" in parts else ():
        found.append(replace(base, part="short", length=given.short_length, seqs=int(count), new=given.short_new))
    for rate in given.rates.split(",") if "trace" in parts else ():
        name = given.trace.name if given.trace else "drawn"
        many = {"length": given.capacity, "requests": given.requests, "trace": name, "rate": float(rate)}
        found.append(replace(base, part="trace", seqs=0, new=0, **many))
    methods = {**dict.fromkeys(("first", "decode"), given.methods), "batch": given.batch_methods, "check": "full"}
    methods |= dict.fromkeys(MANY, given.many_methods)
    groups = {group: [case for case in found if case.part in group] for group in (CHECK, LONG, MANY)}
    return {
        group: [*cases, *(replace(c, side=KVTHAW, method=m) for m, c in _by_method(cases, methods))]
        for group, cases in groups.items()
        if cases
    }


def _by_method(cases: Sequence[Case], methods: Mapping[str, str]) -> list[tuple[str, Case]]:
    """Return each case under each of its methods, by length, then method: a batch of one sequence serves the first two parts."""
    pairs = [(method, case) for case in cases for method in methods[case.part].split(",")]
    order = {part: PARTS.index("first") if part == "decode" else PARTS.index(part) for part in PARTS}
    return sorted(pairs, key=lambda pair: (order[pair[1].part], pair[1].length, methods[pair[1].part].find(pair[0])))


def main() -> int:
    """Measure both sides in turns and print the table. Returns the exit status."""
    given = options(
        __doc__, parts="first,decode,short,trace", shape="llama-3.1-8b", layers=int, check_layers=2, lengths="36864,131072",
        methods="full,pariskv-plus", batch_methods="full,clusterkv-plus", many_methods="auto", new=1024, seqs=0, batch_new=320,
        short="64,256", short_length=1024, short_new=256, trace=Path, rates="2,8,0", requests=200, capacity=16384, places=256,
        budget=1024, retrieved=100, turns=1, limit=300.0, start=START, seconds=3600.0, vllm_python=sys.executable,
        vllm_path="", kvthaw_path="", precision="bf16", gpus=1, card=0.0, vllm_share=0.92,
        vllm_offload=0.0, sides=",".join(SIDES), logs=Path, commit=str, out=Path,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a side ends with this one
    with tempfile.TemporaryDirectory() as folder:
        plan = {
            name: getattr(given, name)
            for name in ("budget", "retrieved", "new", "places", "commit", "vllm_share", "vllm_offload")
        }
        plan |= {"sizes": SHAPES[given.shape], "checkpoint": folder}
        plan |= {"traces": str(given.trace.resolve().parent) if given.trace else ""}
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        commands = {
            VLLM: Command(given.vllm_python, "lab.beside.vllm_side", given.vllm_path),
            KVTHAW: Command(sys.executable, "lab.beside.kvthaw_side", given.kvthaw_path),
        }
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + given.seconds
        run = Run(commands, ResultsFile(given.out), plan, logs, limit=given.limit, start=given.start, until=until)
        return measure(run, cases_of(given, device_name()), given.turns, given.sides.split(","))


def measure(run: Run, groups: Mapping[tuple[str, ...], Sequence[Case]], turns: int, sides: Sequence[str]) -> int:
    """Measure groups of cases, the sides in alternating order, and print the table. Returns the exit status."""
    wanted, place = list[Case](), 0
    for turn in range(turns):
        for group, cases in groups.items():
            own = [replace(case, turn=turn) for case in cases if case.side in sides]
            wanted += own
            # kvthaw writes the weights that vLLM reads.
            order = (KVTHAW, VLLM) if group == CHECK or place % 2 else (VLLM, KVTHAW)
            place += group != CHECK
            again = group == CHECK and any(run.known.get(case.setting) is None for case in own)
            for side in order:
                run.side(side, [case for case in own if case.side == side], again=again)
    records = [(case, run.known.get(case.setting)) for case in wanted]
    print(table([(case, record) for case, record in records if record is not None], run.failed))
    off = difference([(case, record) for case, record in records if record is not None and case.part == "check"])
    if off is not None:
        print(f"\ncheck: {off[1]}")
    return int(bool(run.failed) or (off is not None and not off[0]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"kvthaw: {error}")
