"""kvthaw serve: an OpenAI-compatible server."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvthaw.cli import options
from kvthaw.cli.common import needs, prompt_text
from kvthaw.cli.options import CacheOptions, file_option, flat, option
from kvthaw.cli.progress import say, waiting
from kvthaw.errors import ConfigError
from kvthaw.formatting import counted
from kvthaw.names import ALLOWED, is_name, nearest

if TYPE_CHECKING:
    from kvthaw.serve.service import Service

EXAMPLES = (
    "Needs pip install kvthaw\\[serve].\n\nExamples:\n\n  kvthaw serve\n\n"
    "  kvthaw serve meta-llama/Llama-3.1-8B-Instruct --method pariskv-plus --budget 1024 --max-seqs 16 --max-len 131072\n\n"
    "  kvthaw serve meta-llama/Llama-3.1-70B-Instruct --tp 4 --method pariskv-plus --budget 1024\n\n"
    "  kvthaw serve ./my-model --chat-template chat.jinja --api-key-file keys.txt --host 0.0.0.0"
)


@flat
def serve(
    settings: CacheOptions,
    served: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The model, as for --model; one of the two is enough.", callback=options.named_model
        ),
    ] = None,
    model: Annotated[str | None, options.MODEL] = None,
    max_seqs: int = option("Requests that are decoded at once.", 8, min=1),
    max_len: int | None = option(
        "Most tokens of a request. Default 131,072, or the model's positions.", parser=options.tokens_of, metavar="TOKENS"
    ),
    rope_scaling: options.RopeScaled = None,
    prefix_memory: str | None = option(
        'Memory for prompts that others may begin with, such as "16GiB". Default: a quarter of what is free.'
    ),
    prefix_disk: str | None = option("Disk in the folder of --kv-dir for what --prefix-memory has no room for. Default: none."),
    kv_dir: Path | None = option(
        "Keep named documents in this folder, for the next start.", parser=options.folder, metavar="DIRECTORY"
    ),
    context: list[str] | None = option(
        "Prefill this text and keep it under NAME, or the file's name without suffix; may be repeated.", metavar="[NAME=]FILE"
    ),
    max_waiting: int = option("Requests that may wait; more are answered with 429.", 64, min=0),
    grace: float = option("Seconds for requests to finish after SIGTERM or Ctrl-C.", 30, min=0),
    host: str = option("Address to listen on; 0.0.0.0: all.", "127.0.0.1"),
    port: int = option("0: any that is free.", 8000, min=0, max=65535),
    api_key_file: Path | None = file_option("Require one of the keys in this file, one a line."),
    allowed_host: list[str] | None = option(
        "Without keys, answer under this host name too; may be repeated. [bold]*[/]: under any."
    ),
    chat_template: options.ChatTemplate = None,
    generation_config: Literal["auto", "none"] = option(
        "Sampling of requests that do not say it: [bold]auto[/] by the model's generation config, [bold]none[/] as OpenAI's, "
        "temperature 1.",
        "auto",
    ),
    log_level: Literal["error", "warning", "info", "debug"] = option(
        "info: a line for each request, without texts; debug: for those of the page and of probes too.", "info"
    ),
    served_model_name: str | None = option("Name by which clients ask for the model. Default MODEL."),
    tp: int = option(
        "Split the model by heads over this number of GPUs, one per process; host memory is each one's.", 1, min=1
    ),
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat completions, completions and responses, streamed or not.

    Also /v1/contexts, /v1/models, /tokenize, /detokenize, /health, /ready, /version and /metrics. Ends with exit code 0 on SIGTERM.
    """
    if served is not None and model is not None:
        raise typer.BadParameter(f"{served!r} and --model {model} are given; one of them is enough", param_hint="MODEL")
    method, config = settings.method, settings.config()
    model = served or model or "shipped"
    contexts = _contexts(context or ())
    keys = () if api_key_file is None else _keys(api_key_file)
    if tp > 1 and device is not None:
        raise ConfigError(f"--tp is {tp} and --device {device!r}; each process takes the device of its number, or the CPU")
    if tp > 1 and kv_dir is not None:
        raise ConfigError(f"--tp is {tp} and --kv-dir {str(kv_dir)!r}; a split model's documents are not saved")
    if tp > 1 and find_spec("accelerate") is None:
        raise ConfigError(f"--tp is {tp}; transformers splits a model with accelerate: pip install kvthaw[tp]")
    if prefix_disk is not None and kv_dir is None:
        raise ConfigError(f"--prefix-disk is {prefix_disk}; it needs --kv-dir, the folder that has the file")
    from kvthaw.methods.auto import check_settings

    check_settings(method, config)  # what is wrong costs no loading
    local = Path(model).expanduser()
    name = served_model_name or (local.resolve().name.removesuffix(".gguf") if local.exists() else model)
    how: dict[str, Any] = {
        "max_seqs": max_seqs,
        "max_len": max_len,
        "max_waiting": max_waiting,
        "prefix_memory": prefix_memory,
        "prefix_disk": prefix_disk,
        "kv_dir": None if kv_dir is None else kv_dir.absolute(),
        "contexts": contexts,
        "name": name,
        "chat_template": options.words(chat_template),
        "generation_config": generation_config,
        "rope_scaling": rope_scaling,
        "tp": tp,
        "device": device,
        "dtype": dtype,
        "config": config,
    }

    with _ends_on_sigterm(), _listen(host, port) as listener:  # a taken address costs no loading either
        from kvthaw.engine.processes import spawned
        from kvthaw.serve.build import build, follow
        from kvthaw.serve.server import Server, run

        with spawned(tp, follow, model, method, how):
            service = build(model, method, progress=waiting, **how)
            say(f"serving {name} at http://{host}:{listener.getsockname()[1]}")
            for line in _told(service, method):
                say(line)
            _log_to_stderr(log_level)
            run(Server(service, grace=grace, api_keys=keys, hosts=(host, *(allowed_host or ()))), listener)
            service.batch.cache.replay = None  # captured steps hold the group's collectives


def _listen(host: str, port: int) -> socket.socket:
    """Return the server's listening socket. Raises ConfigError if the address is taken or the server's packages are missing."""
    with needs("the server's packages are", "serve"):
        import fastapi  # noqa: F401

        from kvthaw.serve.protocol import listen
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(f"--port is {port}, which is in use at {host}; --port 0 takes one that is free") from None


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """End the process on SIGTERM with exit code 0, also while it loads a model and reads documents.

    The first process of a container has no default action for it.
    """

    def end(*_: object) -> None:
        raise SystemExit(0)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _told(service: Service, method: str) -> Iterator[str]:
    """Yield lines that describe a server."""
    batch, kept = service.batch, service.documents.kept()
    budget = batch.cache.settings.budget
    limits = [method, *([] if budget is None else [f"budget {budget:,}"]), f"{counted(batch.capacity, 'token')} a request"]
    yield "a page at /, OpenAI's API at /v1; " + ", ".join([*limits, f"{batch.max_seqs} decoded at once"])
    if kept:
        yield "documents: " + ", ".join(f"{name} ({counted(len(entry.ids), 'token')})" for name, entry in sorted(kept.items()))
    if not service.chats:
        yield "without a chat template: completions only; --chat-template gives one"
    each = ", ".join(f"{name} {value:g}" for name, value in service.defaults.items())
    whose = (
        f"{each}, by the model's generation config"
        if each
        else "temperature 1, OpenAI's default; small models need less, and 0 takes the likeliest token"
    )
    yield f"sampling, where a request does not set it: {whose}"


def _log_to_stderr(level: str) -> None:
    """Write what kvthaw logs, with times."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("kvthaw")
    log.addHandler(handler)
    log.setLevel(level.upper())


def _keys(file: Path) -> tuple[str, ...]:
    """Read a key from each line that does not begin with #."""
    lines = [line.strip() for line in prompt_text(None, file).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file is {str(file)!r}; it has no key, a line that does not begin with #")
    return keys


def _contexts(given: Sequence[str]) -> dict[str, str]:
    """Read the texts of files, by the names that they are given or have."""
    files = dict[str, Path]()
    for each in given:
        name, equals, file = each.partition("=")
        if not equals or Path(each).exists():
            name, file = Path(each).stem, each
        path = Path(file).expanduser()
        if not file:
            raise typer.BadParameter(f"{each!r} names no file after '='; it must be {name}=FILE", param_hint="--context")
        if not path.exists() or path.is_dir():
            wrong = f"{file!r} is a folder" if path.is_dir() else f"there is no file {file!r}"
            within = "" if file == each else f"{each!r}: "
            raise typer.BadParameter(f"{within}{wrong}; give FILE or NAME=FILE", param_hint="--context")
        if not is_name(name):
            better = f"{nearest(name) or 'NAME'}={file}"
            raise ConfigError(f"--context {each!r} has the name {name!r}; it must be {ALLOWED}: --context {better!r}")
        if name in files:
            both = f"{str(files[name])!r} and {file!r}"
            raise ConfigError(f"--context is {both}, both with the name {name!r}; give one another as NAME=FILE")
        files[name] = path
    return {name: prompt_text(None, path) for name, path in files.items()}
