"""The fenced blocks of a documentation page, and the commands in them.

A reader follows a page from top to bottom, in a clone, in one shell. The language of a block decides its use:

- ```bash: its lines are run in order;
- ```python: run as a program, with the exported variables of the shell; with title="NAME" it is a file of that name;
- ```toml title="NAME": a file of that name; without a title it is part of a configuration, which is only parsed;
- ```text, ```diff, ```json: not used.

A block that cannot run on every machine has a comment on the line before it, which readers do not see:
`<!-- not run here: REASON -->`. Its commands, and the options they use, must exist all the same.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE_PAGES = sorted((ROOT / "agents_examples").glob("*/README.md"))
SHELL, PROGRAM, FILE, LOOKED_AT = "bash", "python", "toml", frozenset({"text", "diff", "json"})

_BLOCK = re.compile(
    r"^(?:<!-- not run here: (?P<reason>[^\n]+?) -->\n)?```(?P<info>[^\n]*)\n(?P<code>.*?)^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_INFO = re.compile(r'^(?P<language>\w+)(?: +title="(?P<title>[^"]+)")?$')
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `reason` explains why it is not run, or is None; `line` is the line of its fence."""

    language: str
    title: str | None
    code: str
    reason: str | None
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page. Raise ValueError for a block of an unknown language or form."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text[: match.start("info")].count("\n") + 1
        info = _INFO.match(match["info"].strip())
        if info is None:
            raise ValueError(f'line {line}: a block says {match["info"]!r}: a language, and perhaps title="NAME"')
        language = info["language"]
        if language not in {SHELL, PROGRAM, FILE} | LOOKED_AT:
            raise ValueError(f"line {line}: a block of {language}: what is a reader to do with it?")
        if match["reason"] is not None and language not in (SHELL, PROGRAM):
            raise ValueError(f"line {line}: a block of {language} is not run anyway")
        found.append(
            Block(language=language, title=info["title"], code=match["code"], reason=match["reason"], line=line)
        )
    return found


def commands_of(code: str) -> list[str]:
    """Return the commands of a shell block, each with its continuation lines."""
    commands: list[str] = []
    pending = ""
    for line in code.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if not pending.strip() or pending.lstrip().startswith("#"):
            pending = ""
        elif not line.endswith("\\") and _is_whole(pending):
            commands.append(pending)
            pending = ""
    if pending:
        raise ValueError(f"a command without an end: {pending}")
    return commands


def _is_whole(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0


def words_of(command: str) -> list[str]:
    """Return the words of a command without comments, leading variable assignments, `sudo`, and anything after a
    pipe."""
    words = shlex.split(command.replace("\\\n", " "), comments=True, posix=True)
    for index, word in enumerate(words):
        if word in {"|", "||", "&&", ">", "2>&1", "&"}:
            words = words[:index]
            break
    while words and re.match(r"^\w+=", words[0]):
        words.pop(0)
    return words


def inline_commands(text: str) -> Iterator[str]:
    """Return the commands `base-rl …`, `make …` and `python -m …` in sentences and tables."""
    prose = _BLOCK.sub("", text)
    for found in _INLINE.findall(prose):
        command = " ".join(found.split())
        if re.match(r"^(\w+=\S+ )*(\.venv/bin/)?(base-rl|make|python -m) \S", command):
            yield command


def pages() -> dict[str, Path]:
    return {str(page.relative_to(ROOT)): page for page in PAGES}


def example_pages() -> dict[str, Path]:
    """Return the READMEs of the examples, by their folders' names."""
    return {page.parent.name: page for page in EXAMPLE_PAGES}
