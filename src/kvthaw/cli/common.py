"""What the commands share: errors, inputs, how results are printed, and sentences about an answer."""

from __future__ import annotations

import codecs
import errno
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from kvthaw.cli.progress import say
from kvthaw.errors import ConfigError, KvthawError, first_line
from kvthaw.formatting import counted, human, seconds, share

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache, PreTrainedModel
    from kvthaw.engine.sampling import Sampling

_KINDS = {
    b"%PDF": "a PDF, not text; pdftotext converts it",
    b"PK\x03\x04": "a zip archive, as .docx and .epub files are, not text; pandoc -t plain converts documents",
    b"\x1f\x8b": "compressed by gzip, not text; gunzip unpacks it",
    b"\x89PNG": "an image, not text",
    b"\xff\xd8\xff": "an image, not text",
    b"GIF8": "an image, not text",
}
"""File formats that are not text, by first bytes: the name, and a command that converts it to text."""


class Commands(TyperGroup):
    """The command group. It turns kvthaw's errors into one readable line and exit code 1, and Ctrl-C into exit code 130."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _unwrap(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. For an abbreviation, list the commands with this beginning."""
        near = [name for name in self.list_commands(ctx) if args and name.startswith(args[0]) and args[0] not in self.commands]
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("stopped")
            raise typer.Exit(130) from None
        except Exception as error:
            if (said := explained(error)) is None:
                raise
            complain(said)
            raise typer.Exit(1) from None


def explained(error: Exception) -> str | None:
    """Return what to tell the user of an error, in one line; None for a bug, and for a stdout without a reader.

    An OSError tells the file and what failed, without its number.
    """
    if isinstance(error, OSError) and error.errno != errno.EPIPE:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        said = first_line(error).partition(" GPU ")[0]
        return f"{said} Give a shorter text, --kv-dtype fp8 or a smaller --device-memory; `kvthaw plan` says what fits."
    return str(error) if isinstance(error, KvthawError) else None


APP: dict[str, Any] = {
    "cls": Commands,
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Settings of a program of several commands, for typer.Typer."""


def _unwrap(command: Any) -> None:
    """Wrap the help of a command and its subcommands at the terminal's width, not at the source's."""
    if command.help is not None:
        command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    for each in getattr(command, "commands", {}).values():
        _unwrap(each)


def complain(message: str) -> None:
    """One red line on stderr."""
    say(f"kvthaw: {message}", "red")


def stdout() -> Console:
    """Return where results go. Brackets are printed, as they may be a user's."""
    return Console(markup=False, highlight=False)


def print_wide(table: Table) -> None:
    """Print a table on stdout between its title and its caption, each in one line.

    A table that is wider than the terminal continues below, with the columns that identify its rows. A table with columns
    of sentences wraps these instead.
    """
    console = stdout()
    if table.title is not None:
        console.print(table.title, style="italic", soft_wrap=True)
        table.title = None
    caption, table.caption = table.caption, None
    if not all(column.no_wrap for column in table.columns):
        console.print(table)
    else:
        for part in _parts(table, console):
            console.width = max(console.width, _width(part, console))
            console.print(part)
    if caption is not None:
        console.print(caption, soft_wrap=True)


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _parts(table: Table, console: Console) -> list[Table]:
    """Return a table in parts as wide as the terminal. Each begins with the fewest first columns in which no two rows are equal; a
    blank cell there repeats the one above."""
    cells: list[list[Any]] = [list(column.cells) for column in table.columns]
    rows = list(zip(*cells, strict=True))
    filled = list(zip(*(accumulate(one, lambda above, own: own or above) for one in cells), strict=True))
    last = len(table.columns)
    keys = next((n for n in range(1, last) if len({row[:n] for row in filled}) == len(rows)), 1)

    def part(start: int, stop: int) -> Table:
        made, chosen = Table(box=table.box), [*range(keys), *range(start, stop)]
        for column in (table.columns[at] for at in chosen):
            made.add_column(column.header, justify=column.justify, no_wrap=True, overflow=column.overflow)
        for texts, row in zip(rows, table.rows, strict=True):
            made.add_row(*(texts[at] for at in chosen), end_section=row.end_section)
        return made

    parts, start = list[Table](), min(keys, last - 1)
    while start < last:
        fits = (stop for stop in range(last, start + 1, -1) if _width(part(start, stop), console) <= console.width)
        stop = next(fits, start + 1)
        parts.append(part(start, stop))
        start = stop
    return parts


def print_results(records: Iterable[dict[str, Any]], as_json: bool, tables: Callable[[], Sequence[Table]]) -> None:
    """A JSON object a record, or the tables."""
    if as_json:
        for record in records:
            print(json.dumps(record))
    else:
        for table in tables():
            print_wide(table)


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Wrap an import. Raises ConfigError, which says how to install what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvthaw":
            raise
        raise ConfigError(f"{what} not installed ({error}): pip install kvthaw[{extra}]") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. If the disk is full, the old file stays, without a part of the new one."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a device, such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def tell_outdated(outdated: Mapping[str, int]) -> None:
    """Print the methods whose stored results are from other options and are computed again."""
    if outdated:
        each = ", ".join(f"{count:,} of {method}" for method, count in outdated.items())
        warned(f"made again, since the methods' defaults were others: {each}")


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the argument, the file, or stdin. Raises a usage error unless exactly one is given, and
    ConfigError for a prompt that is empty or not UTF-8."""
    if prompt is not None and file is not None:
        raise typer.BadParameter(
            "give a prompt or --file, not both; what is asked about a file is a --question", param_hint="PROMPT"
        )
    if prompt is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or text on stdin", param_hint="PROMPT")
    if prompt is not None:
        where, data = "the prompt", prompt.encode("utf-8", "surrogateescape")  # as it was typed
    else:
        where, data = ("stdin", sys.stdin.buffer.read()) if file is None else (str(file), file.read_bytes())
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    if kind is not None:
        raise ConfigError(f"{where} is {kind}")
    try:
        coding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
        text = data.decode(coding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 text: {error.reason} at byte {error.start:,}; iconv -t utf-8 converts text"
        ) from None
    if not text.strip():
        raise ConfigError(f"{where} is empty")
    return text


def as_its_makers(sampling: Sampling, given: Mapping[str, Any], model: PreTrainedModel) -> Sampling:
    """Return a model's sampling settings. Fields without a given value come from its generation config; print these."""
    from kvthaw.engine.generation_config import as_generate_does

    unused = ("top_k", "top_p", "min_p") if given.get("temperature") == 0 else ()
    taken = {name: value for name, value in as_generate_does(model).items() if name not in (*given, *unused)}
    if not taken:
        return sampling
    each = ", ".join(f"{name} {value:g}" for name, value in taken.items())
    say(f"by the model's generation config: {each}; --temperature 0 takes the likeliest token")
    return replace(sampling, **taken)  # type: ignore[arg-type]  # its own names


def cut_to(tokenizer: Any, text: str, most: int) -> str:
    """Return a text of at most `most` tokens: where it has more, leave out its middle, and tell the user."""
    from kvthaw.engine.cut import without_middle

    kept, left_out = without_middle(tokenizer, text, most)
    if left_out:
        warned(
            f"--cut leaves out {left_out:,} of {len(text):,} characters in the middle: the text may have {counted(most, 'token')}"
        )
    return kept


def tell_template(model: str, tokenizer: Any, *, taken: bool) -> None:
    """Print that a model has a chat template, if no option says whether to use it.

    taken: the command asks through it.
    """
    if taken:
        say("asking through the model's chat template; --no-chat puts the question after the text itself")
    elif getattr(tokenizer, "chat_template", None):
        warned(f"{model} has a chat template, which --chat uses. --no-chat continues the text, as now, and hides this line")


def warned(text: str) -> None:
    """Print a problem that the command has worked around."""
    say(text, "yellow")


_MANY = 100
"""Fewest tokens of a prompt whose speed is printed: fewer measure the time of a step."""


def attended(cache: Cache) -> str:
    """Return a sentence about the tokens that each step attended to, with the reason if it attended to all."""
    stats, index = cache.stats(), cache.settings.method.name
    why = stats.no_choice
    if stats.method == "full":
        other = "" if index == "full" else f" --method {index} recalls instead."
        return f"Every step read all {counted(stats.tokens, 'token')}" + (f": {stats.reason}.{other}" if stats.reason else ".")
    if why:
        return f"{stats.method}: there was nothing to choose, {why}."
    return f"{stats.method}: each step read {stats.attended_mean or 0:,.0f} of {counted(stats.tokens, 'token')}."


def took(prefilled: int, kept: int, first_s: float | None, token_s: float | None, new: int) -> str:
    """Return a sentence about the time of an answer.

    prefilled: tokens of the prompt that were prefilled.
    kept: tokens of the prompt that were in the cache.
    """
    if first_s is None:
        return f"No token came after {counted(prefilled, 'token')} of prompt."
    rate = f", {prefilled / first_s:,.0f} per second" if prefilled >= _MANY and first_s > 0 else ""
    had = f"; {kept:,} {'was' if kept == 1 else 'were'} there already" if kept else ""
    then = "" if not token_s else f", then {seconds(token_s)} per token ({1 / token_s:,.1f} per second)"
    said = f"First token after {seconds(first_s)} (prompt: {counted(prefilled, 'token')}{rate}{had}){then}."
    return f"{said} {counted(new, 'token')}."


def details(cache: Cache) -> list[str]:
    """Return lines about the cache, for --verbose; what does not apply is left out."""
    stats = cache.stats()
    host = f", {human(stats.kv_host_bytes)} on the host" if stats.kv_host_bytes else ""
    dtype = f", rows in {stats.kv_dtype}" if stats.kv_dtype else ""
    lines = [f"KV: {human(stats.kv_device_bytes + stats.kv_dense_bytes)} on the device{host}{dtype}"]
    if stats.budget is not None:
        lines.append(f"budget: {stats.budget:,} tokens per KV head and step, at most {stats.attended_max or 0:,} used")
    if stats.hit_rate is not None:
        lines.append(f"selected rows: {share(stats.hit_rate)} on the device already, {human(stats.fetched_bytes)} fetched")
    if stats.dense_tokens:
        lines.append(f"later prompts: {counted(stats.dense_tokens, 'token')} attended to everything")
    if stats.reason:
        lines.append(f"why {stats.method}: {stats.reason}")
    if stats.captures:
        lines.append(f"captured steps: {stats.captures}, {seconds(stats.capture_seconds)}, {human(stats.capture_bytes)}")
    lines += filter(None, [stats.shrunk, *(f"{name} has no effect: {why}" for name, why in stats.no_effect.items())])
    return lines
