"""The parts of Markdown that the checks need: headings with their anchors, tables, links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CELL_BORDER = re.compile(r"(?<!\\)\|")


def without_code_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings; a repeated heading gets -1, -2, …"""
    found: set[str] = set()
    for heading in _HEADING.findall(without_code_blocks(text)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        numbered, count = slug, 0
        while numbered in found:
            count += 1
            numbered = f"{slug}-{count}"
        found.add(numbered)
    return found


def code_blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of this language, including files with a title."""
    return re.findall(rf"^```{language}(?: title=[^\n]*)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Return the targets of all links and images, including links around images."""
    return _LINK.findall(without_code_blocks(text))


def sections(text: str) -> dict[str, str]:
    """Return the text below each heading, up to the next heading of any level."""
    parts = _HEADING.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> list[list[str]]:
    """Return the cells of all table rows except headings and rules."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in _CELL_BORDER.split(line)[1:-1]] for line in lines]
    rules = {index for index, cells in enumerate(table) if all(re.fullmatch(r":?-+:?", cell) for cell in cells)}
    return [cells for index, cells in enumerate(table) if index not in rules and index + 1 not in rules]


def code(cell: str) -> list[str]:
    """Return the `code` spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)
