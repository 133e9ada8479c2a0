"""Random sequences of operations on caches and batches, for as long as there is time.

usage: fuzz.py [--seconds 600] [--seeds 0:1000] [--methods oracle,prkv] [--machine caches] [--machine batches] [--device cuda]

Each seed is some sequences of tests/machines.py. What a failing one did is printed, made as short as can be: it is Python, and
`fuzz.py --seeds N:N+1` finds it again. On a GPU steps are captured and memory is pinned. The last line is JSON with the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from transformers.utils import logging

import kvthaw
from machines import MACHINES

SEQUENCES = 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no seed after so long")
    parser.add_argument("--seeds", default="0:1000000", help="A:B, from A to B - 1")
    parser.add_argument("--methods", default=",".join(kvthaw.METHODS))
    parser.add_argument("--machine", choices=list(MACHINES), action="append", help="one of them only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-shrink", action="store_true", help="print what failed as it was found")
    return parser.parse_args()


def main() -> int:
    given = options()
    phases = [Phase.generate] if given.no_shrink else [Phase.generate, Phase.shrink]
    settings = hypothesis.settings(
        max_examples=SEQUENCES,
        stateful_step_count=10,
        phases=phases,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    counts = {"sequences": 0, "operations": 0, "seeds": 0, "failed": 0}
    begin = time.monotonic()
    for seed in range(*map(int, given.seeds.split(":"))):
        if time.monotonic() - begin > given.seconds:
            break
        counts["seeds"] += 1
        for name in given.machine or MACHINES:
            kind = counted(MACHINES[name], counts, methods=tuple(given.methods.split(",")), device=given.device)
            try:
                run_state_machine_as_test(hypothesis.seed(seed)(kind), settings=settings)
            except Exception as error:
                counts["failed"] += 1
                print(
                    f"seed {seed}, {name}: {type(error).__name__}: {error}",
                    *getattr(error, "__notes__", ()),
                    sep="\n",
                    flush=True,
                )
    print(json.dumps(counts | {"seconds": round(time.monotonic() - begin), "device": given.device}))
    return int(counts["failed"] > 0)


def counted(machine: type[RuleBasedStateMachine], counts: dict[str, int], **attributes: object) -> type[RuleBasedStateMachine]:
    """A machine that counts its sequences, and what they do."""

    def check_invariants(self: RuleBasedStateMachine, *args: object) -> None:
        counts["operations"] += 1
        super(kind, self).check_invariants(*args)

    def teardown(self: RuleBasedStateMachine) -> None:
        counts["sequences"] += 1
        super(kind, self).teardown()

    kind: type[RuleBasedStateMachine] = type(
        machine.__name__, (machine,), {**attributes, "check_invariants": check_invariants, "teardown": teardown}
    )
    return kind


if __name__ == "__main__":
    sys.exit(main())
