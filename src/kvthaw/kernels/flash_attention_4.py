"""FlashAttention 4 for prompts: the kernels of the package flash-attn-4, on Hopper and Blackwell GPUs.

Causal attention of 131,072 tokens (32 query and 8 KV heads of 128 dimensions) takes 217 ms on an H200; cuDNN's takes 255.
The package compiles a kernel in about three seconds at its first use in a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvthaw.kernels.gpu import nvidia

_SERVED = {9: range(8, 257, 8), 10: (*range(8, 129, 8), 256)}
"""Head dimensions by the major number of a GPU's compute capability."""
_FEW, _TILE, _TILES = 4096, 128, 64
"""Keys that one program attends to in a short time; queries of a program; programs that keep half of a GPU busy."""
_COMPILED: set[tuple[object, ...]] = set()
"""The kinds of calls that have been made."""


def serves(query: Tensor, keys: int = 1) -> bool:
    """Return whether the package has a kernel for queries [B, Hq, T, D] on their device. It need not be installed.

    keys: number of keys. The package does not split them, so few queries over many keys would leave most of a GPU idle.
    """
    if not nvidia(query.device) or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if keys > _FEW and query.shape[:3].numel() < _TILES * _TILE:
        return False
    return query.shape[3] in _SERVED.get(torch.cuda.get_device_capability(query.device)[0], ())


def attend(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `kvthaw.kernels.dense.definition` with out in the dtype of query. No tensor is empty.

    The last dimension of each tensor is contiguous. Raises ImportError if flash-attn-4 is not installed.
    """
    given = (x.transpose(1, 2) for x in (query, keys, values))
    out, lse = _quietly(*given, softmax_scale=scale, causal=causal, softcap=softcap or 0.0)
    return out.transpose(1, 2), lse


@cache
def _function() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func  # type: ignore[no-any-return]


def _quietly(*tensors: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Call the package, which warns about its own code when it compiles a kernel. Few queries have kernels of their own."""
    query, keys, _ = tensors
    few = min(query.shape[1], 2 * _TILE).bit_length()
    kind = query.dtype, query.shape[-1], query.shape[-2] // keys.shape[-2], how["causal"], how["softcap"], few
    with nullcontext() if kind in _COMPILED else warnings.catch_warnings():
        if kind not in _COMPILED:
            warnings.simplefilter("ignore")
        out, lse = _function()(*tensors, return_lse=True, **how)
    _COMPILED.add(kind)
    return out, lse
