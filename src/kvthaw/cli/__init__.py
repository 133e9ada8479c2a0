"""The command line. Nothing here loads torch before a command needs it, so that --help answers at once."""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import typer

from kvthaw.cli import agreement, bench, chat, generate, harness, inspect, methods, plan, serve
from kvthaw.cli.common import APP, Commands

LABORATORY = ("compare", "demo", "reproduce", "bench prefill", "bench serving")
"""Commands of the repository, besides all that begin with "eval"."""

EVAL = """Measure how far methods are from full attention on your own text.

Tasks, published benchmarks and perplexity are in kvthaw's repository: python -m lab eval --help."""
BENCH = """Measure the speed and memory of your own model.

Times of random weights, of prefills and of running batches are in kvthaw's repository: python -m lab bench --help."""


class Product(Commands):
    """The command group. It points to the commands that only the repository has."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        path = " ".join([*([] if ctx.parent is None else [ctx.info_name]), *args[:1]])
        unknown = args and not any(name.startswith(args[0]) for name in self.commands)
        if unknown and (path in LABORATORY or path.startswith("eval ")):
            ctx.fail(f"{path!r} is not installed. A clone of kvthaw's repository has it: python -m lab {path}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="kvthaw",
    **APP | {"cls": Product},
    epilog="Examples:\n\n  kvthaw chat --model Qwen/Qwen3-8B --file book.txt\n\n"
    "  kvthaw plan --model Qwen/Qwen3-8B --length 32k --gpu RTX-4090\n\n"
    "Exit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage, 130 stopped by Ctrl-C.",
)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("chat", epilog=chat.EXAMPLES)(chat.chat)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("methods", epilog=methods.EXAMPLES)(methods.methods)
for name, about, examples, command in (
    ("eval", EVAL, agreement.EXAMPLES, agreement.agreement),
    ("bench", BENCH, bench.EXAMPLES, bench.decode),
):
    group = typer.Typer(cls=Product, no_args_is_help=True, rich_markup_mode="rich", epilog=examples)
    group.callback(help=about)(lambda: None)
    group.command(epilog=examples)(command)
    app.add_typer(group, name=name)
app.command("lm-eval", epilog=harness.EXAMPLES, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    harness.lm_eval
)


def _version(asked: bool) -> None:
    if asked:
        from kvthaw.version import __version__

        typer.echo(f"kvthaw {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attend to a context far larger than the accelerator's KV memory.

    The KV cache lies in host memory. Each decode step copies only the few tokens that it needs to the device.
    """


def main() -> None:
    """The entry point of the ``kvthaw`` command."""
    try:
        app()
    finally:
        if "triton" not in sys.modules:  # whose objects, if frozen, are reported as leaks
            gc.freeze()  # at its end Python looks through all other objects: half a second with torch
