"""Captures keys, values and queries of a pretrained model's layer, for tests/methods/real_keys.npz.

    python models/real_keys.py OUT.npz NAME=FILE.gguf:LAYER:HEAD ...    # NAME in the file; a KV head of a layer

The prompt is a page of the book that ships with a question behind it; full attention's greedy answer follows it. Keys and queries
are those after RoPE, queries those of the last `QUERIES` places, all in float16, as it rounds least of the types of two bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvthaw.engine.chat_template import Chat
from kvthaw.engine.hf.model import load, silence
from kvthaw.evaluate.agreement import questions
from kvthaw.evaluate.files import read_asset

TOKENS, STEPS, QUERIES = 760, 8, 72
Head = dict[str, torch.Tensor]
"""keys and values [n, D], queries [G, n, D], scale []."""


def capture(name: str, layers: Collection[int], text: str, tokens: int) -> dict[tuple[int, int], Head]:
    """Return what each KV head of some layers attends with: a prompt of so many tokens, and STEPS tokens of its answer."""
    silence()
    model, tokenizer = load(name, device="cpu", dtype="float32")
    (prompt,) = questions(tokenizer, text, "What happens here?", tokens, 1, Chat() if tokenizer.chat_template else None)
    ids = torch.tensor([prompt.tokens])
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    found: dict[tuple[int, int], Head] = {}

    def see(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> None:
        for head, queries in enumerate(query[0].chunk(key.shape[1])):
            parts = {"keys": key[0, head], "values": value[0, head], "queries": queries}
            exact = torch.tensor(scale, dtype=torch.float64)
            found[layer, head] = {part: rows.half() for part, rows in parts.items()} | {"scale": exact}

    watch(model, layers, see)
    with torch.no_grad():
        model(ids)
    return found


def watch(
    model: PreTrainedModel,
    layers: Collection[int],
    see: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None],
) -> None:
    """Make the attention of some layers call see(layer, query, key, value, scale); tensors are [B, heads, T, D] after RoPE."""

    def attend(module: Any, query: Any, key: Any, value: Any, *given: Any, **how: Any) -> Any:
        if module.layer_idx in layers:
            see(module.layer_idx, query, key, value, how["scaling"])
        return sdpa_attention_forward(module, query, key, value, *given, **how)

    ALL_ATTENTION_FUNCTIONS["watched"] = attend
    ALL_MASK_ATTENTION_FUNCTIONS["watched"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    model.set_attn_implementation("watched")


def main(out: str, *asked: str) -> None:
    """Capture what is asked for into one file."""
    arrays: dict[str, Any] = {}
    for one in asked:
        name, _, where = one.partition("=")
        path, layer, head = where.rsplit(":", 2)
        found = capture(path, [int(layer)], read_asset("book.txt"), TOKENS)[int(layer), int(head)]
        found["queries"] = found["queries"][:, -QUERIES:]
        arrays |= {f"{name}_{part}": rows.numpy() for part, rows in found.items()}
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
