"""kvthaw generate: continue a prompt."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import load_model, prompt_text, warned
from kvthaw.cli.options import dense_of, one_budget
from kvthaw.cli.progress import bars, stderr, waiting
from kvthaw.errors import ConfigError
from kvthaw.formatting import seconds

EXAMPLES = (
    'Examples:\n\n  kvthaw generate "The sky is blue. The sun is" --max-new-tokens 8\n\n'
    "  kvthaw generate --file book.txt --method icecache-digest --budget 256\n\n"
    "  kvthaw generate --file book.txt --kv book.kv\n\n"
    "  cat book.txt | kvthaw generate --model meta-llama/Llama-3.1-8B --budget 0.05 --json"
)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.", exists=True, dir_okay=False)] = None,
    model: options.Model = "shipped",
    method: options.Method = "auto",
    plugin: options.Plugin = None,
    budget: options.Budget = None,
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "auto",
    device_memory: options.DeviceMemory = None,
    kv_dtype: options.KvDtype = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: options.Seed = 0,
    kv: Annotated[
        Path | None,
        typer.Option(
            help="Keep the prompt's KV in this folder: a prompt that begins like the one kept is prefilled from there on."
        ),
    ] = None,
    kv_dir: options.KvDir = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Continue a prompt under a method and a budget.

    The text goes to stdout, progress and what the cache did to stderr.
    """
    allowed = one_budget(budget)
    if kv is not None and kv_dir is not None:
        raise ConfigError("--kv and --kv-dir are given; one of them is enough")
    text = prompt_text(prompt, file)
    if not text.strip():
        raise ConfigError("the prompt is empty")
    from kvthaw.methods.auto import check_name

    check_name(method)  # a wrong name costs no loading
    from kvthaw.engine.decode import generate as tokens_of
    from kvthaw.engine.hf import Cache
    from kvthaw.engine.hf.kv_dir import KvDir, fill, keep
    from kvthaw.engine.hf.model import check_prompt
    from kvthaw.engine.prefill import prefill
    from kvthaw.engine.sampling import Sampling
    from kvthaw.evaluate.machine import now, versions
    from kvthaw.evaluate.text import AnswerText, stop_tokens

    sampling = Sampling(temperature, seed=seed)
    llm, tokenizer = load_model(model, device, dtype)
    ids = list(tokenizer(text)["input_ids"])
    check_prompt(llm, len(ids))
    start = now(llm.device)
    settings: dict[str, Any] = {"budget": allowed, "retrieved": retrieved, "dense_layers": dense_of(dense_layers)}
    settings |= {"seed": seed, "device_memory": device_memory, "kv_dtype": kv_dtype}
    cache, folder = Cache(llm, method, **settings), None if kv_dir is None else KvDir(kv_dir, warned)
    kept = 0 if kv is None else fill(cache, kv, ids, warned)
    kept = kept if folder is None else folder.fill(cache, ids)
    with bars() as progress:
        task = progress.add_task("prefill", total=len(ids))
        logits = prefill(llm, cache, ids[kept:], progress=lambda done, _: progress.update(task, completed=kept + done))
        first = now(llm.device) - start  # the first token follows from these logits
    with waiting("offloading and indexing"):
        cache.wait()
    with waiting("saving") if kv or folder else nullcontext():
        if kv is not None and not kept:
            keep(cache, kv, ids, warned)
        if folder is not None:
            folder.keep(cache, ids, kept)
    out, times = AnswerText(tokenizer), []
    stops = stop_tokens(llm, tokenizer)
    live = stream and not as_json
    for token in tokens_of(llm, cache, logits, limit=max_new_tokens, stops=stops, sampling=sampling):
        times.append(time.perf_counter())
        piece = out.push(token)
        if live:
            sys.stdout.write(piece)
            sys.stdout.flush()
    new, rest = len(times), out.finish()
    stats = cache.stats()
    timing = {
        "ttft_s": first if new else None,
        "tt2t_s": times[1] - start if new > 1 else None,
        "tpot_s": (times[-1] - times[0]) / (new - 1) if new > 1 else None,
    }
    if as_json:
        record: dict[str, Any] = {
            "model": model,
            "text": out.text,
            "prompt_tokens": len(ids),
            "kept_tokens": kept,
            "new_tokens": new,
            "finish": "length" if new == max_new_tokens else "stop",
            "temperature": temperature,
            "seed": seed,
            **timing,
            **stats.to_dict(),
            "versions": versions(),
        }
        print(json.dumps(record))
        return
    print(rest if live else out.text)
    line = (
        f"{stats}; {len(ids):,} prompt tokens, {new} new; first token after {seconds(timing['ttft_s'])}, then "
        f"{seconds(timing['tpot_s'])} a token"
    )
    stderr().print(line, style="dim", highlight=False)
