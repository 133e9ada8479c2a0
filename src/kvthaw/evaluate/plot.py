"""Heat maps, written without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvthaw.errors import ConfigError
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.results import Line
from kvthaw.evaluate.runner import Variant


def heat_maps(found: Mapping[tuple[Variant, int], Sequence[Line]], path: Path, *, title: str) -> None:
    """Accuracy by depth (down) and length (across), a panel a variant. found: a variant's lines at each length.

    Raises ConfigError where matplotlib is missing, where no sample has a depth, or where the file's suffix is no picture's.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a plot needs matplotlib: pip install "kvthaw[plot]"') from None
    variants = list(dict.fromkeys(variant for variant, _ in found))
    lengths = sorted({length for _, length in found})
    depths = sorted({line.setting.depth for lines in found.values() for line in lines if line.setting.depth is not None})
    if not depths:
        raise ConfigError("the samples have no set depths, so there is no heat map; leave --depths as it is or list some")
    across = min(3, len(variants))
    down = -(-len(variants) // across)
    wide = 2.0 + max(1.4, 0.6 * len(lengths))
    figure = Figure(figsize=(across * wide + 1.2, down * (1.2 + 0.16 * len(depths))), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, variant in zip(axes, variants, strict=False):
        cells = [[_cell(found[variant, length], depth) for length in lengths] for depth in depths]
        axis.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axis.set_title(name(variant), fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
        every = range(0, len(depths), max(1, len(depths) // 10))
        axis.set_yticks(every, [f"{100 * depths[i]:.0f} %" for i in every], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
    for axis in axes[len(variants) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
    figure.colorbar(axes[0].images[0], ax=list(axes[: len(variants)]), label="accuracy", shrink=0.8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"plot is {str(path)!r}: {error}") from None


def name(variant: Variant) -> str:
    """A variant in a few words."""
    words = [variant.method]
    if variant.budget is not None:
        words.append(f"budget {variant.budget}")
    if variant.retrieved is not None:
        words.append(f"retrieved {variant.retrieved}")
    if variant.dense_layers is not None:
        words.append(f"{variant.dense_layers} dense")
    return ", ".join(words)


def _cell(lines: Sequence[Line], depth: float) -> float:
    value = mean(line.accuracy for line in lines if line.setting.depth == depth)
    return float("nan") if value is None else value
