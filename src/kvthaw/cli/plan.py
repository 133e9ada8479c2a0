"""kvthaw plan: memory and time for a model and a length, and the largest that fit, from the model's config alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from kvthaw.bench.gpus import GPUS, Machine, find_gpu, known_gpu
from kvthaw.bench.shapes import SHAPES, TRAINED
from kvthaw.cli import options
from kvthaw.cli.common import print_wide, stdout
from kvthaw.cli.options import CacheOptions, flat, names_of, option, single, tokens_of
from kvthaw.cli.progress import waiting
from kvthaw.errors import ConfigError, unknown
from kvthaw.formatting import counted, human, read_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvthaw.bench.forecast import Forecast, Forecaster
    from kvthaw.engine.hf import PreTrainedConfig

EXAMPLES = (
    "Examples:\n\n  kvthaw plan --shape llama-3.1-8b --length 128k --gpu RTX-4090 --host-memory 64GB\n\n"
    "  kvthaw plan --model Qwen/Qwen3-8B --length 32k --batch 24 --gpu H100\n\n"
    "  kvthaw plan --model ./my-model --length 100000 --gpu-memory 24GB --method clusterkv-plus --budget 1024 --json"
)
_METHODS = ["auto", "full", "thaw", "pariskv-plus", "clusterkv-plus", "icecache-digest"]
_LENGTH = 131072


@dataclass(frozen=True, slots=True)
class _CacheOptions(CacheOptions):
    method: options.Methods = field(default_factory=_METHODS.copy)  # type: ignore[assignment]  # several here
    host_memory: str | None = option('Free memory of the host, such as "64GB", 64 GiB. Default: without a limit.')


@flat
def plan(
    given: _CacheOptions,
    model: str | None = option(
        "A local folder, a .gguf file or an id on the hub; no weights are read.", metavar="NAME", callback=options.named_model
    ),
    shape: str | None = option(f"Instead of a model: one of {', '.join(SHAPES)}."),
    length: list[str] | None = option(
        "Tokens of each prompt. Default: 128k, or as many as the model has positions for.", metavar="TOKENS"
    ),
    new_tokens: int = option("Tokens of each answer, at most.", 256, min=1, max=options.MOST),
    batch: int = option("Sequences that are decoded together.", 1, min=1, max=4096),
    gpu: str | None = option(f"{', '.join(GPUS)}; [bold]none[/]: a CPU. Default: this machine's.", metavar="NAME"),
    gpu_memory: str | None = option('Its memory, as it is sold: "24GB" is 24 GiB. Default: that of --gpu.'),
    dtype: options.Dtype = "auto",
    weights: str | None = option('Bytes of the weights, such as "5GB", where they are quantised.'),
    rope_scaling: options.RopeScaled = None,
    as_json: options.Json = False,
) -> None:
    """Estimate the memory and the time a token that a model, a method and a length take, before any weight is loaded.

    Bytes are the cache's own allocations, on torch's meta device, which allocates no memory. Milliseconds a token are of
    captured steps: expected if GPU and method were measured, otherwise estimated from bytes. The number in brackets is for
    steps without a single cache hit.
    """
    config = replace(given, host_memory=None).config()  # it is the machine's here
    asked, names = length and single(length, tokens_of, "--length"), names_of(given.method)
    if (model is None) == (shape is None):
        raise typer.BadParameter("give one of --model and --shape", param_hint="--model")
    if shape is not None and shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    if shape is not None and rope_scaling is not None:
        raise ConfigError(f"--rope-scaling is {rope_scaling}; it is for --model: a shape's positions have no end")
    whole = None if weights is None else read_bytes(weights, "--weights")
    machine = _machine(gpu, gpu_memory, given.host_memory)
    with waiting("planning"):
        from kvthaw.methods.auto import check_settings

        for name in names:  # a note below names full attention in 8 bits
            check_settings(name, replace(config, kv_dtype=None))
        from kvthaw.bench.forecast import Forecaster
        from kvthaw.engine.hf.model import read_dtype

        about_model = _config(model, shape, rope_scaling)
        kind = read_dtype(dtype, cuda=not machine.cpu)
        forecaster = Forecaster(about_model, kind, machine, config, batch=batch, new_tokens=new_tokens, weights=whole)
        tokens = asked or min(_LENGTH, forecaster.most)
        found = [forecaster.forecast(name, tokens) for name in names]
    about = {
        "model": model or shape, "dtype": str(kind).removeprefix("torch."), "length": tokens, "new_tokens": new_tokens,
        "batch": batch, "gpu": machine.gpu.name if machine.gpu else None, "gpu_memory": machine.gpu_memory,
        "host_memory": machine.host_memory, "weights": forecaster.weights, "gpu_room": forecaster.room,
    }  # fmt: skip
    if as_json:
        print(json.dumps(about | {"forecasts": [one.to_dict() for one in found]}))
        return
    print_wide(_places(about, found[0], forecaster))
    if len(found) > 1:
        print_wide(_methods(found, forecaster))
    for line in _words(about, found[0], forecaster):
        stdout().print(line, soft_wrap=True)
    stored = [one.method for one in found if one.needs.rows or one.needs.blocks]
    if given.kv_dtype is not None and len(stored) < len(found):
        idle = ", ".join(one.method for one in found if one.method not in stored)
        stdout().print(f"--kv-dtype {given.kv_dtype} changes nothing here for {idle}: no rows are stored.", soft_wrap=True)


def _machine(gpu: str | None, gpu_memory: str | None, host_memory: str | None) -> Machine:
    """Return the machine of the options, with this machine's GPU by default."""
    memory, host = _memory(gpu_memory, "--gpu-memory"), _memory(host_memory, "--host-memory")
    if gpu == "none":
        if memory is not None:
            raise ConfigError(f"--gpu is none and --gpu-memory is {gpu_memory!r}; give one of them")
        return Machine(host_memory=host, cpu=True)
    if gpu is None and memory is None:
        import torch

        if torch.cuda.is_available():
            name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
            return Machine(gpu=known_gpu(name), gpu_memory=memory, host_memory=host)
    known = None if gpu is None else find_gpu(gpu)
    return Machine(gpu=known, gpu_memory=known.memory if known and memory is None else memory, host_memory=host)


def _memory(given: str | None, option: str) -> int | None:
    """Return the bytes of a machine's memory. Raises ConfigError for so few that the unit was left out."""
    found = None if given is None else read_bytes(given, option)
    if found is not None and found < 1 << 20:
        raise ConfigError(f"{option} is {given!r}, which is {counted(found, 'byte')}; give it a unit, such as 24GB")
    return found


def _config(model: str | None, shape: str | None, rope_scaling: str | None) -> PreTrainedConfig:
    from kvthaw.bench.shapes import config
    from kvthaw.engine.hf.model import load_config, silence
    from kvthaw.engine.rope_scaling import RopeScaling

    silence()
    if model is None and shape is not None:
        return config(shape)
    found = load_config(str(model))
    if rope_scaling is not None:
        RopeScaling.read(rope_scaling).apply(found)
    return found


def _places(about: dict[str, Any], one: Forecast, forecaster: Forecaster) -> Table:
    """Return the bytes of the first method by place."""
    from kvthaw.cache.device_memory import margin
    from kvthaw.evaluate.report import lay_out

    needs, many = one.needs, "" if about["batch"] == 1 else f" x {about['batch']}"
    where = about["gpu"] or ("a CPU" if forecaster.machine.cpu else "a GPU")
    places = [
        ("weights", forecaster.weights, 0),
        ("KV of layers that attend to everything", needs.dense, 0),
        ("KV of sliding-window layers", needs.windows, 0),
        ("sink, window, buffer and pool", needs.slab, 0),
        ("index", needs.index, needs.host_index),
        ("rows in blocks", needs.blocks, needs.rows),
    ]
    shown = [(what, *(human(size) if size else "" for size in sizes)) for what, *sizes in places if any(sizes)]
    rows = [*shown, (), ("sum", human(forecaster.weights + needs.device), human(needs.host))]
    if about["gpu_memory"] is not None:
        rows.append(("kept for activations", human(margin(about["gpu_memory"])), ""))
    if about["gpu_memory"] or about["host_memory"]:
        rows.append(("there is", *(human(about[name]) if about[name] else "" for name in ("gpu_memory", "host_memory"))))
    title = f"{about['model']}, {about['dtype']}, {counted(about['length'], 'token')}{many}, {one.method}, on {where}"
    return lay_out(title, ("what", "device", "host"), rows, words=("what",))


def _methods(found: list[Forecast], forecaster: Forecaster) -> Table:
    """Return the methods side by side."""
    from kvthaw.evaluate.report import lay_out

    rows = []
    for one in found:
        name = one.method if one.in_force == one.method.partition(":")[0] else f"{one.method} ({one.in_force})"
        fits = "" if one.fits is None else "yes" if one.fits else "no"
        device = human(forecaster.weights + one.needs.device)
        rows.append((name, device, human(one.needs.host), fits, _time(one), _longest(one, forecaster.most)))
    columns = ("method", "device", "host", "fits", "ms/token", "longest")
    used = [at for at in range(len(columns)) if any(row[at] for row in rows)]  # without a GPU's name no times
    title = "Methods: bytes with the weights, and the longest prompt that fits"
    return lay_out(title, [columns[at] for at in used], [[row[at] for at in used] for row in rows])


def _longest(one: Forecast, most: int) -> str:
    """Return the longest prompt that fits, in units of 1,024 tokens as --length takes them."""
    if one.longest is None:
        return ""
    return "none" if not one.longest else "all" if one.longest == most else f"{one.longest // 1024:,}k"


def _time(one: Forecast) -> str:
    """Return milliseconds a token, with ~ if estimated."""
    if one.step_s is None or one.step_no_hits_s is None:
        return ""
    digits = 1 if one.step_no_hits_s < 0.1 else 0
    low, high = (f"{1000 * seconds:.{digits}f}" for seconds in (one.step_s, one.step_no_hits_s))
    return f"{'~' * (one.basis == 'estimated')}{low}" + (f" ({high})" if high != low else "")


def _words(about: dict[str, Any], one: Forecast, forecaster: Forecaster) -> list[str]:
    """Return the first forecast in sentences."""
    from kvthaw.engine.rope_scaling import RopeScaling

    needs = one.needs
    takes = "full attention" if needs.plan is None else f"at most {needs.plan.budget:,} tokens attended a step"
    if one.in_force not in ("full", one.method.partition(":")[0]):
        takes = f"{one.in_force}, {takes}"
    said = [f"{one.method}: {takes}" + (f"; {needs.reason}." if needs.reason else ".")]
    if needs.blocks and one.method == "auto":
        said[-1] += f" It keeps {human(needs.blocks)} of rows on the device, which has room for them."
    if one.fits is not None:
        short = "fits" if one.fits else "does not fit"
        every = ", all positions of the model" * (one.longest == forecaster.most)
        most = f"The longest prompt that fits has {counted(one.longest, 'token')}{every}." if one.longest else "No prompt fits."
        if one.longest and one.method == "auto":
            most += " auto takes another method where that one does not fit."
        said.append(f"It {short}. {most}")
    if one.fits is False:
        would = forecaster.would_fit(one.method, about["length"])
        said.append(
            f"What would fit: {'; or '.join(would)}." if would else "Nothing that was tried would fit: a smaller model may."
        )
    if one.step_s is not None:
        how = "as measured" if one.basis == "expected" else "estimated from bytes and bandwidth, not measured"
        said.append(f"A token takes {_time(one).strip('~')} ms, {how}.")
        if "(" in _time(one):
            said[-1] += " In brackets: with none of the selected rows on the device already."
    elif not (forecaster.machine.gpu or forecaster.machine.cpu):
        said.append(
            "With --gpu it also says milliseconds a token."
            if about["gpu_memory"]
            else "There is no GPU here: --gpu NAME says what fits one and milliseconds a token, --gpu none plans for a CPU."
        )
    trained, wanted = TRAINED.get(about["model"]), about["length"] + about["new_tokens"]
    if trained is not None and max(wanted, (one.longest or 0) + about["new_tokens"]) > trained:
        which, scaled = "longer prompts", "yarn:FACTOR"
        if wanted > trained:
            which, scaled = "this length", str(RopeScaling.for_positions(trained, wanted))
        said.append(
            f"{about['model']} was trained for {trained:,} positions; for {which} generate, chat and serve take "
            f"--rope-scaling {scaled}."
        )
    quantised = getattr(forecaster.model.config, "quantization_config", None)
    if quantised is not None:
        said.append(f"The model is quantised; its weights are counted in {about['dtype']} unless --weights says otherwise.")
    return said
