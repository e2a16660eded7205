"""Draw the curves of all presets as SVG for the docs, one panel each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning.report import by_preset
from benchmarks.learning.run import GOOD
from benchmarks.learning.tasks import TASKS

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLUMNS = 4
_POINTS = 100
"""Largest number of points of a curve; a longer one is thinned out."""
_COLOURS = ("#0b6e99", "#d9730d", "#7d4fa8")
# keep text as text, and leave dates and random ids out of the file, so that equal results give equal files
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "base-rl", "font.family": "sans-serif", "font.size": 8}


def draw(result: dict[str, Any], directory: Path = IMAGES) -> None:
    """Draw `learning-TASK.svg` for every task in the result: the mean reward of each batch by step, with one line per
    staleness for the mean over the seeds, and their range."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        presets = by_preset(result, task)
        if presets:
            with mpl.rc_context(_STYLE):
                figure = _figure(presets)
                figure.savefig(directory / f"learning-{task}.svg", metadata={"Date": None})


def _figure(presets: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    rows = math.ceil(len(presets) / _COLUMNS)
    figure = Figure(figsize=(10, 0.6 + 1.6 * rows), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for panel, (preset, by_staleness) in zip(panels, presets.items(), strict=False):
        panel.set_title(preset, fontsize=9, fontweight="bold")
        panel.axhline(GOOD, color="#999999", linewidth=0.6, linestyle=":")
        for colour, (name, figures) in zip(_COLOURS, by_staleness.items(), strict=False):
            _curve(panel, figures["rewards"], colour, name.replace("_", " "))
        panel.set_ylim(0, 1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelbottom=True)
    for panel in list(figure.axes)[len(presets) :]:
        panel.set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel("steps", fontsize=8)
    figure.supylabel("mean reward of a batch", fontsize=8)
    return figure


def _curve(panel: Axes, rewards: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Draw one line with its range. After the end of a seed's run the others continue without it."""
    columns = [[reward for reward in column if reward is not None] for column in zip_longest(*rewards)]
    steps = range(0, len(columns), math.ceil(len(columns) / _POINTS))
    columns = [columns[step] for step in steps]
    panel.fill_between(
        steps, [min(each) for each in columns], [max(each) for each in columns], color=colour, alpha=0.15
    )
    panel.plot(steps, [sum(each) / len(each) for each in columns], color=colour, linewidth=1.2, label=label)
