"""Tensor parallelism of transformers: the processes of a model, and the sums over them inside its layers."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kvthaw.cache.ranks import Ranks
from kvthaw.errors import UnsupportedModelError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.exchange import BLOCK, BUFFERS, Inbox, add_up
from kvthaw.kernels.gpu import nvidia

_log = logging.getLogger(__name__)
_BEFORE = "_kvthaw_forwards"
"""The model attribute that keeps the forwards of replaced modules."""
_MOST_BYTES = 128 << 10
"""Largest tensor that GPUs add up by writing to each other's memory: 16 rows of 4,096 numbers in bfloat16."""


def ranks(model: PreTrainedModel) -> Ranks:
    """Return the processes that transformers split a model over."""
    if (model.tp_size or 1) == 1:
        return Ranks()
    mesh: Any = model._device_mesh
    mesh = mesh if mesh.ndim == 1 else mesh["tp"]
    return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group(), model.device, _splits_heads(model))


def check_split(model: PreTrainedModel, heads: int | None) -> None:
    """Raise UnsupportedModelError for a model that is split in a way that kvthaw does not support.

    heads: its number of KV heads.
    """
    size, name, mesh = model.tp_size or 1, type(model).__name__, model._device_mesh
    if size > 1 and heads is not None and heads % size and _splits_heads(model):
        raise UnsupportedModelError(
            f"{name} is split over {size} processes and has {heads} KV heads; each process needs KV heads of its own, as many as "
            "the others"
        )
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) and mesh["pp"].size() > 1:
        raise UnsupportedModelError(f"{name} has its layers in {mesh['pp'].size()} processes; split it by heads, with tp_size")


def use_local_forwards(model: PreTrainedModel) -> None:
    """Replace the forwards of a split model's linear layers: they compute on this process's tensors, without DTensors and
    contexts.

    Small outputs of decode steps are added up by writing to the other GPUs' memory. All processes must call this; a second
    call does nothing.
    """
    if (model.tp_size or 1) == 1 or hasattr(model, _BEFORE):
        return
    group = ranks(model)
    before, reduce = dict[str, Any](), AllReduce(group, model.dtype)
    for name, module in model.named_modules():
        style = (model.tp_plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        if type(module) is not torch.nn.Linear or not isinstance(module.weight, DTensor):
            continue
        weight, bias = _own(module.weight.detach()), None if module.bias is None else _own(module.bias.detach())
        if style == "colwise":
            forward: Callable[[Tensor], Tensor] = LocalLinear(weight, bias)
        elif style == "rowwise":
            forward = LocalLinear(weight, bias, reduce)
        elif style in ("colwise_rep", "colwise_gather_output") and module.out_features % group.size == 0:
            forward = _gathered(weight, bias, group.size, reduce.group_name)
        else:
            continue
        before[name], vars(module)["forward"] = module.forward, forward
    setattr(model, _BEFORE, before)


def restore_forwards(model: PreTrainedModel) -> None:
    """Undo use_local_forwards."""
    for name, forward in vars(model).pop(_BEFORE, {}).items():
        vars(model.get_submodule(name))["forward"] = forward


class AllReduce:
    """Add up a tensor of all processes, in place or as a new tensor. All processes must create one together.

    first: whether this is the first process.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self.first = ranks.rank == 0
        self._group, self.inbox = ranks.group, _inbox(ranks, dtype)
        self.group_name = "" if ranks.group is None else ranks.group.group_name

    def __call__(self, x: Tensor) -> Tensor:
        if self.inbox is not None and self.inbox.fits(x):
            return add_up(x, self.inbox)
        dist.all_reduce(x, group=self._group)
        return x


@dataclass(frozen=True, slots=True)
class LocalLinear:
    """The forward of a linear layer that is split over processes.

    weight, bias: of this process. A bias is added to a whole result.
    reduce: adds up the results of all processes; None for a layer whose rows are split.
    """

    weight: Tensor
    bias: Tensor | None
    reduce: AllReduce | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.reduce is None:
            return linear(x, self.weight, self.bias)
        total = self.reduce(linear(x, self.weight))
        return total if self.bias is None else total + self.bias

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalLinear:
        """Return this forward itself, because the group of processes cannot be copied."""
        return self


def _gathered(weight: Tensor, bias: Tensor | None, size: int, group: str) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer whose rows are split over a group's processes, and whose whole output all receive."""
    collectives = torch.ops._c10d_functional

    def forward(x: Tensor) -> Tensor:
        every = collectives.all_gather_into_tensor(linear(x, weight, bias), size, group)
        return torch.cat(collectives.wait_tensor(every).chunk(size), dim=-1)

    return forward


def _inbox(ranks: Ranks, dtype: torch.dtype) -> Inbox | None:
    """Return memory of this GPU that the other processes' GPUs write to; None if some cannot."""
    device = ranks.device
    if device is None or device.type != "cuda":
        return None
    hosts: list[Any] = [None] * ranks.size
    dist.all_gather_object(hosts, platform.node(), group=ranks.group)
    data, addresses, reason = None, list[int](), "they are GPUs of several hosts"
    if not HAS_TRITON or not nvidia(device):
        reason = "the kernel needs Triton and GPUs of NVIDIA"
    elif len(set(hosts)) == 1:
        import torch.distributed._symmetric_memory as symmetric

        shape = BUFFERS, ranks.size, _MOST_BYTES // dtype.itemsize
        try:
            data = symmetric.empty(*shape, dtype=dtype, device=device)
            memory = symmetric.rendezvous(data, ranks.group)
            addresses = [memory.get_buffer(rank, shape, dtype).data_ptr() for rank in range(ranks.size)]
        except RuntimeError as error:
            data, reason = None, str(error).partition("\n")[0]
    if not ranks.least(data is not None) or data is None:
        _log.info("GPUs add up through NCCL, not by writing to each other's memory: %s", reason)
        return None
    data.fill_(-0.0)
    calls = torch.zeros(data.shape[2] // BLOCK, dtype=torch.int32, device=device)
    ranks.least(1)  # no process writes before all have filled theirs
    return Inbox(data, torch.tensor(addresses, device=device), calls, ranks.rank)


def _own(weight: Tensor) -> Tensor:
    """Return this process's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _splits_heads(model: PreTrainedModel) -> bool:
    """Return whether a process has only the queries and keys of its own heads. Some models compute all heads everywhere."""
    of_attention = (style for name, style in (model.tp_plan or {}).items() if "attn" in name or "attention" in name)
    return "colwise" in of_attention
