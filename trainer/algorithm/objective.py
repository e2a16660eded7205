"""The parts of an algorithm that a policy loss depends on. They are not in `losses.py` because algorithms are chosen
before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Correction, Surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a correction, as ratios. `low` 0 and `high` infinity are no bounds.

    `cap` truncates the weights of tokens if whole answers are judged by their geometric mean, and of tokens whose
    distribution a grammar, a penalty or a bias changed.
    """

    low: float
    high: float
    cap: float


BOUNDS: dict[Correction, tuple[float, float]] = {
    Correction.MASK: (0.5, 5.0),  # as IcePop
    Correction.SEQUENCE_MASK: (0.0, 3.0),  # as TRL
    Correction.GEOMETRIC_MASK: (0.8, 1.25),
}
"""Defaults of `correction_low` and `correction_high`. A truncation is bounded by `importance_cap` instead."""


def bounds_of(correction: Correction, low: float | None, high: float | None, cap: float) -> Bounds:
    """Return the bounds of a correction. None for `low` or `high` means its default."""
    own_low, own_high = BOUNDS.get(correction, (0.0, cap))
    return Bounds(low=own_low if low is None else low, high=own_high if high is None else high, cap=cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The parameters of a policy loss.

    The ratio is clipped to [1 − clip_low, 1 + clip_high]. `dual_clip` bounds −ρA for A < 0 by −dual_clip · A; None is
    no bound. `gate_positive` and `gate_negative` are the temperatures of SAPO's gate. `importance_cap` truncates the
    weight exp(prox − behave).
    """

    surrogate: Surrogate
    clip_low: float
    clip_high: float
    dual_clip: float | None
    gate_positive: float
    gate_negative: float
    importance_cap: float
    correction: Correction = Correction.TRUNCATE
    correction_low: float | None = None
    correction_high: float | None = None
    veto: float | None = None

    @property
    def bounds(self) -> Bounds:
        return bounds_of(self.correction, self.correction_low, self.correction_high, self.importance_cap)
