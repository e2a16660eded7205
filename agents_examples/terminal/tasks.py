"""Jobs in a folder of text files, and the scripts that check them. `python -m agents_examples.terminal.tasks` writes
`tasks.jsonl`."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

NAMES = ("apples", "birds", "cups", "doors", "eggs", "forks", "goats", "hats", "inks", "jars")
WORDS = ("red", "blue", "green", "gold", "pink", "grey", "white", "black", "brown", "lilac", "olive", "coral")
FILES = 3
WORDS_OF_A_FILE = 3

Files = dict[str, str]
"""Contents by name."""


class Kind(StrEnum):
    """What is to be done. The last two name the file by a word in it, which has to be searched for first."""

    RENAME = "Rename {file} to {new}."
    COPY = "Copy {file} to {new}."
    DELETE = "Delete {file}."
    SORT = "Sort the lines of {file} into {new}."
    DELETE_FOUND = "Delete the file with the word {word}."
    RENAME_FOUND = "Rename the file with the word {word} to {new}."

    @property
    def searched(self) -> bool:
        return self in {Kind.DELETE_FOUND, Kind.RENAME_FOUND}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A folder and what is to be done with `file`. `word` is in no other file, and no file has the name `new`."""

    kind: Kind
    files: Mapping[str, str]
    file: str
    word: str
    new: str

    @property
    def instruction(self) -> str:
        return self.kind.format(file=self.file, word=self.word, new=self.new)

    @property
    def wanted(self) -> Files:
        """The files of the folder once the job is done."""
        files = dict(self.files)
        content = files[self.file]
        if self.kind is Kind.SORT:
            files[self.new] = "".join(sorted(content.splitlines(keepends=True)))
        elif self.kind in {Kind.RENAME, Kind.COPY, Kind.RENAME_FOUND}:
            files[self.new] = content
        if self.kind not in {Kind.SORT, Kind.COPY}:
            del files[self.file]
        return files

    @property
    def check(self) -> str:
        """A script for bash that succeeds in a folder that has exactly the wanted files."""
        names = f'test "$(ls -A | sort | xargs)" = {shlex.quote(" ".join(sorted(self.wanted)))}'
        contents = [
            f"printf %s {shlex.quote(content)} | cmp -s - {shlex.quote(name)}"
            for name, content in sorted(self.wanted.items())
        ]
        return " && ".join([names, *contents])


def random_job(rng: random.Random) -> Job:
    """Return a job; kinds, names and words are equally likely."""
    *names, new = (f"{name}.txt" for name in rng.sample(NAMES, FILES + 1))
    words = iter(rng.sample(WORDS, FILES * WORDS_OF_A_FILE))
    files = {name: "".join(f"{next(words)}\n" for _ in range(WORDS_OF_A_FILE)) for name in names}
    file = rng.choice(names)
    word = rng.choice(files[file].split())
    return Job(kind=rng.choice(list(Kind)), files=files, file=file, word=word, new=new)


def write_tasks(path: Path, count: int = 256) -> None:
    """Write jobs as tasks, one JSON object per line."""
    rng = random.Random(0)
    lines = []
    for number in range(count):
        job = random_job(rng)
        task = {"id": f"{number}", "instruction": job.instruction, "files": job.files, "check": job.check}
        lines.append(json.dumps(task))
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
