"""The judgement of the figures, and the section of `docs/performance.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEARNT, NOT_LEARNT = 0.85, 0.35

NAMES = {
    "words": "words",
    "words_shuffled": "words of other sessions",
    "numbers": "numbers",
    "relative": "comparisons, 80 % right",
    "follow_up": "the next message",
}


def judged(result: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the targets of the measured kinds in words, each with whether it was reached by every seed."""
    words, shuffled = result["words"], result["words_shuffled"]
    by_judges = [
        (f"{NAMES[kind]}: it ends at {LEARNT} or more", all(value >= LEARNT for value in result[kind]["last"]))
        for kind in ("relative", "follow_up")
        if kind in result
    ]
    return [
        (f"words start at {NOT_LEARNT} or less", all(value <= NOT_LEARNT for value in words["first"])),
        (f"words end at {LEARNT} or more", all(value >= LEARNT for value in words["last"])),
        (
            "words of other sessions end no higher than they start",
            all(last <= first for first, last in zip(shuffled["first"], shuffled["last"], strict=True)),
        ),
        *by_judges,
    ]


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the page, of the measured kinds: feedback, first, highest, last, steps."""
    return [
        [
            name,
            _numbers(result[kind]["first"]),
            _numbers(result[kind]["highest"]),
            _numbers(result[kind]["last"]),
            ", ".join("never" if steps is None else str(steps) for steps in result[kind]["steps_to_085"]),
        ]
        for kind, name in NAMES.items()
        if kind in result
    ]


def page(result: Mapping[str, Any]) -> str:
    """Return the table of the page."""
    head = ["feedback", "first batch", "highest batch", "last four batches", "steps to 0.85"]
    lines = [head, ["---"] * len(head), *table(result)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
