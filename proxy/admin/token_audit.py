"""Tokens of a step's sampled trajectories, coloured by probability ratio, advantage or log-probability gap."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby

import msgspec

from proxy.overview.steps.views import AuditedTurn

_STEPS = 8


class Colouring(StrEnum):
    """The quantity that colours a token.

    `ratio`: log of the trainer's probability over the engine's. `advantage`: the token's advantage relative to the
    step's largest. `gap`: distance between the trainer's log-probability and the engine's.
    """

    RATIO = "ratio"
    ADVANTAGE = "advantage"
    GAP = "gap"


class DrawnToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its CSS class `style`: h0 to h8 for positive values, d1 to d8 for negative ones; `title` is the
    tooltip."""

    text: str
    style: str
    title: str


class DrawnTurn(msgspec.Struct, frozen=True, kw_only=True):
    number: int | None
    turn_id: str
    clipped: int
    tokens: tuple[DrawnToken, ...]


class DrawnTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    turns: tuple[DrawnTurn, ...]


def draw_audit(turns: Sequence[AuditedTurn], by: Colouring) -> tuple[DrawnTrajectory, ...]:
    """Prepare audited turns for the template. The turns of one session must be adjacent."""
    # Advantages have no natural scale, so the step's largest one gets the full colour.
    largest = max((abs(value) for turn in turns for value in turn.advantages), default=0.0)
    return tuple(
        DrawnTrajectory(session_id=session_id, turns=tuple(_turn(turn, by, largest) for turn in own))
        for session_id, own in groupby(turns, key=lambda turn: turn.session_id)
    )


def _turn(turn: AuditedTurn, by: Colouring, largest: float) -> DrawnTurn:
    tokens = []
    for index, (mine, engine) in enumerate(zip(turn.logprobs, turn.engine_logprobs, strict=True)):
        difference, advantage = mine - engine, turn.advantages[index]
        match by:
            case Colouring.RATIO:
                style = _style(difference)
            case Colouring.GAP:
                style = _style(abs(difference))
            case Colouring.ADVANTAGE:
                style = _style(advantage / largest if largest else 0.0)
        facts = [
            f"ratio {turn.ratios[index]:.4g}",
            f"advantage {advantage:.4g}",
            f"log-probability {mine:.4g} in the trainer, {engine:.4g} in the engine",
            f"{turn.staleness[index]} versions old",
        ]
        if turn.clipped[index]:
            facts.append("clipped")
        text = turn.texts[index] if turn.texts is not None else "·"
        tokens.append(DrawnToken(text=text, style=style, title=" · ".join(facts)))
    return DrawnTurn(
        number=None if turn.ordinal is None else turn.ordinal + 1,
        turn_id=turn.turn_id,
        clipped=sum(turn.clipped),
        tokens=tuple(tokens),
    )


def _style(value: float) -> str:
    """Return the CSS class of a value; colours saturate at −1 and 1."""
    level = min(_STEPS, round(abs(value) * _STEPS))
    return f"{'d' if value < 0 and level else 'h'}{level}"
