"""Load a model: the shipped one, a local folder or .gguf file, one from the hub, or one of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from kvthaw.engine.hf import gguf_file
from kvthaw.engine.hub import SHIPPED, check_path, offline
from kvthaw.engine.rope_scaling import LARGEST, RopeScaling
from kvthaw.engine.text import encode
from kvthaw.errors import ConfigError, UnsupportedModelError, first_line, one_of
from kvthaw.formatting import counted

_SLICE, _CUT = 1 << 17, 64
"""Characters that are tokenized at once to count tokens, and how many tokens a cut may add."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def shipped_path() -> Path:
    """Return the folder of the model that ships with the package."""
    return Path(__file__).parents[2] / "assets" / "model"


def load_shipped(*, dtype: Dtype = "auto", device: str | None = None) -> tuple[PreTrainedModel, Any]:
    """Return the model that ships with the package and its tokenizer; see `load`."""
    return load(SHIPPED, dtype=dtype, device=device)


def load(
    name: str = SHIPPED,
    *,
    dtype: Dtype = "auto",
    device: str | None = None,
    tp: int = 1,
    rope_scaling: str | None = None,
    prepare: Callable[[Any, PreTrainedConfig], None] = lambda tokenizer, config: None,
) -> tuple[PreTrainedModel, Any]:
    """Return a causal language model, ready to decode, and its tokenizer.

    Raises ConfigError, naming what was not found.

    name: "shipped", a local folder, a .gguf file, or an id on the Hugging Face hub. A .gguf file's weights are dequantized
        to dtype; its tokenizer and chat template come from the file.
    dtype: "auto" is bfloat16 on a GPU and float32 on a CPU.
    device: torch's name; None: the GPU if there is one.
    tp: load this process's part of a model that `tp` processes load, each on its own GPU.
    rope_scaling: "yarn:4" gives the model four times its positions; see `RopeScaling`.
    prepare: called with the tokenizer and the config before weights are read; may raise to refuse them.
    """
    scaling = None if rope_scaling is None else RopeScaling.read(rope_scaling)
    where = find_device(device)
    kind = read_dtype(dtype, cuda=where.type == "cuda")
    with _found(name) as (source, how):
        tokenizer = AutoTokenizer.from_pretrained(source, **how)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers' result for a folder without tokenizer files
            raise ConfigError(f"model is {name!r}; it has no tokenizer, such as a tokenizer.json next to its config.json")
        config = AutoConfig.from_pretrained(source, **how)
        if scaling is not None:
            scaling.apply(config)
        prepare(tokenizer, config)
        model = _with_weights(name, source, kind, {**how, "config": config}, tp)
    return (model.to(where) if tp == 1 else model).eval(), tokenizer


def _with_weights(name: str, source: str, dtype: torch.dtype, how: Mapping[str, Any], tp: int) -> PreTrainedModel:
    """Return a model with its weights, or this process's part of them."""
    model: PreTrainedModel
    if "gguf_file" in how:
        if tp > 1:
            raise ConfigError(f"model is {name!r} and tp is {tp}; a .gguf file is loaded whole: tp must be 1")
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **how, **gguf_file.weights())
        gguf_file.check_loaded(info, name)
        return model
    shared = {"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **how, **shared)
    return model


def read_dtype(name: str, *, cuda: bool) -> torch.dtype:
    """Return a dtype by its name; "auto" is bfloat16 on a GPU and float32 on a CPU. Raises ConfigError."""
    one_of(get_args(Dtype), dtype=name)
    kind: torch.dtype = getattr(torch, name if name != "auto" else "bfloat16" if cuda else "float32")
    return kind


def load_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model, named as for `load`, without reading or fetching weights. Raises ConfigError."""
    with _found(name) as (source, how):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **how)
    return config


@contextmanager
def _found(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the source of a model and further arguments for from_pretrained, such as local_files_only.

    Errors of loading become ConfigError.
    """
    path, cached = _path(name), offline(name)
    is_file = path is not None and path.is_file()
    source = name if path is None else str(path.parent if is_file else path)
    broken = gguf_file.BROKEN if is_file else ()
    try:
        with gguf_file.read_once() if is_file else nullcontext():
            yield source, {"local_files_only": cached, **({"gguf_file": path.name} if path is not None and is_file else {})}
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError, *broken) as error:
        where_from = "the hub cannot be reached, and its local cache lacks a part" if cached else first_line(error)
        if isinstance(error, SafetensorError) or is_file:
            where_from = f"the file may be damaged, incomplete or of an unknown kind ({where_from})"
        raise ConfigError(f"model is {name!r}; it could not be loaded: {where_from}") from error


def check_prompt(model: PreTrainedModel, tokens: int) -> None:
    """Raise ConfigError, before any work is done, for a prompt that is empty or longer than the model's positions."""
    if tokens == 0:
        raise ConfigError("the prompt is empty")
    limit = positions(model)
    if limit is not None and tokens > limit:
        raise ConfigError(f"the prompt has {counted(tokens, 'token')}; {_ends_at(limit, tokens)}")


def check_text(tokenizer: Any, text: str, limit: int | None) -> None:
    """Raise ConfigError for a text with more tokens than the model has positions, before all of it is tokenized."""
    tokens = None if limit is None else more_tokens(tokenizer, text, limit)
    if limit is not None and tokens is not None:
        raise ConfigError(f"the text has about {tokens:,} tokens, {len(text):,} characters; {_ends_at(limit, tokens)}")


def more_tokens(tokenizer: Any, text: str, most: int) -> int | None:
    """Return about how many tokens a text has, if it has more than `most`; else None.

    Reads no more of it than that takes, because tokenizers take a hundred times a text's size. A text of several parts may have 2 %
    more tokens, because cuts between the parts divide words.
    """
    if len(text) > _SLICE:
        most += most // 50
    tokens = 0
    for start in range(0, len(text), _SLICE):
        tokens += len(encode(tokenizer, text[start : start + _SLICE]))
        if len(text) > _SLICE:
            most += _CUT
        if tokens > most:
            all_read = start + _SLICE >= len(text)
            return tokens if all_read else round(tokens * len(text) / (start + _SLICE) / 1000) * 1000
    return None


def _ends_at(limit: int, tokens: int) -> str:
    """Return where a model's positions end, and what to do with a prompt of more tokens."""
    factor = -(-tokens // limit)
    scale = f", or scale the model's rotary positions (--rope-scaling yarn:{factor}; most models then answer worse)"
    return (
        f"the model's positions end at {limit:,}: shorten it, leave out its middle (generate and chat: --cut)"
        f"{scale if factor <= LARGEST else ''}"
    )


def positions(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Return how many positions a model, or one of a config, has; None if its config does not say."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    value = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if value is None else int(value)


def make_config(kind: str, **fields: Any) -> PreTrainedConfig:
    """Return the configuration of a kind of model, by transformers' model_type."""
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
    """Yield the names and tensors of weights. A quantized weight often has several tensors, which may be buffers.

    Rotary frequencies, which modules recompute, are left out.
    """

    def parts(name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
        if is_traceable_wrapper_subclass(weight):
            for inner in weight.__tensor_flatten__()[0]:
                yield from parts(f"{name}.{inner}", getattr(weight, inner))
        else:
            yield name, weight.detach()

    for name, weight in model.named_parameters():
        yield from parts(name, weight)
    for place, module in model.named_modules():
        if any(name.endswith("inv_freq") for name in module._buffers):
            continue
        for name, buffer in module.named_buffers(place, recurse=False):
            if buffer.ndim > 1 or name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield from parts(name, buffer)


def silence() -> None:
    """Make transformers log errors only, and show no progress bars."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # its own bar ignores the setting above


def find_device(name: str | None) -> torch.device:
    """Return a device by torch's name; None: the GPU if there is one. Raises ConfigError for one that torch cannot use."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = first_line(error).rstrip(".")
        raise ConfigError(f"device is {name!r}, which torch cannot use ({why}); it must be cpu, cuda or cuda:1") from error
    return device


def _path(name: str) -> Path | None:
    """Return the folder or .gguf file of a model; None for one on the hub. Raises ConfigError for a path without a model."""
    if name == SHIPPED:
        if not (shipped_path() / "config.json").exists():
            raise ConfigError(f"model is {SHIPPED!r}, but this installation holds no model; name a folder or a hub id")
        return shipped_path()
    return check_path(name)


def of_layer(config: Any, layer: int) -> Any:
    """Return the config of one layer of a decoder, whose layers may differ (Gemma 4)."""
    return config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config


def head_dim(config: Any) -> int:
    """Return the dimension of a layer's keys, from its config."""
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def kv_heads(config: Any) -> int:
    """Return the number of KV heads of a layer, from its config."""
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def kv_bytes(model: PreTrainedModel, layers: Iterable[int]) -> int:
    """Return the bytes of a token's keys and values in some layers, of all processes together."""
    config = model.config.get_text_config(decoder=True)
    width = sum(kv_heads(one) * head_dim(one) for one in (of_layer(config, i) for i in layers))
    return 2 * int(model.dtype.itemsize) * width


def attention_depth(model: PreTrainedModel) -> float:
    """Return the number of earlier tokens whose attention takes the multiplications of all weights: about 32,000 for an 8B
    model."""
    config = model.config.get_text_config(decoder=True)
    layers = [of_layer(config, i) for i in range(config.num_hidden_layers)]
    return float(model.num_parameters() / (2 * sum(layer.num_attention_heads * head_dim(layer) for layer in layers)))
