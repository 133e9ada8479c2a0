"""kvthaw serve: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import load_model, prompt_text
from kvthaw.cli.options import dense_of, host_bytes_of, one_budget
from kvthaw.cli.progress import stderr, waiting
from kvthaw.errors import ConfigError

if TYPE_CHECKING:
    from kvthaw.engine.batch import Batch

EXAMPLES = (
    "Needs pip install kvthaw\\[serve].\n\nExamples:\n\n  kvthaw serve\n\n"
    "  kvthaw serve meta-llama/Llama-3.1-8B-Instruct --method pariskv-plus --budget 1024 --max-seqs 16 --max-len 131072\n\n"
    "  kvthaw serve ./my-model --chat-template chat.jinja --api-key-file keys.txt --host 0.0.0.0"
)
_LENGTH = 131072  # unless --max-len is given or the model's positions end before


def serve(
    served: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The model, as for --model; one of the two is enough.", callback=options.named_model
        ),
    ] = None,
    model: Annotated[str | None, options.MODEL] = None,
    method: options.Method = "auto",
    budget: options.Budget = None,
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "auto",
    max_seqs: Annotated[int, typer.Option(min=1, help="Requests that are decoded at once.")] = 8,
    max_len: Annotated[
        int | None,
        typer.Option(
            parser=options.tokens_of,
            metavar="TOKENS",
            help=f"Most tokens of a request. Default {_LENGTH:,}, or the model's positions.",
        ),
    ] = None,
    device_memory: options.DeviceMemory = None,
    kv_dtype: options.KvDtype = None,
    host_memory: options.HostMemory = None,
    prefix_memory: Annotated[
        str | None,
        typer.Option(
            help='Memory for prompts that others may begin with, such as "16GiB". Default: a quarter of what is free.'
        ),
    ] = None,
    kv_dir: Annotated[
        Path | None, typer.Option(help="Keep documents that have a name in this folder, for the next start.", file_okay=False)
    ] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prefill this text and keep it under its name without suffix; may be repeated.", exists=True, dir_okay=False
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered with 429.")] = 64,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that requests have to finish after SIGTERM or Ctrl-C.")] = 30,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Require one of the keys in this file, one a line.", exists=True, dir_okay=False)
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja; without it the tokenizer's own.", exists=True, dir_okay=False)
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model. Default MODEL.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat completions, completions and responses, streamed or not.

    Also /v1/contexts, /v1/models, /tokenize, /detokenize, /health, /ready, /version and /metrics. Ends with exit code 0 on SIGTERM.
    """
    if served is not None and model is not None:
        raise typer.BadParameter(f"{served!r} and --model {model} are given; one of them is enough", param_hint="MODEL")
    model, allowed = served or model or "shipped", one_budget(budget)
    kept, host_bytes = dense_of(dense_layers), host_bytes_of(host_memory)
    keys = tuple(line.strip() for line in prompt_text(None, api_key_file).splitlines() if line.strip()) if api_key_file else ()
    if api_key_file is not None and not keys:
        raise ConfigError(f"{api_key_file} holds no key")
    template = None if chat_template is None else prompt_text(None, chat_template)
    from kvthaw.methods.auto import check_name

    check_name(method)  # a wrong name costs no loading
    try:
        from kvthaw.serve.server import listen, run
        from kvthaw.serve.service import Service
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvthaw":
            raise
        raise ConfigError(f"the server's packages are not installed ({error}): pip install kvthaw[serve]") from None
    from kvthaw.cache.prefix import PrefixCache
    from kvthaw.engine.batch import Batch
    from kvthaw.engine.hf.model import positions
    from kvthaw.engine.library import Library

    with listen(host, port) as socket:  # an address that is taken costs no loading either
        llm, tokenizer = load_model(model, device, dtype)
        length = max_len or min(_LENGTH, positions(llm) or _LENGTH)
        settings: dict[str, Any] = {
            "budget": allowed,
            "retrieved": retrieved,
            "dense_layers": kept,
            "host_bytes": host_bytes,
            "device_memory": device_memory,
            "kv_dtype": kv_dtype,
        }
        with waiting("allocating"):
            prefix = PrefixCache(host_bytes=prefix_memory)
            batch = Batch(llm, method, max_seqs=max_seqs, capacity=length, prefix_cache=prefix, **settings)
            batch.join([0], max_new_tokens=2, stop=())  # all that a step needs: what does not fit fails here
            while batch.requests:
                batch.step()
        name = served_model_name or model
        library = None if kv_dir is None else Library(batch.cache, prefix, kv_dir)
        with waiting("restoring documents"):
            service = Service(batch, tokenizer, name, chat_template=template, max_waiting=max_waiting, library=library)
        for path in context or ():
            with waiting(f"reading {path.name}"):
                new = _read(batch, tokenizer, path)
            if library is not None and new:
                library.save(path.stem, library.parts(path.stem))
        where = f"http://{host}:{socket.getsockname()[1]}"
        stderr().print(f"serving {name} at {where}", style="dim", highlight=False, soft_wrap=True)
        run(service, socket, grace=grace, api_keys=keys)


def _read(batch: Batch, tokenizer: Any, path: Path) -> bool:
    """Keep a text under the name of its file. Returns whether it was not kept already."""
    request = batch.request(tokenizer(prompt_text(None, path))["input_ids"], max_new_tokens=1, name=path.stem)
    kept = None if batch.prefix_cache is None else batch.prefix_cache.entries.get(path.stem)
    if kept is not None and kept.ids.equal(request.ids):
        return False
    batch.prefill(batch.join(request), request.prompt)
    batch.start(timeout=None)
    if request.error is not None:
        raise request.error
    return True
