"""The figures as a table, compared with the targets."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.mismatch.engines import ENGINES, LAG, NOISE, STEP
from benchmarks.mismatch.run import CORRECTIONS, LEARNING_RATE, STEPS, Found, Run
from benchmarks.targets import Target

LOST = 0.2
"""Least loss of reward that some wrong engine must cause without a correction."""
WITHIN = 0.05
"""Largest loss of reward with the default correction."""


_FIGURES = ("final", "acted", "gap")


def result_of(found: dict[Run, Found]) -> dict[str, Any]:
    """Return {fault: {correction: {"final", "acted", "gap", "paused": lists over the seeds}}}, and the faults'
    strengths."""
    result: dict[str, Any] = {
        "strengths": {"noise": NOISE, "eight_bits": STEP, "stale": LAG},
        "learning_rate": LEARNING_RATE,
        "steps": STEPS,
    }
    for fault in ENGINES:
        for correction in CORRECTIONS:
            runs = sorted((run for run in found if (run.fault, run.correction) == (fault, correction)), key=_seed)
            if runs:
                result.setdefault(fault, {})[correction] = {
                    **{name: [round(getattr(found[run], name), 4) for run in runs] for name in _FIGURES},
                    "paused": [found[run].paused for run in runs],
                }
    return result


def _seed(run: Run) -> int:
    return run.seed


def judged(result: dict[str, Any]) -> list[Target]:
    """Compare medians over the seeds with the default's on a correct engine. Without that measurement there are no
    targets."""
    clean = _final(result, "clean", "default")
    if clean is None:
        return []
    finals = {fault: (_final(result, fault, "none"), _final(result, fault, "default")) for fault in ENGINES}
    uncorrected = [none for fault, (none, _) in finals.items() if fault != "clean" and none is not None]
    targets = [
        Target(what=f"lost by the default, {fault}", measured=clean - default, bound=WITHIN)
        for fault, (_, default) in finals.items()
        if fault != "clean" and default is not None
    ]
    if uncorrected:
        worst = clean - min(uncorrected)
        targets.append(
            Target(what="lost without a correction, worst fault", measured=worst, bound=LOST, at_least=True)
        )
    return targets


def _final(result: dict[str, Any], fault: str, correction: str) -> float | None:
    found = result.get(fault, {}).get(correction)
    return None if found is None else statistics.median(found["final"])


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return one row for each fault and correction: the final rewards of all seeds, and medians of the other
    figures."""
    return [
        [
            fault,
            f"`{correction}`",
            ", ".join(f"{value:.2f}" for value in figures["final"]),
            f"{statistics.median(figures['acted']):.2f}",
            f"{statistics.median(figures['gap']):.2f}",
            ", ".join("–" if step is None else str(step) for step in figures["paused"]),
        ]
        for fault in ENGINES
        for correction, figures in result.get(fault, {}).items()
    ]


def shown(result: dict[str, Any]) -> str:
    lines = [
        f"{fault:<12}{correction:<20}{finals:<22}acted {acted}, gap {gap}, paused {paused}"
        for fault, correction, finals, acted, gap, paused in page_rows(result)
    ]
    lines += [
        f"{'reached' if each.reached else 'NOT REACHED'}  {each.what}: {each.measured:.2f} ({each.bound:g})"
        for each in judged(result)
    ]
    return "\n".join(lines)
