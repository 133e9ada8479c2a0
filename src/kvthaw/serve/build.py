"""Build the service of a server from names and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kvthaw.cache.prefix import PrefixCache
from kvthaw.config import CacheConfig
from kvthaw.engine.batch import Batch
from kvthaw.engine.generation_config import recommended
from kvthaw.engine.hf.attention import choose_flash_attention_4
from kvthaw.engine.hf.cache import check_settings
from kvthaw.engine.hf.model import Dtype, check_text, load, more_tokens, positions, silence
from kvthaw.engine.hub import SHIPPED
from kvthaw.engine.library import Library
from kvthaw.engine.warm import warm
from kvthaw.errors import ConfigError
from kvthaw.names import check_kept_name
from kvthaw.serve.service import Service
from kvthaw.serve.turns import Turns, about_document

GenerationConfig = Literal["auto", "none"]
LENGTH = 131072
"""Tokens of a request, unless they are given or the model's positions end before."""


def build(
    model: str = SHIPPED,
    method: str = "auto",
    *,
    max_seqs: int = 8,
    max_len: int | None = None,
    max_waiting: int = 64,
    prefix_memory: int | str | None = None,
    prefix_disk: int | str | None = None,
    kv_dir: Path | None = None,
    contexts: Mapping[str, str] = MappingProxyType({}),
    name: str | None = None,
    chat_template: str | None = None,
    generation_config: GenerationConfig = "auto",
    rope_scaling: str | None = None,
    tp: int = 1,
    device: str | None = None,
    dtype: Dtype = "auto",
    progress: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **settings: Any,
) -> Service:
    """Load a model and allocate all memory of a step, so that a lack of memory fails here.

    Raises ConfigError, before weights are read, for settings that no cache of the model takes. A max_len above the model's
    positions and a context longer than a request raise it too.

    model, rope_scaling, tp, device, dtype: see `load`. All processes of a split model call this with the same arguments at the
        same time.
    prefix_memory: see `PrefixCache`.
    prefix_disk: bytes of a file in kv_dir for other prompts; see `PrefixCache`.
    kv_dir: folder of named documents.
    contexts: texts to prefill and keep, by name. Each follows the beginning of the chat template, if there is one.
    name: the model's name for clients; None: model.
    generation_config: "auto" uses the model's sampling settings instead of OpenAI's defaults.
    progress: wraps each long phase.
    settings: settings of `Batch`.
    """
    for title in contexts:
        check_kept_name(title, "contexts")
    own, options = CacheConfig.split(settings)

    def check(tokenizer: Any, config: Any) -> None:
        most = positions(config)
        if max_len is not None and most is not None and max_len > most:
            raise ConfigError(f"max_len is {max_len:,}; the model's positions end at {most:,}: rope_scaling gives it more")
        check_settings(config, method, own)
        for title, text in contexts.items():
            try:
                check_text(tokenizer, text, most)
            except ConfigError as error:
                raise ConfigError(f"context {title!r}: {error}") from None
            if (tokens := more_tokens(tokenizer, text, max_len or LENGTH)) is not None:
                raise ConfigError(
                    f"context {title!r} has about {tokens:,} tokens; a request has at most {max_len or LENGTH:,}: raise max_len"
                )

    silence()
    with progress(f"loading {model}"):
        llm, tokenizer = load(model, device=device, dtype=dtype, rope_scaling=rope_scaling, tp=tp, prepare=check)
    choose_flash_attention_4(llm)
    with progress("allocating"):
        folder = None if prefix_disk is None else kv_dir
        prefix = PrefixCache(host_bytes=prefix_memory, kv_dir=folder, disk_bytes=prefix_disk)
        length = max_len or min(LENGTH, positions(llm) or LENGTH)
        batch = Batch(llm, method, max_seqs=max_seqs, capacity=length, prefix_cache=prefix, config=own, **options)
        warm(batch)
    library = None if kv_dir is None else Library(batch.cache, prefix, kv_dir, batch.admission.leaves_room)
    with progress("restoring documents"):
        service = Service(
            batch,
            tokenizer,
            name or model,
            chat_template=chat_template,
            max_waiting=max_waiting,
            library=library,
            defaults=recommended(llm) if generation_config == "auto" else {},
        )
    for title, text in contexts.items():
        with progress(f"reading {title}"):
            new = _read(batch, prefix, service.turns if service.chats else None, tokenizer, title, text)
        if library is not None and new:
            library.save(title)
    return service


def follow(model: str, method: str, how: Mapping[str, Any]) -> None:
    """Run another process of a served split model until the first one ends.

    how: as for build().
    """
    service = build(model, method, **how)
    service.worker.lockstep.follow(service.worker.scheduler, service.tokenizer)
    service.batch.cache.replay = None  # captured steps hold the group's collectives


def _read(batch: Batch, prefix: PrefixCache, turns: Turns | None, tokenizer: Any, name: str, text: str) -> bool:
    """Keep a text under a name. Returns False if it was already kept.

    turns: None without a chat template.
    """
    kept, about = prefix.entries.get(("", name)), None if turns is None else about_document(text)
    if kept is not None and turns is not None and kept.about == about and turns.opens(kept.ids.tolist()):
        return False
    ids = tokenizer(text)["input_ids"] if turns is None else turns.document(text)
    request = batch.request(ids, max_new_tokens=1, name=name, about=about)
    if kept is not None and kept.ids.equal(request.spec.ids):
        return False
    batch.prefill(batch.join(request), request.prompt)
    batch.start(timeout=None)
    batch.read()
    if request.error is not None:
        raise request.error
    return True
