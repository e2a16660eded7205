"""The form in which a person rates a session or a turn. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from proxy.errors import InvalidRequest

FIELDS = ("turn", "reward", "text", "other")
"""The fields that a visitor fills in."""

_LARGEST = 1e12
_LONGEST_TEXT = 16384
_LONGEST_ID = 200


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """A rating of a session, or of its turn `turn`: a reward, a text, or a preference over `other`.

    `is_better`: the rated one is preferred to the other. `once` makes a form that is sent twice count once. `stays`:
    more may be said about the session.
    """

    kind: str
    once: str
    turn: str = ""
    reward: float | None = None
    text: str = ""
    other: str = ""
    is_better: bool = False

    @property
    def stays(self) -> bool:
        return self.kind in ("text", "preference")


def read_rating(form: Mapping[str, str]) -> Rating:
    """Return the rating that a form holds. Raise InvalidRequest with the name of the wrong field."""
    kind, once, turn = form.get("kind", ""), form.get("once", ""), form.get("turn", "")[:_LONGEST_ID]
    if not 1 <= len(once) <= _LONGEST_ID or not once.isprintable():
        raise InvalidRequest("this form is not from this page: reload the page and rate again")
    if kind in ("good", "bad"):
        return Rating(kind=kind, once=once, turn=turn, reward=1.0 if kind == "good" else -1.0)
    if kind == "number":
        return Rating(kind=kind, once=once, turn=turn, reward=_number(form.get("reward", "")))
    if kind == "text":
        return Rating(kind=kind, once=once, turn=turn, text=_text(form.get("text", "")))
    if kind in ("better", "worse"):
        other = form.get("other", "")
        if not other or len(other) > _LONGEST_ID:
            raise InvalidRequest("choose the session or the answer to compare with", param="other")
        return Rating(kind="preference", once=once, turn=turn, other=other, is_better=kind == "better")
    raise InvalidRequest("choose a rating: good, bad, a number, a text or a preference")


def _number(text: str) -> float:
    try:
        # The page prints the typographic minus sign, and many keyboards type a decimal comma.
        value = float(text.strip().replace("−", "-").replace(",", "."))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise InvalidRequest(f"{text[:40]!r} is not a number up to 1e12", param="reward")
    return value


def _text(text: str) -> str:
    if not text.strip():
        raise InvalidRequest("write something: this text is blank", param="text")
    if len(text) > _LONGEST_TEXT or "\0" in text:
        raise InvalidRequest(f"a text has up to {_LONGEST_TEXT} characters, without NUL characters", param="text")
    return text
