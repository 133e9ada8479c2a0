"""The commands of the laboratory: `python -m lab reproduce list`."""

from __future__ import annotations

import typer

from kvthaw.cli.common import APP
from lab.reproduce import command

app = typer.Typer(name="python -m lab", **APP)
app.command("reproduce", epilog=command.EXAMPLES)(command.reproduce)


@app.callback()
def _root() -> None:
    """Measure what the papers and the documents say."""


if __name__ == "__main__":
    app()
