"""The reward for `base-rl attempts`: the share of the tests that pass with the attempt's patch.

The patch is applied to a fresh worktree, without its changes to tests, and the tests run in a process with a time
limit. It is no sandbox: run this where code of your model may run. A patch can also fake a result, for it shares the
process with the tests; read patches that earn much.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from agents_examples.coding.worktree import apply, fresh_worktree

SECONDS = 30
_RUN = """
import os, sys, unittest
sys.path.insert(0, os.getcwd())
with open(os.devnull, "w") as silent:
    result = unittest.TextTestRunner(stream=silent).run(unittest.defaultTestLoader.discover("."))
bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses) + len(result.skipped)
print(result.testsRun - bad, result.testsRun)
"""


def reward(task: dict[str, Any], patch: str) -> dict[str, Any]:
    """Return the feedback on an attempt: 0 if the tests cannot run with its patch, or take too long."""
    passed, total = count_passed(task["files"], patch)
    return {"reward": passed / total, "comment": f"{passed} of {total} tests pass"}


def count_passed(files: dict[str, str], patch: str) -> tuple[int, int]:
    """Return how many tests pass, and how many there are. A module that cannot be imported passes none."""
    total = sum(content.count("def test_") for name, content in files.items() if name.startswith("test_"))
    with fresh_worktree(files) as worktree:
        apply(worktree, patch)
        passed, found = _run(worktree)
    return (passed if found == total else 0), total


def _run(worktree: Path) -> tuple[int, int]:
    """Return how many tests passed and were run; 0 and 0 if they did not end as they should."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(worktree)}  # no keys of whoever runs this
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", _RUN],
            cwd=worktree,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        passed, found = map(int, ran.stdout.split("\n")[-2].split())
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 0, 0
    return passed, found
