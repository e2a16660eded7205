"""Headless coding agents: Claude Code, Codex or OpenCode in a fresh worktree, told to make the tests pass.

CODING_AGENT=claude OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py mean
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents_examples.coding.tasks import REPOSITORIES
from agents_examples.coding.worktree import changes, fresh_worktree

PROMPT = "Some tests fail here. Correct the code, not the tests. Run them with: python3 -m unittest"
CONTEXT = 131072
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A coding agent's command. `files` are those of its home directory, by name."""

    words: list[str]
    variables: dict[str, str]
    files: dict[str, str]


def claude(base_url: str, api_key: str, model: str) -> Command:
    """Return the command of Claude Code, which speaks the Messages API."""
    return Command(
        words=["claude", "-p", PROMPT, "--allowedTools", "Bash,Edit,Write,Read,Task"],
        variables={
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": api_key,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        files={},
    )


def codex(base_url: str, api_key: str, model: str) -> Command:
    """Return the command of Codex, which speaks the Responses API. Its own sandbox is off: see README.md."""
    provider = {"name": "base-rl", "base_url": base_url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    lines = [f'model = "{model}"', 'model_provider = "base-rl"', f"model_context_window = {CONTEXT}"]
    lines += ["[model_providers.base-rl]", *(f'{key} = "{value}"' for key, value in provider.items())]
    return Command(
        words=["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", PROMPT],
        variables={"OPENAI_API_KEY": api_key},
        files={".codex/config.toml": "\n".join(lines) + "\n"},
    )


def opencode(base_url: str, api_key: str, model: str) -> Command:
    """Return the command of OpenCode, which speaks chat completions."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {model: {"limit": {"context": CONTEXT, "output": 8192}}},
    }
    configuration = {
        "model": f"base-rl/{model}",
        "small_model": f"base-rl/{model}",
        "share": "disabled",
        "autoupdate": False,
        "provider": {"base-rl": provider},
    }
    return Command(
        words=["opencode", "run", PROMPT],
        variables={"OPENAI_API_KEY": api_key, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": json.dumps(configuration)},
    )


AGENTS = {"claude": claude, "codex": codex, "opencode": opencode}


async def solve(command: Command, worktree: Path) -> str:
    """Run a coding agent in a worktree, with an empty home directory, and return what it changed, as a patch.

    Raise RuntimeError with the end of its output if it fails. A cancellation ends it and what it started.
    """
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        for name, content in command.files.items():
            file = Path(home) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *command.words,
            cwd=worktree,
            env={**kept, "HOME": home, **command.variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if process.returncode != 0:
        raise RuntimeError(
            f"{command.words[0]}: status {process.returncode}: {output.decode(errors='replace')[-400:]}"
        )
    return changes(worktree)


async def attempt(task: dict[str, Any], session: Any) -> str:
    """Make one attempt for `base-rl attempts`, by the agent that CODING_AGENT names."""
    name = os.environ.get("CODING_AGENT", "claude")
    if name not in AGENTS:
        raise ValueError(f"CODING_AGENT is {name!r}: set it to one of {', '.join(AGENTS)}")
    with fresh_worktree(task["files"]) as worktree:
        return await solve(AGENTS[name](session.base_url, session.api_key, session.model), worktree)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Let a coding agent mend one repository, and print its patch.")
    parser.add_argument("repository", choices=[one.id for one in REPOSITORIES])
    parser.add_argument("--agent", choices=AGENTS, default="claude")
    parser.add_argument("--model", default="coding", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    (repository,) = (one for one in REPOSITORIES if one.id == arguments.repository)
    address, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    with fresh_worktree(repository.files) as worktree:
        print(await solve(AGENTS[arguments.agent](address, key, arguments.model), worktree))


if __name__ == "__main__":
    asyncio.run(main())
