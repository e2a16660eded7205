"""The prompts of judges, and the fingerprint of everything that determines a judge's scores."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from proxy.judges.answers import schema
from proxy.judges.transcripts import Transcript
from proxy.settings import JudgeSettings


def fingerprint(judge: JudgeSettings) -> str:
    """Return a hash of what determines the scores: the judge's settings and the shipped prompt."""
    settings = judge.model_dump(mode="json", exclude={"timeout_seconds", "tokens_per_day"})
    # The number is that of the rules by which conversations are written out and answers are read.
    text = json.dumps([1, settings, _source(judge.kind), schema()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt(judge: JudgeSettings, transcript: Transcript) -> list[dict[str, Any]]:
    """Return the messages for the judge's model: the criteria as the system's, the conversation as the user's."""
    criteria = _template(judge.kind).render(
        mark=transcript.mark, rubric=judge.rubric, low=f"{judge.low:g}", high=f"{judge.high:g}"
    )
    return [{"role": "system", "content": criteria.strip()}, {"role": "user", "content": transcript.delimited}]


@cache
def _source(kind: str) -> str:
    return (resources.files("proxy.judges") / "prompts" / f"{kind}.jinja").read_text()


@cache
def _template(kind: str) -> jinja2.Template:
    # Plain text for a model, so nothing is escaped; the values are inserted and never read as templates.
    return jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined).from_string(_source(kind))  # noqa: S701
