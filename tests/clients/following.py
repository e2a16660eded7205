"""Follow a page of docs/agents as a reader would, and read what base-rl recorded."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.clients.environments import environment_of
from tests.clients.pages import read_page
from tests.clients.stack import Recorded, Stack

_RUN_SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Followed:
    """Output of the page's commands, and the sessions that they made, oldest first."""

    output: str
    sessions: list[Recorded]

    @property
    def session(self) -> Recorded:
        """Return the only session."""
        assert len(self.sessions) == 1, [session.view["session"] for session in self.sessions]
        return self.sessions[0]


class Follower:
    """`follower("openai-python")` follows docs/agents/openai-python.md."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __call__(self, name: str) -> Followed:
        written = read_page(name)
        environment = environment_of(written)
        page = written.pointed_at(self._stack.url, self._stack.run_key)
        folder = environment.new_folder()
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        page.write_files(work, home)
        before = self._stack.session_ids()
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", page.commands],
            cwd=work,
            env=environment.variables(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            check=False,
        )
        output = ran.stdout + ran.stderr
        assert ran.returncode == 0, f"{name}: exit status {ran.returncode}\n{output[-6000:]}"
        sessions = [self._stack.session(session_id) for session_id in sorted(self._stack.session_ids() - before)]
        for session in sessions:
            check_recorded(session)
        return Followed(output=output, sessions=sessions)


def check_recorded(session: Recorded) -> None:
    """Check that every turn is complete, that its ids and log-probabilities agree in number, and that it was recorded
    once."""
    seen = set()
    for turn in session.turns:
        tokens = turn["tokens"]
        assert turn["state"] == "complete", turn
        assert tokens["output_ids"], turn
        assert len(tokens["output_ids"]) == len(tokens["output_logprobs"]) == turn["output_tokens"]
        assert sum(span["end"] - span["start"] for span in turn["spans"]) == turn["output_tokens"]
        assert turn["prefix_tokens"] + len(tokens["prompt_ids"]) == turn["prompt_tokens"]
        path = (turn["parent_id"], turn["prefix_tokens"], tuple(tokens["prompt_ids"]), tuple(tokens["output_ids"]))
        assert path not in seen, f"recorded twice: {turn}"
        seen.add(path)
