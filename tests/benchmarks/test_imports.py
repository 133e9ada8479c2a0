"""What runs on a machine with a GPU needs none of the packages of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("figures", "measure", "kernels_decode", "kernels_nodes", "kernels_pages", "kernels_pariskv", "kernels_transfer")


def test_scripts_for_a_gpu_need_torch_and_transformers_alone() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib', 'datasets', 'lm_eval')))\n"
    program = absent + "".join(f"import benchmarks.{name}\n" for name in (*SCRIPTS, "kernels_tree"))
    root = Path(__file__).parents[2]
    path = f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'src')!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
