"""Options that several commands of the laboratory take, and what their values ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvthaw.cli.options import SEVERAL, folder, listed
from kvthaw.cli.progress import say

if TYPE_CHECKING:
    from lab.evaluate.job import Question
    from lab.evaluate.prefills import Shard

Lengths = Annotated[
    list[str],
    typer.Option("--length", metavar="TOKENS", help=f"Tokens of the prompt, such as 4096 or 128k; {SEVERAL}."),
]
NoFull = Annotated[
    bool,
    typer.Option(
        "--no-full",
        help="Leave full attention out. Each method prefills on its own, in chunks, so the device never holds all KV.",
    ),
]
KvDir = Annotated[
    Path | None,
    typer.Option(
        "--kv-dir",
        parser=folder,
        metavar="DIRECTORY",
        help="Keep prompts' KV in this folder; a later prompt that begins with one of them prefills only the rest.",
    ),
]


ShardOf = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Compute every n-th sample from the i-th on, append it to --out and print nothing; n processes share the file.",
    ),
]


BOTH, DENSE = ["icecache-digest", "streaming"], ["dense"]


Questions = Annotated[
    list[str],
    typer.Option(
        "--question",
        help="How a task's question is processed: [bold]dense[/] prefills it with the context, [bold]sparse[/] sends it through "
        f"the method afterwards; {SEVERAL}.",
    ),
]


Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TASK=]PATH",
        help="Read a task's questions, or those of all tasks, from this file or folder: LongEval and key-value files, SQuAD's "
        "and HotpotQA's layout, bAbI's folder, published benchmarks. A sample's number in the file is its seed. Repeat it for "
        "several tasks.",
    ),
]


Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        help="Read this text instead of the book that ships; a text that is too short is repeated.",
        exists=True,
        dir_okay=False,
    ),
]


LongText = Annotated[
    Path | None,
    typer.Option("--text", help="Read this text instead of the book that ships.", exists=True, dir_okay=False),
]


def questions_of(given: Sequence[str]) -> list[Question]:
    """Return the values of --question. Raises a usage error for one that there is not."""
    from lab.evaluate.job import QUESTIONS

    found = listed(given, str, "--question")
    for one in found:
        if one not in QUESTIONS:
            raise typer.BadParameter(f"{one!r} is not one of: {', '.join(QUESTIONS)}", param_hint="--question")
    return found  # type: ignore[return-value]


def files_of(given: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Return the --data of each task. A value with a task's or suite's name before it is for these tasks only. Raises a usage
    error for a name that is not among the tasks."""
    from lab.evaluate.published import benchmarks
    from lab.evaluate.tasks import SUITES, TASKS, named

    found: dict[str, str] = {}
    for one in given:
        name, given_name, path = one.partition("=")
        name = name.replace("-", "_")
        known = given_name and (name in (*tasks, *TASKS, *SUITES) or benchmarks(name))
        if not known:
            found = dict.fromkeys(tasks, one) | found
            continue
        stands_for = [each.name for each in benchmarks(name)] or named(name)
        mine = [each for each in stands_for if each in tasks]
        if not mine:
            raise typer.BadParameter(f"{one!r}: {name} is not among the tasks: {', '.join(tasks)}", param_hint="--data")
        found.update(dict.fromkeys(mine, path))
    return found


def shard_of(shard: str, out: Path | None = None, *, needs_out: bool = True) -> Shard:
    """Return the requested shard. Raises a usage error for an invalid shard, and for one without a file to share."""
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter(f"{shard!r} is not i/n with 1 <= i <= n", param_hint="--shard")
    found = int(number), int(count)
    if needs_out and out is None and found[1] > 1:
        raise typer.BadParameter(f"{shard} needs --out FILE, which all shards share", param_hint="--shard")
    return found


def save_plot(plot: Path | None, into: Callable[[Path], None]) -> None:
    """Draw the plot, if one is requested, and print its path."""
    if plot is not None:
        into(plot)
        say(f"wrote {plot}")


def ended_as_shard(shard: Shard, out: Path | None) -> bool:
    """Return whether a run computed a shard, which has no report. If so, print the results' path and the command for the
    report."""
    if shard[1] > 1:
        say(f"shard {shard[0]}/{shard[1]} is in {out}; the same command without --shard reports all of them")
    return shard[1] > 1
