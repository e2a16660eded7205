"""A fresh git worktree for each attempt, and what the attempt changed there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Author, and no configuration of the person who runs this: hooks and signatures would change or delay the commits.
_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "example",
    "GIT_AUTHOR_EMAIL": "example@example.invalid",
    "GIT_COMMITTER_NAME": "example",
    "GIT_COMMITTER_EMAIL": "example@example.invalid",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@contextlib.contextmanager
def fresh_worktree(files: Mapping[str, str]) -> Iterator[Path]:
    """Make a repository with one commit of these files and a worktree of it, and remove both at the end of the block.

    Raise subprocess.CalledProcessError if git fails.
    """
    with tempfile.TemporaryDirectory(prefix="coding-") as directory:
        repository, worktree = Path(directory) / "repository", Path(directory) / "worktree"
        repository.mkdir()
        for name, content in files.items():
            (repository / name).write_text(content)
        git(repository, "init", "--quiet", "--initial-branch", "main")
        git(repository, "add", "--all")
        git(repository, "commit", "--quiet", "--message", "begin")
        git(repository, "worktree", "add", "--quiet", "-b", "attempt", str(worktree))
        yield worktree


def changes(worktree: Path) -> str:
    """Return what changed since the first commit, as a patch: new files too, those that are ignored left out."""
    git(worktree, "add", "--all")
    return git(worktree, "diff", "--cached", "--binary", "main")


def apply(worktree: Path, patch: str) -> None:
    """Apply a patch except its changes to tests, which are not the attempt's to change."""
    if patch:
        git(worktree, "apply", "--exclude=test_*", "--exclude=*/test_*", "-", given=patch)


def git(folder: Path, *words: str, given: str | None = None) -> str:
    """Run git and return its output. Raise subprocess.CalledProcessError."""
    ran = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**os.environ, **_ENVIRONMENT},
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout
