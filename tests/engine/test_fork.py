"""A cache that a forked child process inherits goes on there as it does in the parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
import kvthaw
from zoo import build, prompt

torch.set_num_threads(1)
torch.set_grad_enabled(False)
method, steps = sys.argv[1], int(sys.argv[2])
model, ids = build("llama"), prompt(1, 400)

def decode(start, stop):
    return [model(ids[:, k : k + 1], past_key_values=cache).logits.argmax().item() for k in range(start, stop)]

cache = kvthaw.Cache(model, method, budget=64)
model(ids, past_key_values=cache)
decode(0, steps)  # none: the prompt may still be on its way into the index
read, write = os.pipe()
child = os.fork()
tokens = decode(steps, steps + 40)
if child == 0:
    os.write(write, repr(tokens).encode())
    os._exit(0)
os.waitpid(child, 0)
assert os.read(read, 65536).decode() == repr(tokens)
"""


@pytest.mark.parametrize("steps", [0, 20])
def test_a_forked_child_goes_on_decoding(steps: int) -> None:
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT, "icecache", str(steps)], check=True, timeout=120, cwd=tests)
