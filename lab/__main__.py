"""The commands of the laboratory: `python -m lab reproduce list`."""

from __future__ import annotations

import typer

from kvthaw.cli.common import APP
from lab.cli import bench, compare, demo, evaluate, reproduce

app = typer.Typer(name="python -m lab", **APP)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
app.command("reproduce", epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.add_typer(evaluate.app, name="eval")
app.add_typer(bench.app, name="bench")


@app.callback()
def _root() -> None:
    """Measure what the papers and the documents say."""


if __name__ == "__main__":
    app()
