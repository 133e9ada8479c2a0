"""Generate by captured steps with a model that is split over the processes which torchrun started; the first writes what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvthaw
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


if __name__ == "__main__":
    with processes(2) as rank:
        mine = generated(split(2, make))
        if rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(mine))
