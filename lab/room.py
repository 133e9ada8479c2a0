"""What a run needs of device and host, reckoned before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kvthaw.bench.settings import HF, described
from kvthaw.bench.shapes import config as config_of
from kvthaw.cache.host_memory import check_host_memory
from kvthaw.cache.plan import Settings
from kvthaw.engine.hf.chunks import spans
from kvthaw.engine.hf.model import build
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.evaluate.results import Record
from lab.bench.settings import ShapeSetting

_SPARE = 1 << 30  # CUDA's context, graphs and the allocator's rounding
_MADE = 4  # times a layer's keys and values exist while it is filled: drawn, padded, stacked, on its way out


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run will hold at its fullest. device: weights, KV, index and what prefill or filling takes for a while."""

    weights: int
    device: int
    host: int


def need(setting: ShapeSetting, dtype: torch.dtype) -> Need:
    """What a setting needs, from its shape alone."""
    config, weights = config_of(setting.shape), _weights(setting.shape, dtype)
    size, heads, layers = dtype.itemsize, config.num_key_value_heads, config.num_hidden_layers
    tokens = setting.length + setting.new_tokens
    token = 2 * heads * config.head_dim * size  # of one layer
    if setting.hf or setting.dense:
        kept, frozen = layers, 0
        held = index = 0.0
    else:
        dense = setting.dense_layers if setting.dense_layers is not None else 2 if layers >= 16 else 0
        method = setting.resolved()
        plan = Settings(method, budget=setting.budget, retrieved=setting.retrieved).plan(setting.length)
        kept, frozen = min(dense, layers), max(0, layers - dense)
        held = plan.regions.held + plan.rows * max(1, method.keep)
        share = 1 / method.anchors if isinstance(method.anchors, int) else 1.0
        a_key = (described(setting.method)["bytes_a_key"] or 0) * config.head_dim / 128 + 4  # and residency's table
        index = share * a_key * heads * tokens
    offloaded = setting.method == HF[1]
    on_device = setting.batch * (token * tokens * 17 / 16 * (2 if offloaded else kept) + frozen * (token * held + index))
    if setting.prompt not in ("run", "once"):
        passing = _MADE * token * setting.length * (setting.batch if setting.hf else 1)
    else:  # the widest layer of the model: the two inputs of its MLP and their product
        passing = setting.batch * setting.length * (3 * config.intermediate_size + 4 * config.hidden_size) * size
    rows = token * tokens * (layers if offloaded else frozen)
    if setting.shared:
        rows = min(rows, 2 * token * tokens)
    elif setting.prompt in ("run", "once") or setting.hf:
        rows *= setting.batch
    return Need(weights, round(weights + on_device + passing) + _SPARE, rows)


@cache
def _weights(shape: str, dtype: torch.dtype) -> int:
    """Bytes of a shape's weights."""
    return sum(p.numel() * p.element_size() for p in build(config_of(shape), torch.device("meta"), dtype).parameters())


MATMUL, ATTENTION, BUS = 795e12, 660e12, 55e9
"""Of an H200, measured: operations a second of bfloat16 matrix products and of causal attention; bytes a second each way."""


def over_floor(prompt: Record) -> float | None:
    """How many times longer a prompt took than an H200's operations and bus allow, both directions of it beside the operations."""
    if prompt["indexed_s"] is None:
        return None
    config, length = config_of(prompt["shape"]), prompt["length"]
    layers = prompt["layers"] or config.num_hidden_layers
    dim, heads = config.head_dim, config.num_attention_heads
    inner = (2 * heads + 2 * config.num_key_value_heads) * dim + 3 * config.intermediate_size
    compute = 2 * layers * inner * config.hidden_size * length / MATMUL
    compute += 2 * layers * heads * dim * length * (length + 1) / ATTENTION
    frozen = 0 if prompt["dense_layers"] is None else layers - prompt["dense_layers"]
    row = 4 * config.num_key_value_heads * dim * frozen  # bfloat16
    back = row * sum(start for start, _ in spans(length, prompt["chunk"]))
    return float(prompt["indexed_s"] / max(compute, row * length / BUS, back / BUS))


def check(setting: ShapeSetting, device: torch.device, dtype: torch.dtype, host_bytes: int | None = None) -> None:
    """Raise ConfigError where a run does not fit. host_bytes: the most host memory to use; None asks the system what is
    free."""
    wanted = need(setting, dtype)
    words = (
        f"length is {setting.length:,} and batch {setting.batch}, with which {setting.method} at {setting.shape}'s shape needs"
    )
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
        if wanted.device > room:
            raise ConfigError(
                f"{words} {wanted.device:,} bytes of the device ({wanted.weights:,} of them weights), which has {room:,}; "
                "choose a shorter length, a smaller batch or another method"
            )
    try:
        check_host_memory(wanted.host + (0 if device.type == "cuda" else wanted.device), host_bytes)
    except HostMemoryError as error:
        raise ConfigError(f"{words} more host memory than there is: {error}") from None
