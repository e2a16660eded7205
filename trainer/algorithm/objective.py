"""What a policy loss is told of an algorithm. Beside the losses, as an algorithm is chosen before torch is there."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The ratio is clipped to [1 − clip_low, 1 + clip_high]. `dual_clip` bounds −ρA for A < 0 by −dual_clip · A;
    None: unbounded. `gate_positive` and `gate_negative` are the temperatures of SAPO's gate. `importance_cap`
    truncates the weight exp(prox − behave)."""

    surrogate: Surrogate
    clip_low: float
    clip_high: float
    dual_clip: float | None
    gate_positive: float
    gate_negative: float
    importance_cap: float
