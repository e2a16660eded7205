"""Draw the curves of all kinds of feedback as SVG for the docs, beside those of learning from numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.feedback.report import LEARNT, NAMES

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "learning-feedback.svg"
_COLUMNS = 4
_COLOUR, _GREY = "#0b6e99", "#777777"
# Keep text as text, and leave dates and random ids out of the file, so that equal results give equal files.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "base-rl", "font.family": "sans-serif", "font.size": 8}


def draw(result: Mapping[str, Any], image: Path = IMAGE) -> None:
    """Draw one panel for each measured kind but numbers: the mean reward of each batch by step, a line for the mean
    over the seeds with their range. The mean of learning from numbers is in every panel."""
    kinds = [kind for kind in NAMES if kind in result and kind != "numbers"]
    image.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 2.4), layout="constrained", facecolor="white")
        panels = figure.subplots(1, _COLUMNS, sharex=True, sharey=True).flat
        for panel, kind in zip(panels, kinds, strict=False):
            panel.set_title(NAMES[kind], fontsize=9, fontweight="bold")
            panel.axhline(LEARNT, color="#999999", linewidth=0.6, linestyle=":")
            if "numbers" in result:
                panel.plot(
                    _means(result["numbers"]["rewards"]), color=_GREY, linewidth=0.9, linestyle="--", label="numbers"
                )
            _curve(panel, result[kind]["rewards"])
            panel.set_ylim(0, 1)
            panel.spines[["top", "right"]].set_visible(False)
        for panel in list(figure.axes)[len(kinds) :]:
            panel.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.supxlabel("steps", fontsize=8)
        figure.supylabel("mean reward of a batch", fontsize=8)
        figure.savefig(image, metadata={"Date": None})


def _curve(panel: Axes, rewards: Sequence[Sequence[float]]) -> None:
    """Draw the mean over the seeds, with their range."""
    columns = list(zip(*rewards, strict=True))
    low, high = [min(each) for each in columns], [max(each) for each in columns]
    panel.fill_between(range(len(columns)), low, high, color=_COLOUR, alpha=0.15)
    panel.plot(_means(rewards), color=_COLOUR, linewidth=1.2, label="this feedback")


def _means(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over the seeds of each batch; all seeds have as many."""
    return [sum(each) / len(each) for each in zip(*rewards, strict=True)]
