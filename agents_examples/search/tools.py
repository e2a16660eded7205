"""The agent's instructions, and its tool: a full-text index of the documents, in SQLite's FTS5, in memory."""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path

INSTRUCTIONS = "Answer from the documents."
MOST_FOUND = 3
NOTHING = "nothing found"


class Index:
    """Documents by their words. To be used in the thread that made it."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
        self._database.executemany("INSERT INTO documents VALUES (?)", ((document,) for document in documents))

    def search(self, query: str) -> str:
        """Return the best documents with all words of the query, one per line, or `NOTHING`. Case does not count."""
        # In quotes, words that are operators of FTS5 are words.
        words = " ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        if not words:
            return NOTHING
        statement = "SELECT text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?"
        found = self._database.execute(statement, (words, MOST_FOUND)).fetchall()
        return "\n".join(text for (text,) in found) or NOTHING


@functools.cache
def index() -> Index:
    """Return the index of `documents.txt`, which is made by the first call."""
    return Index(Path(__file__).with_name("documents.txt").read_text().splitlines())
