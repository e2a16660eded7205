"""The reward for `base-rl attempts`: 1 if the task's check script succeeds in the folder that the attempt left."""

from __future__ import annotations

from typing import Any

from agents_examples.terminal.tools import folder_with, run_command


async def reward(task: dict[str, Any], files: dict[str, str]) -> float:
    """Return the reward of an attempt at a task of `tasks.jsonl`.

    The script runs in a copy of the files, where nothing that the agent started is left. Raise Stopped if it did not
    end, and NoSandbox if there is no sandbox: an attempt that could not be checked has no reward.
    """
    with folder_with(files) as folder:
        _, status = await run_command(task["check"], folder)
    return float(status == 0)
