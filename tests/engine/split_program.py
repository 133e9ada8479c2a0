"""Add up over the processes which torchrun started, and generate by captured steps with a model that is split over them.

The first writes what it generated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.ranks import Ranks
from kvthaw.engine.hf.tensor_parallel import AllReduce
from kvthaw.kernels.exchange import definition
from lab.bench.shapes import split
from lab.torchrun import processes
from zoo import VOCAB, build

METHODS = (
    *(
        "full",
        "oracle",
        "pariskv",
        "pariskv-plus",
        "clusterkv",
        "prkv",
        "arkvale",
        "omnikv",
        "infinigen",
        "shadowkv",
        "magicpig",
    ),
    *("icecache", "icecache-digest", "icecache-digest-device", "h2o"),
)


def make() -> PreTrainedModel:
    """A model of 8 query and 4 KV heads on this process's GPU."""
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 200}
    return build("llama", max_position_embeddings=2048, **sizes).cuda()


def generated(model: PreTrainedModel) -> dict[str, list[int]]:
    """The captures and the tokens of each method."""
    prompt = torch.randint(1, VOCAB, (1, 600), generator=torch.Generator().manual_seed(7)).cuda()
    found = {}
    for method in METHODS:
        with kvthaw.attach(model, method, budget=160, seed=5) as handle:
            tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 600:]
            found[method] = [handle.stats().captures, *tokens.tolist()]
    return found


def check_sums(rank: int) -> None:
    """Compare sums of both GPUs, eager and captured, with definition(); raises AssertionError."""
    device = torch.device("cuda")
    add = AllReduce(Ranks(rank, 2, dist.group.WORLD, device), torch.bfloat16)
    assert add.inbox is not None, "GPUs of one host write to each other's memory"

    def drawn(part: int, n: int, call: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(10 * call + part)).bfloat16().to(device)

    for call, n in enumerate([1, 4096, 65536, 1000, 4096] * 40):
        parts = [drawn(part, n, call) for part in range(2)]
        assert torch.equal(add(parts[rank]), definition(parts)), (call, n)
    static, graph = torch.zeros(4096, dtype=torch.bfloat16, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = static
        for _ in range(7):
            total = add(total) / 2
    for call in range(50):
        parts = [drawn(part, 4096, call) for part in range(2)]
        static.copy_(parts[rank])
        graph.replay()
        assert torch.equal(total, definition(parts) / 2), call


if __name__ == "__main__":
    with processes(2) as rank:
        check_sums(rank)
        mine = generated(split(2, make))
        if rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(mine))
