"""Models in one .gguf file: how transformers reads it, and what is checked afterwards."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from transformers.utils.quantization_config import GgufConfig

from kvthaw.errors import ConfigError

BROKEN = (struct.error, IndexError, KeyError, NotImplementedError, OverflowError, RuntimeError)
"""Errors, besides OSError and ValueError, that transformers raises for a truncated file or one with unknown content."""
_READING = threading.Lock()


def weights() -> dict[str, Any]:
    """Return arguments of from_pretrained that dequantize the weights, so that all of a model's code can compute with them."""
    return {"quantization_config": GgufConfig(dequantize=True), "output_loading_info": True}


@contextmanager
def read_once() -> Iterator[None]:
    """Replace gguf's reader by one that parses a file once, for transformers to use within this block.

    transformers parses the whole file for the config, for the tokenizer and for the weights. It computes the names of all tensors
    for each module. Without this, a model of 135M parameters takes six times as long to load. Other threads wait for their turn.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        """Slices plain arrays, which takes half the time of slicing a memmap."""

        def _get(self, *given: Any, **named: Any) -> Any:
            self.data: Any = self.data.view(np.ndarray)
            return super()._get(*given, **named)

    plain, names = gguf.GGUFReader, gguf.get_tensor_name_map
    with _READING:
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = plain, names


def check_loaded(info: dict[str, Any], name: str) -> None:
    """Raise ConfigError if the file lacked weights, which transformers initialises at random."""
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise ConfigError(f"model is {name!r}; it lacks {len(lacking):,} weights of that kind of model, such as {lacking[0]}")
