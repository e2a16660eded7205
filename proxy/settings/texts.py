"""Settings of a run for feedback in words."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from proxy.settings.section import Section

_PLACE = "{feedback}"

_TEMPLATE = (
    "Feedback on the answer that follows, from somebody who knows how it ends:\n{feedback}\nAnswer with this in mind."
)

# Bounds the teacher's prompt: a longer text costs a forward pass over all of its tokens for each session.
_LONGEST = 4096
_CUT = " […]"


class TextSettings(Section):
    """How the texts of feedback take part in training."""

    train: bool = False
    """Whether a session with a text is trained even if nothing of it has a reward. The trainer must learn from texts
    (`trainer.algorithm.hindsight_coefficient`); any other skips such a session."""
    role: Literal["user", "system"] = "user"
    """The role of the message in which the teacher reads the texts."""
    template: str = Field(default=_TEMPLATE, min_length=len(_PLACE), max_length=4096)
    """The content of that message; {feedback} stands for the texts, one to a line."""

    @field_validator("template")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if value.count(_PLACE) != 1:
            raise ValueError("the template must contain {feedback} once, where the texts go")
        return value

    def content(self, texts: list[str]) -> str:
        """Return the content of the message with these texts, which are cut at 4096 characters together."""
        joined = "\n".join(texts)
        if len(joined) > _LONGEST:
            joined = joined[:_LONGEST] + _CUT
        return self.template.replace(_PLACE, joined)
