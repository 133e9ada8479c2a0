"""Options that several commands take, and what their values ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvthaw.cli.common import prompt_text
from kvthaw.engine.hub import offline

if TYPE_CHECKING:
    from kvthaw.evaluate.job import Shard
    from kvthaw.evaluate.text import Chat
    from kvthaw.evaluate.variant import Variant

T = TypeVar("T")
MOST = (1 << 31) - 1
"""The largest number of tokens: positions are 32-bit integers."""


def named_model(name: str | None) -> str | None:
    """Return a model's name, if it can be loaded: one on the hub costs no import of torch where the hub does not answer."""
    if name is not None:
        offline(name)
    return name


Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="[bold]shipped[/], a local folder, or an id on the Hugging Face hub.",
        callback=named_model,
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16; auto: bfloat16 on a GPU, float32 on a CPU.")]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help='Device memory that the cache may fill, such as "8GiB"; or "auto". Default: auto with --method auto, else none.',
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", help="[bold]fp8[/]: store rows in 8 bits a number, with a scale each. Default: the model's."),
]
KvDir = Annotated[
    Path | None,
    typer.Option(
        "--kv-dir", help="Keep prompts' KV in this folder: a prompt that begins like one of them is prefilled from there on.",
        file_okay=False,
    ),
]  # fmt: skip
System = Annotated[str | None, typer.Option("--system", help="A system prompt, for the chat template.")]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Switch thinking on or off in the chat template, if it knows that."),
]
NoFull = Annotated[
    bool,
    typer.Option(
        "--no-full",
        help="Leave full attention out: each method prefills for itself, in chunks, so that the device never holds all KV.",
    ),
]
ShardOf = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Compute every n-th sample, from the i-th on, into --out, and print nothing; n processes share the file.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a run and nothing else on stdout.")]

Method = Annotated[
    str,
    typer.Option(
        "--method", help="A name of [bold]kvthaw methods[/], with options as in icecache-digest:reuse=2; or [bold]auto[/]."
    ),
]
Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        help="Methods, separated by commas or one by one, with options as in icecache-digest:reuse=2; budget, retrieved, "
        "dense_layers, sink, window, buffer and kv_dtype are options of each as well: pqcache:budget=0.2,quest:sink=4.",
    ),
]
DIGEST, BOTH = ["icecache-digest"], ["icecache-digest", "streaming"]
BUDGETS = typer.Option(help="Most tokens attended per KV head and step, or fractions of the length, separated by commas.")
Instead = Annotated[
    str | None,
    typer.Option(
        "--retrieved",
        help="Instead of --budget: tokens retrieved beside the paper's own sink and window, separated by commas.",
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        "--retrieved",
        help="Instead of --budget, or beside it: tokens retrieved beside the paper's own sink and window, separated by commas.",
    ),
]
DenseLayers = Annotated[
    str,
    typer.Option(
        "--dense-layers", help="First layers that keep all KV, separated by commas; auto: 2 from 16 layers on, else 0."
    ),
]
Question = Annotated[
    str,
    typer.Option("--question", help="[bold]dense[/]: prefilled with the context; [bold]sparse[/]: after it, under the budget."),
]
LENGTHS = typer.Option(help="Tokens of the prompt, separated by commas.")
Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        help="Read this text instead of the book that ships; it begins anew where it ends.",
        exists=True,
        dir_okay=False,
    ),
]
LongText = Annotated[
    Path | None,
    typer.Option("--text", help="Read this text instead of the book that ships.", exists=True, dir_okay=False),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Append a JSON line a prompt and run to this file; what stands there is not run again."),
]


def budget_of(text: str) -> int | float:
    """Read a budget: tokens, or with a point a fraction of the length. Raises ValueError."""
    return float(text) if "." in text else int(text)


def listed(text: str, kind: Callable[[str], T], option: str) -> list[T]:
    """Return the values of an option that are separated by commas, without repeats. Raises a usage error that names the value."""
    found: dict[T, None] = {}
    for part in text.split(","):
        if part.strip():
            try:
                value = kind(part.strip())
            except ValueError:
                raise typer.BadParameter(f"{part.strip()!r} in {text!r} is not a number", param_hint=option) from None
            if isinstance(value, int) and value > MOST:
                raise typer.BadParameter(f"{value} is too large; it must be at most {MOST:,}", param_hint=option)
            found[value] = None
    if not found:
        raise typer.BadParameter("it is empty", param_hint=option)
    return list(found)


def one_budget(text: str | None) -> int | float | None:
    """Return a budget option that takes one value."""
    return None if text is None else listed(text, budget_of, "--budget")[0]


def chat_of(chat: bool | None, system: str | None, thinking: bool | None) -> Chat | None:
    """Return how to ask through the chat template, which --system and --thinking imply; None: not. Raises a usage error for these
    two without it."""
    from kvthaw.evaluate.text import Chat

    wanted = system is not None or thinking is not None
    if chat is False and wanted:
        raise typer.BadParameter("a system prompt and thinking need the chat template", param_hint="--no-chat")
    return Chat(system, thinking) if chat or wanted else None


def shard_of(shard: str, out: Path | None = None, *, needs_out: bool = True) -> Shard:
    """Return the shard asked for. Raises a usage error for what is none, and for one without a file that the others share."""
    from kvthaw.evaluate import job

    try:
        found = job.shard_of(shard)
    except ValueError:
        raise typer.BadParameter(f"{shard!r} is not i/n with 1 <= i <= n", param_hint="--shard") from None
    if needs_out and out is None and found[1] > 1:
        raise typer.BadParameter(f"{shard} needs --out FILE, which all shards share", param_hint="--shard")
    return found


def words(text: Path | None) -> str | None:
    """Return the text of --text, if it is given."""
    return None if text is None else prompt_text(None, text)


def names_of(methods: Sequence[str]) -> list[str]:
    """Return the methods of an option that is given several times, or with several separated by commas."""
    from kvthaw.methods.options import split

    return [name for one in methods for name in split(one)]


def variants_of(methods: Sequence[str], budget: str | None, retrieved: str | None, dense_layers: str) -> list[Variant]:
    """Return every method under every limit; see read_variants. A wrong name or option costs no loading of a model."""
    from kvthaw.evaluate.variant import read_variants

    return read_variants(
        methods,
        [] if budget is None else listed(budget, budget_of, "--budget"),
        [] if retrieved is None else listed(retrieved, int, "--retrieved"),
        [] if dense_layers == "auto" else listed(dense_layers, int, "--dense-layers"),
    )
