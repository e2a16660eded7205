"""The prompts of judges, and the fingerprint of everything that determines a judge's scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from proxy.jobs.kinds import JobRefused
from proxy.judges.transcripts import Transcript, mark_of
from proxy.settings import JudgeSettings

Messages = list[dict[str, Any]]

# The rules by which conversations are written out and answers are read. A change of them is a change of all judges.
_RULES = 2
_LONGEST_PROMPT = 100_000


class Prompts:
    """The shipped prompts and those of the operator's directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def source(self, judge: JudgeSettings) -> str:
        """Return the template of the judge's prompt; empty for a kind without one. Raise JobRefused if its file
        cannot be read."""
        if not judge.kind.asks_a_model:
            return ""
        if judge.prompt is None:
            return _shipped(judge.kind.value)
        if self._directory is None:
            raise JobRefused(f"the judge names the prompt {judge.prompt!r}, but [judging] prompts_dir is not set")
        file = self._directory / f"{judge.prompt}.jinja"
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise JobRefused(f"the judge's prompt {file} cannot be read: {error}") from error
        if len(text) > _LONGEST_PROMPT:
            raise JobRefused(f"the judge's prompt {file} has more than {_LONGEST_PROMPT} characters")
        return text


def fingerprint(judge: JudgeSettings, source: str) -> str:
    """Return a hash of what determines the scores: the judge's settings and the template of its prompt."""
    settings = judge.model_dump(mode="json", exclude_defaults=True, exclude={"timeout_seconds", "tokens_per_day"})
    text = json.dumps([_RULES, settings, source], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def messages_of(source: str, judge: JudgeSettings, blocks: Sequence[tuple[str, Transcript]]) -> Messages:
    """Return the messages for the judge's model: the rendered template as the system's, the conversations as the
    user's. `blocks` are conversations with their labels; the label of a single one is empty. Raise JobRefused for a
    template that cannot be rendered."""
    mark = mark_of([transcript.text for _, transcript in blocks])
    names = [f"{mark}-{label}" if label else mark for label, _ in blocks]
    try:
        criteria = _template(source).render(
            mark=mark,
            labels=[label for label, _ in blocks],
            rubric=judge.rubric,
            low=f"{judge.low:g}",
            high=f"{judge.high:g}",
        )
    except jinja2.TemplateError as error:
        raise JobRefused(f"the judge's prompt cannot be rendered: {error}") from error
    shown = "\n".join(
        f"<{name}>\n{transcript.text}\n</{name}>" for name, (_, transcript) in zip(names, blocks, strict=True)
    )
    return [{"role": "system", "content": criteria.strip()}, {"role": "user", "content": shown}]


@cache
def _shipped(kind: str) -> str:
    return (resources.files("proxy.judges") / "templates" / f"{kind}.jinja").read_text()


@cache
def _template(source: str) -> jinja2.Template:
    # Plain text for a model, so nothing is escaped; the values are inserted and never read as templates.
    return jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined).from_string(source)  # noqa: S701
