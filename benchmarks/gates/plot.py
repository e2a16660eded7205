"""Draw the canary of the first poisoned run, and how fast a fall of the reward is found, as SVG for the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_COLOUR = "#0b6e99"
# keep text as text, and leave dates and random ids out of the file, so that equal results give equal files
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "base-rl", "font.family": "sans-serif", "font.size": 9}


def draw(results: dict[str, Any], directory: Path = IMAGES) -> None:
    """Draw `canary-refused.svg` and, if drops of several sizes were measured, `rollback-delay.svg`."""
    directory.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        if results.get("canary_curve"):
            _canary(results["canary_curve"]).savefig(directory / "canary-refused.svg", metadata={"Date": None})
        if results.get("detection"):
            _delay(results["detection"]).savefig(directory / "rollback-delay.svg", metadata={"Date": None})


def _canary(curve: list[list[float]]) -> Figure:
    figure = Figure(figsize=(7, 2.6), layout="constrained", facecolor="white")
    panel = figure.subplots()
    sessions, means, lows, highs = zip(*curve, strict=True)
    panel.fill_between(
        sessions, lows, highs, color=_COLOUR, alpha=0.15, linewidth=0, label="bounds (95 %, at all times)"
    )
    panel.plot(sessions, means, color=_COLOUR, linewidth=1.5, label="difference of mean rewards")
    panel.axhline(0, color="#333333", linewidth=0.8)
    panel.annotate(
        "surely worse: rejected",
        (sessions[-1], highs[-1]),
        xytext=(-6, 22),
        textcoords="offset points",
        ha="right",
        arrowprops={"arrowstyle": "->", "color": "#b3261e"},
        color="#b3261e",
    )
    panel.set_xlabel("canary sessions")
    panel.set_ylabel("canary − serving")
    panel.set_ylim(-1, 1)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="upper right", fontsize=8)
    return figure


def _delay(detection: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 2.6), layout="constrained", facecolor="white")
    panel = figure.subplots()
    for found in detection:
        drop, sessions = found["drop"], found["sessions"]
        panel.plot([drop] * len(sessions), sessions, "o", color=_COLOUR, alpha=0.35, markersize=4)
        if sessions:
            panel.plot([drop], [sessions[len(sessions) // 2]], "_", color="black", markersize=18)
        panel.annotate(
            f"{found['detected']} of {found['of']}",
            (drop, 0),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    panel.set_xlabel("fall of the mean reward")
    panel.set_ylabel("sessions until rollback")
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    return figure
