"""What both sides measure, and the lines by which a process tells what it found. Imports nothing of kvthaw, for vLLM's process."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.arrivals import Arrival, Served, arrivals, at_rate, rank, told

VLLM, KVTHAW = "vllm", "kvthaw"
SIDES = (VLLM, KVTHAW)
LONG, MANY, CHECK = ("first", "decode", "batch"), ("short", "trace"), ("check",)
PARTS = (*LONG, *MANY, *CHECK)
PRECISIONS = ("bf16", "kv8", "fp8")
"""Of weights and KV: bfloat16; KV of 8 bits; both of 8 bits."""
MARK = "@beside "
"""What the lines of a process begin with that are for the command; libraries print others."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement of one side.

    method: kvthaw's; the name of the side for vLLM.
    length: tokens of a prompt.
    seqs: sequences that decode together; 0: until no more fit.
    new: tokens that each sequence gets.
    rate: requests a second; 0: all at once.
    requests: the number of requests of a trace.
    turn: the repetition.
    precision: one of PRECISIONS.
    gpus: GPUs that the model is split over.
    card: GiB of the GPU that a side may use; 0: all.
    """

    part: str
    side: str
    method: str
    shape: str
    layers: int
    length: int
    seqs: int
    new: int
    rate: float
    trace: str
    requests: int
    turn: int
    device: str
    precision: str = "bf16"
    gpus: int = 1
    card: float = 0.0

    @property
    def setting(self) -> dict[str, Any]:
        """The case as plain values."""
        return asdict(self)

    @property
    def question(self) -> tuple[Any, ...]:
        """What cases of other methods, sides and turns have in common with this one."""
        return (
            self.part, self.shape, self.layers, self.length, self.seqs, self.rate, self.trace, self.requests, self.device,
            self.precision, self.gpus, self.card,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [self.part, self.method if self.side == KVTHAW else self.side]
        words += [f"{self.length:,}"] if self.part in LONG else [f"{self.seqs} requests"] if self.part == "short" else []
        words += [f"{self.rate:g} a second" if self.rate else "all at once"] if self.part == "trace" else []
        return ", ".join([*words, f"turn {self.turn}"])


def emit(event: str, **more: Any) -> None:
    """Print a line for the command."""
    print(MARK + json.dumps({"event": event, **more}), flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """Return what a line of a process tells, None where it is no line for the command."""
    begin = line.find(MARK)
    if begin < 0:
        return None
    try:
        found: dict[str, Any] = json.loads(line[begin + len(MARK) :])
    except json.JSONDecodeError:
        return None
    return found


def planned(arguments: Sequence[str]) -> tuple[list[Case], dict[str, Any]]:
    """Read the cases of a process and the options of the command from the file that it is given."""
    plan = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    return [Case(**one) for one in plan["cases"]], plan["options"]


def serve_cases(cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]]) -> None:
    """Measure each case. One that raises is told as failed, and the others are measured all the same."""
    for case in cases:
        emit("begin", setting=case.setting)
        try:
            found = measure(case)
        except Exception as error:  # of memory, say; the next case may fit
            text = (str(error).strip() or "no message").splitlines()[0][:300]
            emit("failed", setting=case.setting, error=f"{type(error).__name__}: {text}")
            print(f"{case}: {error!r}", file=sys.stderr, flush=True)
        else:
            emit("found", setting=case.setting, measures=found)


def coming_of(case: Case, folder: str) -> list[Arrival]:
    """Return the requests of a case with many."""
    if case.part == "short":
        return [Arrival(0.0, case.length, case.new)] * case.seqs
    path = None if case.trace == "drawn" else Path(folder) / case.trace
    return at_rate(arrivals(path, case.requests, case.length, 1.0), case.rate)


def first_of(times: Sequence[float]) -> dict[str, Any]:
    """Return the measures of first tokens: the least time, since the first of a length may compile or take memory."""
    return {"ttft_s": min(times), "ttft_all_s": list(times)}


def steps_of(times: Sequence[float], seqs: int = 1) -> dict[str, Any]:
    """Return the measures of steps from the times at which their tokens came: those of the later half."""
    gaps = [b - a for a, b in pairwise(times)][len(times) // 2 :]
    mean = statistics.fmean(gaps)
    return {
        "tpot_s": mean,
        "output_tokens_per_s": seqs / mean,
        "steps": len(gaps),
        "seqs": seqs,
        **{f"itl_p{n}_s": rank(gaps, n) for n in (50, 95, 99)},
    }


def served_of(coming: Sequence[Arrival], tokens: Sequence[Sequence[float]], whole: float) -> dict[str, Any]:
    """Return the measures of requests whose tokens came at these times."""
    return told(coming, [Served(one.at, list(times)) for one, times in zip(coming, tokens, strict=True)], whole)


def config_of(sizes: dict[str, Any], layers: int, positions: int) -> dict[str, Any]:
    """Return a Llama config of a shape of kvthaw as config.json has it."""
    if sizes["kind"] != "llama":
        raise ValueError(f"shape is of kind {sizes['kind']!r}; beside vLLM only 'llama' is measured")
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: sizes[name] for name in names},
        "num_hidden_layers": layers,
        "tie_word_embeddings": sizes["tie_word_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": sizes["rope_theta"],
        "max_position_embeddings": positions,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
