"""Load a model: the one that ships, a local folder, one from the hub, or one of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from kvthaw.engine.hub import SHIPPED, is_path, offline
from kvthaw.errors import ConfigError, UnsupportedModelError, one_of

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def shipped_path() -> Path:
    """Return the folder of the model that comes with the package."""
    return Path(__file__).parents[2] / "assets" / "model"


def load_shipped(*, dtype: Dtype = "auto", device: str | None = None) -> tuple[PreTrainedModel, Any]:
    """Return the model that comes with the package and its tokenizer; see `load`."""
    return load(SHIPPED, dtype=dtype, device=device)


def load(
    name: str = SHIPPED,
    *,
    dtype: Dtype = "auto",
    device: str | None = None,
    tp: int = 1,
    prepare: Callable[[Any], None] = lambda tokenizer: None,
) -> tuple[PreTrainedModel, Any]:
    """Return a causal language model, ready to decode, and its tokenizer.

    name: "shipped", a local folder, or an id on the Hugging Face hub. dtype: "auto" is bfloat16 on a GPU and float32 on a CPU.
    device: as torch names it; None takes the GPU where there is one. tp: load this process's part of a model that so many
    processes load, each on its own GPU. prepare: is called with the tokenizer before weights are read, and may refuse it. Raises
    ConfigError, naming what was not found.
    """
    where = find_device(device)
    kind = read_dtype(dtype, cuda=where.type == "cuda")
    how: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}
    with _found(name) as (source, cached):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=cached)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without tokenizer files
            raise ConfigError(f"model is {name!r}; it has no tokenizer, such as a tokenizer.json beside its config.json")
        prepare(tokenizer)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=kind, local_files_only=cached, **how)
    return (model.to(where) if tp == 1 else model).eval(), tokenizer


def read_dtype(name: str, *, cuda: bool) -> torch.dtype:
    """Return a dtype by its name; "auto" is bfloat16 on a GPU and float32 on a CPU. Raises ConfigError."""
    one_of(get_args(Dtype), dtype=name)
    kind: torch.dtype = getattr(torch, name if name != "auto" else "bfloat16" if cuda else "float32")
    return kind


def load_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model, named as for `load`; no weights are read or fetched. Raises ConfigError."""
    with _found(name) as (source, cached):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, local_files_only=cached)
    return config


@contextmanager
def _found(name: str) -> Iterator[tuple[str, bool]]:
    """Yield where to load a model from, and whether from the hub's local cache alone. Errors of loading become ConfigError."""
    source, cached = _source(name), offline(name)
    try:
        yield source, cached
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        where_from = "the hub cannot be reached, and its local cache lacks a part" if cached else _first_line(error)
        raise ConfigError(f"model is {name!r}; it could not be loaded: {where_from}") from error


def check_prompt(model: PreTrainedModel, tokens: int) -> None:
    """Raise ConfigError, before any work is done, for a prompt that is empty or longer than the model's positions."""
    if tokens == 0:
        raise ConfigError("the prompt is empty")
    limit = positions(model)
    if limit is not None and tokens > limit:
        most = f"the model's positions end at {limit:,}: shorten it, raise max_position_embeddings or scale its RoPE"
        raise ConfigError(f"the prompt has {tokens:,} tokens; {most}")


def positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has, None where its config does not say."""
    value = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if value is None else int(value)


def make_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Return the configuration of a kind of model, transformers' model_type."""
    config: PreTrainedConfig = AutoConfig.for_model(kind, **fields)
    return config


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build a causal language model of random weights. Raises UnsupportedModelError for a config of another kind of model."""
    try:
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise UnsupportedModelError(f"transformers makes no causal language model of a {type(config).__name__}") from error
    return model.eval()


def plain_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that weights are made of, and their names: of a quantised one often several."""

    def parts(name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
        if is_traceable_wrapper_subclass(weight):
            for inner in weight.__tensor_flatten__()[0]:
                yield from parts(f"{name}.{inner}", getattr(weight, inner))
        else:
            yield name, weight.detach()

    for name, weight in model.named_parameters():
        yield from parts(name, weight)


def silence() -> None:
    """Have transformers log errors only, and show no progress bars."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def find_device(name: str | None) -> torch.device:
    """Return a device by torch's name, None the GPU where there is one. Raises ConfigError for one that torch cannot use."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device is {name!r}; torch cannot use it: {_first_line(error)}") from error
    return device


def _source(name: str) -> str:
    if name == SHIPPED:
        if not (shipped_path() / "config.json").exists():
            raise ConfigError(f"model is {SHIPPED!r}, but this installation holds no model; name a folder or a hub id")
        return str(shipped_path())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"model is {name!r}; that folder holds no config.json")
        return str(path)
    if is_path(name):
        raise ConfigError(f"model is {name!r}; there is no such folder")
    return name


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
