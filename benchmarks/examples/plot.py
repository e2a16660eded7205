"""Draw the curve of an example as SVG for its README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.examples.report import CURVE_ATTEMPTS, LAST

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLOURS = ("#0b6e99", "#d9730d", "#7d4fa8")
# keep text as text, and leave dates and random ids out of the file, so that equal results give equal files
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "base-rl", "font.family": "sans-serif", "font.size": 8}


def draw(name: str, measured: Mapping[str, Any], directory: Path = IMAGES) -> Path:
    """Draw `example-NAME.svg`: the mean reward by the number of attempts, one line per seed. Return its path."""
    path = directory / f"example-{name}.svg"
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5, 2.4), layout="constrained", facecolor="white")
        panel = figure.subplots()
        panel.axhline(LAST, color="#999999", linewidth=0.6, linestyle=":")
        for seed, curve in enumerate(measured["curves"]):
            attempts = [CURVE_ATTEMPTS * (point + 1) for point in range(len(curve))]
            panel.plot(attempts, curve, color=_COLOURS[seed % len(_COLOURS)], linewidth=1.2, label=f"seed {seed}")
        panel.set_ylim(0, 1)
        panel.set_xlim(left=0)
        panel.set_xlabel("attempts")
        panel.set_ylabel(f"mean reward of {CURVE_ATTEMPTS}")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="lower right")
        figure.savefig(path, metadata={"Date": None})
    return path
