"""The adapter to Hugging Face transformers: the only place that touches its internals.

`attention.py` is called by the model, `layer.py` and `cache.py` are its cache, `handle.py` attaches, `hooks.py` serves methods that
ask for more than q, k and v.
"""

from kvthaw.cache.kv_cache import Stats
from kvthaw.engine.hf.attention import use_kvthaw_attention
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.handle import Handle, attach, detach

__all__ = ["Cache", "Handle", "Stats", "attach", "detach", "use_kvthaw_attention"]
