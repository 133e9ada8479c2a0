"""A cache that a forked child process inherits goes on there as it does in the parent."""

from __future__ import annotations

import os
import select
import signal
import warnings

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from zoo import prompt


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.parametrize("steps", [0, 20])
def test_a_forked_child_goes_on_decoding(llama: PreTrainedModel, steps: int) -> None:
    """Without steps before it the prompt may still be on its way into the index."""
    cache, ids = kvthaw.Cache(llama, "icecache-digest", budget=64), prompt(1, 400)

    @torch.no_grad()
    def decode(start: int, stop: int) -> str:
        return repr([int(llama(ids[:, k : k + 1], past_key_values=cache).logits.argmax()) for k in range(start, stop)])

    with torch.no_grad():
        llama(ids, past_key_values=cache)
    decode(0, steps)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own of threads
        child = os.fork()
    if child == 0:
        try:
            os.write(write, decode(steps, steps + 40).encode())
        finally:
            os._exit(0)
    try:
        expected = decode(steps, steps + 40)
        assert select.select([read], [], [], 60)[0], "the child hangs"
        assert os.read(read, 65536).decode() == expected
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
