"""What is redacted before it is stored, and how long it is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from proxy.settings.section import Section


class RetentionSettings(Section):
    """How long the content of ended sessions is stored; without a bound, forever. Erasing removes the content: that a
    session existed, and which versions were trained on it, stays recorded."""

    max_age_days: PositiveFloat | None = None
    """Age, counted from the session's end, at which its content is erased."""
    max_sessions: PositiveInt | None = None
    """Most ended sessions whose content is stored; beyond it, those that ended first are erased."""
    unconsumed: bool = False
    """Erase sessions, too, that may still be trained: ready ones and those that wait for a reward."""


RedactionRuleName = Literal["email", "phone", "credit_card", "iban", "ip", "secret"]


class RedactionSettings(Section):
    """Texts that are replaced in messages, requests, answers and token ids before these are stored. Redacted tokens
    are not trained."""

    rules: tuple[RedactionRuleName, ...] = ()
    """Built-in patterns to apply."""
    patterns: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], str] = Field(default_factory=dict)
    """Regular expressions of your own, by name."""
    analyzers: tuple[str, ...] = ()
    """Functions of your own as `module:function`: each takes a text and returns the (start, end) pairs to redact."""

    @property
    def is_on(self) -> bool:
        return bool(self.rules or self.patterns or self.analyzers)
