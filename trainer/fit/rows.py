"""Rows in the formats that trainers of chat models share (TRL's), as data of a fit.

| kind | columns |
| --- | --- |
| sft | `messages`, or `prompt` and `completion` |
| dpo, reward-model | `prompt`, `chosen`, `rejected`; or conversations `chosen` and `rejected` that begin alike |
| kto | `prompt`, `completion` and `label` |

Prompts and answers are lists of messages, rendered by the chat template with `tools`, or plain texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from proxy.contract.step import FittedFile
from proxy.contract.trajectory import Trajectory
from trainer.errors import ConfigurationError, NothingToFit
from trainer.fit.files import Row, rows_of, sha256_of, without_nulls
from trainer.fit.options import COLUMNS, DPO, KTO, REWARD_MODEL, SFT
from trainer.fit.records import Example, Labelled, Pair, is_learnable
from trainer.fit.rendering import NotLearnable, Renderer

# Rows between two lines of the log.
_PROGRESS = 2000

_log = structlog.get_logger("trainer.fit")

Item = Example | Labelled | Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class OfFiles:
    """The data of rows of files. `dropped` counts rows that cannot be learnt from, by reason."""

    items: tuple[Any, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    files: tuple[FittedFile, ...] = ()


def read_files(kind: str, paths: Sequence[Path], renderer: Renderer, vocabulary: int) -> OfFiles:
    """Read the rows for a model with this number of token ids. Raises NothingToFit for a file or a row that is
    broken, or lacks the columns of the kind."""
    items: list[Item] = []
    dropped: Counter[str] = Counter()
    files: list[FittedFile] = []
    for path in paths:
        digest = sha256_of(path) if path.is_file() else ""
        if digest and digest in {each.sha256 for each in files}:
            raise ConfigurationError(f"--data: {path} is the same as a file before it; name each once")
        count = 0
        for row in rows_of(path):
            count += 1
            try:
                items.append(_learnable(kind, row, f"{digest[:12]}:{row.number}", renderer, vocabulary))
            except NotLearnable as error:
                if not dropped[error.reason]:
                    _log.warning("a row is left out", row=row.place, reason=error.reason, why=str(error))
                dropped[error.reason] += 1
            if count % _PROGRESS == 0:
                _log.info("reading", file=path.name, rows=count, left_out=sum(dropped.values()))
        files.append(FittedFile(name=path.name, sha256=digest, rows=count))
    return OfFiles(items=tuple(items), dropped=dropped, files=tuple(files))


def _learnable(kind: str, row: Row, id_: str, renderer: Renderer, vocabulary: int) -> Item:
    item = _READERS[kind](row, id_, renderer)
    if not all(is_learnable(each, vocabulary) for each in item.trajectories):
        raise NotLearnable("foreign_tokens", f"it has tokens that are not among the model's {vocabulary}")
    return item


def _example(row: Row, id_: str, renderer: Renderer) -> Example:
    if "messages" not in row.values:
        return Example(id=id_, trajectory=_answered(row, SFT, id_, "prompt", "completion", renderer))
    messages = _messages(row, SFT, "messages")
    learnt = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not learnt:
        raise NotLearnable("no_answer", "there is no message of role assistant")
    return Example(id=id_, trajectory=renderer.conversation(id_, messages, learnt, _tools(row)))


def _labelled(row: Row, id_: str, renderer: Renderer) -> Labelled:
    label = _column(row, KTO, "label")
    if label not in (True, False):  # 0 and 1 are labels too
        raise NothingToFit(f"{row.place}: label is true or false, not {label!r}")
    trajectory = _answered(row, KTO, id_, "prompt", "completion", renderer)
    return Labelled(id=id_, trajectory=trajectory, desirable=bool(label))


def _pair(kind: str, *, last_alone: bool) -> Callable[[Row, str, Renderer], Pair]:
    def read(row: Row, id_: str, renderer: Renderer) -> Pair:
        if "prompt" not in row.values and isinstance(row.values.get("chosen"), list):
            row = _with_prompt(row, kind)
        chosen, rejected = (
            _answered(row, kind, f"{id_}/{side}", "prompt", side, renderer, last_alone=last_alone)
            for side in ("chosen", "rejected")
        )
        return Pair(id=id_, chosen=chosen, rejected=rejected)

    return read


def _with_prompt(row: Row, kind: str) -> Row:
    """Return a row whose two conversations begin alike, with the common beginning as its prompt."""
    chosen, rejected = _messages(row, kind, "chosen"), _messages(row, kind, "rejected")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    values = {**row.values, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    return Row(file=row.file, number=row.number, values=values)


def _answered(
    row: Row, kind: str, id_: str, asked: str, answered: str, renderer: Renderer, *, last_alone: bool = False
) -> Trajectory:
    """Return the trajectory of a prompt column and an answer column. With `last_alone`, only the last message of the
    answer is learnt."""
    prompt, answer = _column(row, kind, asked), _column(row, kind, answered)
    if isinstance(prompt, str) and isinstance(answer, str):
        return renderer.text(id_, prompt, answer)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(row, kind, asked)
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _messages(row, kind, answered)
    if after and after[0]["role"] in ("user", "system"):
        raise NothingToFit(
            f"{row.place}: {answered} begins with a message of role {after[0]['role']}; put what was asked into"
            f" {asked} alone" + (f", or leave out {asked}" if kind in (DPO, REWARD_MODEL) else "")
        )
    places = [len(before) + place for place, message in enumerate(after) if message["role"] == "assistant"]
    if not places:
        raise NotLearnable("no_answer", f"{answered} has no message of role assistant")
    learnt = places[-1:] if last_alone else places
    return renderer.conversation(id_, [*before, *after], learnt, _tools(row))


def _column(row: Row, kind: str, name: str) -> Any:
    value = row.values.get(name)
    if value is None:
        has = ", ".join(sorted(row.values)) or "none"
        what = "there is no column" if name not in row.values else "there is nothing in column"
        raise NothingToFit(f"{row.place}: {what} {name!r}; fit {kind} reads {COLUMNS[kind]}, and this row has: {has}")
    return value


def _messages(row: Row, kind: str, name: str) -> list[Mapping[str, Any]]:
    messages = without_nulls(_column(row, kind, name))
    is_list = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not is_list or not all(isinstance(each.get("role"), str) for each in messages):
        raise NothingToFit(f"{row.place}: {name} is a text, or a list of messages with a role and a content each")
    found: list[Mapping[str, Any]] = messages
    return found


def _tools(row: Row) -> list[Any] | None:
    tools = row.values.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except (ValueError, RecursionError) as error:
            raise NothingToFit(f"{row.place}: tools is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise NothingToFit(f"{row.place}: tools is a list of tools, or such a list as JSON text")
    return without_nulls(tools) or None


_READERS: dict[str, Callable[[Row, str, Renderer], Item]] = {
    SFT: _example,
    DPO: _pair(DPO, last_alone=False),
    REWARD_MODEL: _pair(REWARD_MODEL, last_alone=True),
    KTO: _labelled,
}
