"""The commands of the laboratory: `python -m lab reproduce list`."""

from __future__ import annotations

import typer

from kvthaw.cli.common import Commands
from lab.reproduce import command

app = typer.Typer(
    name="python -m lab",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("reproduce", epilog=command.EXAMPLES)(command.reproduce)


@app.callback()
def _root() -> None:
    """Measure what the papers and the documents say."""


if __name__ == "__main__":
    app()
