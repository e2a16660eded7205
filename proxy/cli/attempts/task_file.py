"""Files of tasks: JSON Lines, one object per task."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.cli.console import Refused

# Bounds of POST /v1/sessions for a session's task and the name of its group.
_LONGEST_NAME = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. `id` names it in reports, and is the sessions' `task`; `fields` is the whole object of its line."""

    id: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The tasks of a file, and what is wrong with the lines that are no tasks."""

    tasks: tuple[Task, ...]
    problems: tuple[str, ...]


def read_tasks(path: Path) -> TaskFile:
    """Read a file of tasks. A line that is no task is a problem of its own; the others are read.

    Raise Refused if the file cannot be read or has no task at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refused(f"cannot read the tasks: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"cannot read the tasks: {path} is not UTF-8 text") from error
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, number)
        if isinstance(task, str):
            problems.append(f"{path}, line {number}: {task}")
        elif task.id in tasks:
            problems.append(f"{path}, line {number}: the id {task.id!r} is another task's; give each its own")
        else:
            tasks[task.id] = task
    if not tasks:
        first = f" (the first problem: {problems[0]})" if problems else ""
        raise Refused(f'{path} has no task; write one JSON object per line, such as {{"id": "one"}}{first}')
    return TaskFile(tasks=tuple(tasks.values()), problems=tuple(problems))


def _task(line: str, number: int) -> Task | str:
    """Return the task of a line, or what is wrong with it."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(fields, dict):
        return "not a JSON object"
    name = fields.get("id", str(number))
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        return f"`id` must be a text of 1 to {_LONGEST_NAME} printable characters, or an integer"
    return Task(id=name, fields=fields)
