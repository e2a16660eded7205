"""What an attempt returned, as the feedback that is posted for its session."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class NotFeedback(Exception):
    """An attempt returned something that is no reward. The message says what is wrong and what is right."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Bodies for POST /v1/feedback, in order. `reward` is the session's own number, None if it has none."""

    items: tuple[dict[str, Any], ...]
    reward: float | None


_FORMS = "a number, an object of POST /v1/feedback, a list of those, or nothing"


def feedback_from(returned: Any) -> Feedback:
    """Convert what an attempt returned. Raise NotFeedback for everything but the forms that its message lists.

    A number is the session's reward. An object is one item of POST /v1/feedback, for the session unless it has a
    `turn_id`. None means no reward at all, which is not a reward of zero.
    """
    if returned is None:
        return Feedback(items=(), reward=None)
    given = returned if isinstance(returned, list) else [returned]
    items = tuple(_item(one) for one in given)
    numbers = [item["reward"] for item in items if "reward" in item and "turn_id" not in item]
    return Feedback(items=items, reward=numbers[-1] if numbers else None)


def feedback_from_output(text: str) -> Feedback:
    """Read the last line of a program's output that is not blank. Raise NotFeedback."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise NotFeedback(f"the program printed nothing; its last line must be {_FORMS}, as JSON")
    try:
        returned = json.loads(lines[-1], parse_constant=_refuse_constant)
    except ValueError as error:
        raise NotFeedback(f"the last line that the program printed must be {_FORMS}, as JSON") from error
    return feedback_from(returned)


def _item(given: Any) -> dict[str, Any]:
    if isinstance(given, bool | int | float):
        return {"reward": _number(given)}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise NotFeedback(f"an attempt returns {_FORMS}; this one returned {type(given).__name__}")
    item = dict(given)
    if "reward" in item:
        item["reward"] = _number(item["reward"])
    elif not item.keys() & {"components", "text"}:
        raise NotFeedback("an item of feedback needs `reward`, `components` or `text`")
    if "session_id" in item:
        raise NotFeedback("leave out `session_id`: feedback of an attempt is for its own session")
    return item


def _number(value: Any) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise NotFeedback(f"a reward is a finite number, not {value!r}")
    return float(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
