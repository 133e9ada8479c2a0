"""The kernels of another machine, under an emulator: needs a cross compiler and qemu, and is skipped, visibly, without them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "src/kvthaw/native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CHOSEN = "17cbb76d6bca89da"
"""What scalar and AVX2 choose from trees on x86-64: a hash of all rows."""


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
def test_neon_agrees_with_scalar_and_chooses_as_other_machines(tmp_path: Path) -> None:
    kernels = [source for source in NATIVE.glob("kernels*.cpp") if "avx" not in source.name]
    others = [*NATIVE.glob("tree*.cpp"), NATIVE / "forest.cpp", NATIVE / "pool.cpp", Path(__file__).with_name("agree.cpp")]
    whole = tmp_path / "whole.cpp"  # together: half of the time of each would be the standard library's headers
    whole.write_text("".join(f'#include "{source}"\n' for source in others))
    flags = ["-std=gnu++17", "-O1", "-ffp-contract=off", "-static", "-pthread", "-DKV_ARM64", f"-I{NATIVE}"]
    subprocess.run([COMPILER, *flags, *map(str, [*kernels, whole]), "-o", str(tmp_path / "agree")], check=True, timeout=400)
    ran = subprocess.run([EMULATOR, str(tmp_path / "agree")], capture_output=True, text=True, timeout=200)
    assert (ran.stdout.splitlines(), ran.returncode) == ([f"scalar {CHOSEN}", f"neon {CHOSEN}"], 0)
