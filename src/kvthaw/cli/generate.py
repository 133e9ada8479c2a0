"""kvthaw generate: continue a prompt, or answer questions about a document."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import load_model, prompt_text, warned
from kvthaw.cli.options import chat_of, dense_of, host_bytes_of, one_budget
from kvthaw.cli.progress import Reading, stderr, waiting
from kvthaw.errors import ConfigError
from kvthaw.formatting import seconds

EXAMPLES = (
    'Examples:\n\n  kvthaw generate "The sky is blue. The sun is" --max-new-tokens 8\n\n'
    '  kvthaw generate --file book.txt --question "Who stole the tarts?" --question "Who is late?" --method icecache-digest\n\n'
    '  kvthaw generate --file book.txt --question "Who is late?" --kv book.kv   (again, it reads the question alone)\n\n'
    '  kvthaw generate "Tell me a joke." --model Qwen/Qwen3-8B --chat --system "Be brief." --temperature 0.7 --top-p 0.9\n\n'
    "  cat book.txt | kvthaw generate --model meta-llama/Llama-3.1-8B --budget 0.05 --json"
)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.", exists=True, dir_okay=False)] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Ask this after the prompt; may be repeated: the prompt is prefilled once, and each question is answered alone.",
        ),
    ] = None,
    chat: options.UseChat = None,
    system: options.System = None,
    thinking: options.Thinking = None,
    chat_template: options.ChatTemplate = None,
    model: options.Model = "shipped",
    method: options.Method = "auto",
    plugin: options.Plugin = None,
    budget: options.Budget = None,
    retrieved: options.Retrieved = None,
    dense_layers: options.DenseLayers = "auto",
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    kv_dtype: options.KvDtype = None,
    prefill_chunk: options.PrefillChunk = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile decode steps first (a minute or more, on a GPU).")
    ] = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    stop: options.Stop = None,
    seed: options.Seed = 0,
    kv: Annotated[
        Path | None,
        typer.Option(
            help="Keep the KV of the prompt, without its questions, in this folder: a later prompt that begins alike prefills only "
            "its rest."
        ),
    ] = None,
    kv_dir: options.KvDir = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object an answer and nothing else on stdout.")
    ] = False,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Continue a prompt under a method and a budget, or answer questions about it.

    The text goes to stdout, progress and what the cache did to stderr.
    """
    settings: dict[str, Any] = {"budget": one_budget(budget), "retrieved": retrieved, "dense_layers": dense_of(dense_layers)}
    settings |= {"seed": seed, "device_memory": device_memory, "kv_dtype": kv_dtype, "host_bytes": host_bytes_of(host_memory)}
    if kv is not None and kv_dir is not None:
        raise ConfigError("--kv and --kv-dir are given; one of them is enough")
    text, asked = prompt_text(prompt, file), chat_of(chat, system, thinking)
    if prompt is not None and len(prompt) < 256 and Path(prompt).is_file():
        warned(f"{prompt} is a file; its name is the prompt. --file {prompt} reads it.")
    from kvthaw.methods.auto import check_name

    check_name(method)  # a wrong name costs no loading
    from kvthaw.answering import Answer, Prompts, shared_tokens
    from kvthaw.engine.hf import Cache, attach
    from kvthaw.engine.hf.chunks import CHUNK
    from kvthaw.engine.hf.kv_dir import KvDir, fill, keep
    from kvthaw.engine.hf.model import check_prompt
    from kvthaw.engine.sampling import Sampling
    from kvthaw.evaluate.machine import now, versions
    from kvthaw.evaluate.text import following, split_prompt

    sampling = Sampling(
        temperature, top_k, top_p, seed, min_p, repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty, stop=stop or (), max_tokens=max_new_tokens,
    )  # fmt: skip
    template = None if chat_template is None else prompt_text(None, chat_template)
    llm, tokenizer = load_model(model, device, dtype, asked, template)
    questions = question or [""]
    parts = [split_prompt(tokenizer, text, following(text, one), asked) for one in questions]
    prompts = [before + after for before, after in parts]
    check_prompt(llm, max(map(len, prompts)))
    start, cache, once = now(llm.device), Cache(llm, method, **settings), kv is None and kv_dir is None and len(prompts) == 1
    folder, shared = None if kv_dir is None else KvDir(kv_dir, warned), prompts[0] if once else shared_tokens(parts)
    taken = fill(cache, kv, shared, warned) if kv else folder.fill(cache, shared) if folder else 0
    source = Prompts(llm, cache, method, prompts, shared, taken, prefill_chunk)
    live = stream and not as_json
    with (
        attach(llm, method, compile=True, prefill_chunk=prefill_chunk or CHUNK) if compile_ else nullcontext(),
        ExitStack() as shown,
    ):
        show = Reading(shown)
        logits = source.read(show)
        show.end()
        with waiting("saving") if kv or folder else nullcontext():
            if kv is not None and not taken:
                keep(cache, kv, shared, warned)
            if folder is not None:
                folder.keep(cache, list(shared), taken)
        for number, (own, after, kept) in enumerate(source.each(logits, show)):
            show.end()
            if len(prompts) > 1 and not as_json:
                print(f"> {questions[number]}")
            answer, first = (
                Answer(llm, tokenizer, own, after, sampling=sampling, prompt=prompts[number]),
                now(llm.device) - start,
            )
            for piece in answer:
                if live:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            stats, new = own.stats(), len(answer.tokens)
            timing = {
                "ttft_s": first if new else None,
                "tt2t_s": answer.times[1] - start if new > 1 else None,
                "tpot_s": answer.tpot_s,
            }
            if as_json:
                record: dict[str, Any] = {
                    "model": model,
                    "text": answer.text,
                    "prompt_tokens": len(prompts[number]),
                    "kept_tokens": kept,
                    "new_tokens": new,
                    "finish": answer.finish,
                    "temperature": temperature,
                    "seed": seed,
                    **timing,
                    **stats.to_dict(),
                    "versions": versions(),
                }
                print(json.dumps(({"question": questions[number]} if question else {}) | record), flush=True)
            else:
                print("" if live else answer.text)
                line = (
                    f"{stats}; {len(prompts[number]):,} prompt tokens, {kept:,} of them kept, {new} new; first token after "
                    f"{seconds(timing['ttft_s'])}, then {seconds(timing['tpot_s'])} a token"
                )
                stderr().print(line, style="dim", highlight=False)
            start = now(llm.device)
