"""Tokens a second of batches that fill a GPU, under full attention and under indexes, in one run.

`python -m lab.peaks --cells full/28x32768,clusterkv-plus/25x32768,clusterkv-plus/fp8/44x32768 --out peaks.jsonl`: a cell is
METHOD/SEQUENCESxLENGTH; between them `fp8` stores rows in 8 bits. Every sequence and layer has rows of its own, drawn instead of
computed from a prompt, and device_memory is "auto". A line is one cell, as of `lab.placement`; its steps are a whole period of an
index's updates. device_rate is 1 where all rows lay on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvthaw.bench.decode import free
from kvthaw.errors import ConfigError
from kvthaw.evaluate.machine import where
from lab.bench.shapes import build
from lab.fill import prompts_drawn
from lab.placement import SIZES, WARM, decode
from lab.script import Report, options, run_as_script

PERIOD, ALIKE = 320, 80
"""Steps that are timed: clusters are made anew every so many tokens; under full attention one step is like another."""


def main() -> None:
    """One JSON line a cell."""
    given = options(__doc__, shape="llama-3.1-8b", layers=int, cells=str, period=PERIOD, commit=str, out=Path)
    device, name = where()
    cells = [read(cell) for cell in (given.cells or "").split(",")]
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    for method, flags, seqs, length in cells:
        sizes, steps = dict(SIZES[method]), WARM + 1 + (ALIKE if method == "full" else given.period)
        if "fp8" in flags:
            sizes["kv_dtype"] = "fp8"
        prompts = torch.zeros((seqs, length), dtype=torch.int64)
        setting: dict[str, Any] = {
            "shape": given.shape,
            "layers": model.config.num_hidden_layers,
            "seqs": seqs,
            "length": length,
        }
        setting |= {"device": name, "method": method, **sizes, "device_memory": "auto", "steps": steps, "prompt": "drawn"}
        try:
            how: dict[str, Any] = {"prompted": prompts_drawn}
            _, found = decode(model, method, prompts, steps, "auto", sizes, **how)
        except torch.OutOfMemoryError as error:
            found = {"error": str(error).splitlines()[0]}
        report.record(setting, found)
        free()


def read(cell: str) -> tuple[str, list[str], int, int]:
    """Return the method of a cell, its flags, sequences and tokens of each."""
    method, *flags, size = cell.strip().split("/")
    seqs, _, length = size.partition("x")
    if method not in SIZES or not set(flags) <= {"fp8"} or not (seqs.isdecimal() and length.isdecimal()):
        raise ConfigError(f"a cell is {cell!r}; it must be METHOD[/fp8]/SEQUENCESxLENGTH, METHOD one of {', '.join(SIZES)}")
    return method, flags, int(seqs), int(length)


if __name__ == "__main__":
    run_as_script(main)
