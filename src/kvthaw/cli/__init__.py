"""The command line. Nothing here loads torch before a command needs it, so that --help answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from kvthaw.cli import bench, chat, compare, demo, evaluate, generate, harness, inspect, methods, plan, serve
from kvthaw.cli.common import APP

app = typer.Typer(
    name="kvthaw",
    **APP,
    epilog="Examples:\n\n  kvthaw chat --model Qwen/Qwen3-8B --file book.txt\n\n"
    "  kvthaw plan --model Qwen/Qwen3-8B --length 128k --gpu H100\n\n"
    "Exit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage, 130 stopped by Ctrl-C.",
)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("chat", epilog=chat.EXAMPLES)(chat.chat)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("methods", epilog=methods.EXAMPLES)(methods.methods)
app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")
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
    app()
