"""The adapter to Hugging Face transformers, and the only package that imports it.

`layer.py` and `cache.py` are the model's cache and attention function, which `attention.py` installs. `handle.py` attaches
a model, whose forward `chunks.py` and `replay.py` then are. `hooks.py` serves methods that need more than q, k and v.
`model.py` loads models.
"""

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvthaw.cache.stats import Stats
from kvthaw.engine.hf.attention import use_kvthaw_attention
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.handle import Handle, attach, detach

__all__ = [
    "Cache",
    "DynamicCache",
    "Handle",
    "PreTrainedConfig",
    "PreTrainedModel",
    "Stats",
    "attach",
    "detach",
    "use_kvthaw_attention",
]
