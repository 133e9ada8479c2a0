"""Send long prompts through the model in chunks.

Each chunk attends to itself and to the KV before it, streamed back from the host (`kvthaw.cache.kv_prefetcher`). For a
prompt of any length the device holds only one chunk's activations and a few runs of KV. The result is that of one pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvthaw.cache.device_memory import available, margin
from kvthaw.engine.hf.cache import Cache
from kvthaw.engine.hf.cache_argument import CACHE

CHUNK = 16384
"""Most tokens of a prompt per forward. For an 8B model, attention takes longer than the transfer of earlier KV from 3,000 tokens
on. At this size matrix products run at full speed, and activations take 2 GB."""
_LEAST = 2048
_APART = 2.5  # memory that activations take with gaps between them, of their bytes

_log = logging.getLogger(__name__)
_WITH_TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": 0}
"""Arguments of forward with one column per new token, and the dimension of the columns."""
_AS_THEY_ARE = {CACHE, "use_cache", "return_dict"}


def default_chunk(model: PreTrainedModel) -> int:
    """Return the tokens of a prompt per forward: CHUNK, or fewer if their activations would not fit what a GPU keeps for them.

    With 24 GiB and 8B weights of 16 bits there are 8,192. In chunks of 16,384 a running batch ran out of memory.
    """
    if model.device.type != "cuda":
        return CHUNK
    config, chunk = model.config.get_text_config(decoder=True), CHUNK
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = inner if isinstance(inner, int) else max(inner)  # Gemma 3n has one of each layer
    token = _APART * model.dtype.itemsize * (2 * inner + 6 * config.hidden_size)
    while chunk > _LEAST and chunk * token > margin(available(model.device)[1]):
        chunk //= 2
    return chunk


def spans(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Split a prompt into chunks of one size, except for the first, which may be shorter.

    Equal chunks mean few shapes. The short chunk comes first, because indexes on the host are built during the last one.
    """
    return [(max(0, stop - chunk), stop) for stop in reversed(range(tokens, 0, -chunk))]


def in_chunks(forward: Callable[..., Any], given: dict[str, Any], cache: Cache, chunk: int, names: Collection[str]) -> Any:
    """Run a model's forward of new tokens chunk by chunk, the last candidates of assisted decoding separately. Returns the
    requested logits.

    Some prompts go through in one pass, and the log says why. Layers that cannot continue after a chunk (linear attention)
    require it. So do arguments other than tokens, positions, a 2-D mask and a number of logits to keep.

    given: the arguments of forward, by name.
    cache: the kvthaw cache behind its past_key_values.
    chunk: the most tokens of a chunk.
    names: names of forward's arguments.
    """
    tokens, candidates, columns = new_tokens(given), drafted(given, cache), columns_of(given)
    reason = reason_for_one_pass(given, cache, names)
    if reason is not None:
        _log.warning("%d tokens go through the model in one pass: %s", tokens, reason)
        return forward(**given)
    before, mask, keep = cache.kv.sequences.padded_length, given.get("attention_mask"), given.get("logits_to_keep")
    keep = 0 if keep is None else keep
    # A tensor or a number, as transformers takes it.
    wanted = torch.arange(tokens)[keep.cpu() if isinstance(keep, Tensor) else slice(-keep, None)]
    logits: list[Tensor] = []
    places: list[Tensor] = []  # their places among the wanted logits

    def run(parts: list[tuple[int, int]]) -> Any:
        for start, stop in parts:
            part = {name: given[name].narrow(dim, start, stop - start) for name, dim in columns.items()}
            if mask is not None:
                part["attention_mask"] = mask[:, : before + stop] if stop < tokens else mask
            place = ((wanted >= start) & (wanted < stop)).nonzero()[:, 0]
            some = wanted[place].to(keep.device) - start if isinstance(keep, Tensor) and len(place) else max(1, len(place))
            out = forward(**{**given, **part, "logits_to_keep": some})
            if len(place):
                logits.append(out.logits)
                places.append(place)
        return out

    prompt = tokens - candidates
    if prompt == 1 and before:  # a generated token: a decode step, like the candidates after it
        prompt = 0
    if prompt:
        with cache.prompt(prompt) if prompt > chunk else nullcontext():
            out = run(spans(prompt, chunk))
    if prompt < tokens:
        size = 1 if cache.shares_kv else tokens - prompt
        with cache.verification():
            cache.reserve(tokens - prompt)
            out = run([(prompt + start, prompt + stop) for start, stop in spans(tokens - prompt, size)])
    if not logits:
        out.logits = out.logits[:, :0]
    else:
        out.logits = torch.cat(logits, dim=1) if len(logits) > 1 else logits[0]
        if isinstance(keep, Tensor):
            out.logits = out.logits[:, torch.cat(places).argsort().to(out.logits.device)]
    return out


def drafted(given: dict[str, Any], cache: Cache) -> int:
    """Count the candidates of assisted decoding at the end of the new tokens. It requests the logits of each, and of the token
    before."""
    keep = given.get("logits_to_keep")
    return max(0, keep - 1) if cache.rolls_back and isinstance(keep, int) and new_tokens(given) > 1 else 0


def new_tokens(given: dict[str, Any]) -> int:
    """Count the new tokens among a forward's arguments."""
    return max((given[name].shape[1] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), default=0)


def columns_of(given: dict[str, Any]) -> dict[str, int]:
    """Return the arguments that have a column for each new token, and the dimension of the columns."""
    return {name: dim for name, dim in _WITH_TOKENS.items() if given.get(name) is not None}


def reason_for_one_pass(given: dict[str, Any], cache: Cache, names: Collection[str]) -> str | None:
    """Return why a prompt must go through in one pass; None if it need not."""
    if "logits_to_keep" not in names:
        return "the model does not take a number of logits_to_keep"
    if cache.foreign:
        return f"a {cache.foreign[0]} may not continue where a chunk ended"
    known = {*_WITH_TOKENS, *_AS_THEY_ARE, "attention_mask", "logits_to_keep"}
    asked = [name for name, value in given.items() if name not in known and value is not None and value is not False]
    if asked:
        return f"{asked[0]} is given"
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "attention_mask is not one of the padding"
    if given.get("return_dict") is False:
        return "a tuple is to be returned"
    return None


def may_reuse(given: dict[str, Any], cache: Cache, names: Collection[str]) -> bool:
    """Return whether a prompt may start with its cached prefix: it is the first of a cache, and could go through in chunks.

    It must be one sequence without padding, at positions from 0 on, with only the last token's logits requested.
    """
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or len(ids) > 1 or ids.shape[1] == 1 or cache.kv.sequences.padded_length:
        return False
    padded = isinstance(mask, Tensor) and not bool(mask.all())
    if padded or given.get("logits_to_keep") != 1 or reason_for_one_pass(given, cache, names) is not None:
        return False
    places = [given[name] for name in ("position_ids", "cache_position") if given.get(name) is not None]
    return all(bool((each.cpu() == torch.arange(ids.shape[1])).all()) for each in places)  # else other prompts lack such KV
