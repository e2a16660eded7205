"""`base-rl up`: the whole installation for somebody's own model and agent, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax

from proxy.cli.models import resolve_model
from proxy.cli.stack import Stack, running_stack, wait_until_ready
from proxy.settings import ConfigurationError, Settings, load_settings

_CHECK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """`overrides` are the command line's, by section."""

    config: Path | None
    overrides: dict[str, dict[str, Any]]
    trainer: bool
    seed: int
    dry_run: bool


async def run_up(options: UpOptions, out: Console) -> int:
    """Starts the parts, says how an agent reaches them, and waits for Ctrl-C or SIGTERM."""
    settings = load_settings(options.config, options.overrides)
    settings = with_model(settings, str(resolve_model(settings.run.model)))
    if options.trainer:
        _check_trainer(options.config)
    if options.dry_run:
        out.print_json(settings.model_dump_json(exclude={"bootstrap", "trainer"}))
        return 0
    end_on_sigterm()

    def listener(part: str, what: str) -> None:
        out.print(f"[dim]{part:<8}[/] {what}", highlight=False)

    async with running_stack(
        settings, config_file=options.config, with_trainer=options.trainer, seed=options.seed, listener=listener
    ) as stack:
        with out.status("loading the model …"):
            await wait_until_ready(stack)
        out.print(_welcome(stack, settings))
        try:
            await stack.supervisor.wait_for_failure()
        except asyncio.CancelledError:
            out.print("ending: trainer, proxy, engine …")
            raise
    return 0


def with_model(settings: Settings, model: str) -> Settings:
    """The settings with the run's model replaced by what was found for it."""
    return settings.model_copy(update={"run": settings.run.model_copy(update={"model": model})})


def end_on_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does: by cancelling it, so that every block cleans up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _check_trainer(config: Path | None) -> None:
    """Lets the trainer validate its own section, before anything is started. Raises ConfigurationError."""
    argv = [sys.executable, "-m", "trainer", "--dry-run"]
    if config is not None:
        argv += ["--config", str(config)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise ConfigurationError(result.stderr.strip() or result.stdout.strip())


def _welcome(stack: Stack, settings: Settings) -> Panel:
    name = settings.run.name
    code = (
        f"export OPENAI_BASE_URL={stack.base_url}\n"
        f"export OPENAI_API_KEY={stack.keys.run_key}\n"
        f"# your agent as ever, with model={json.dumps(name)}; then one number per session:\n"
        f"curl {stack.base_url}/feedback -H 'Authorization: Bearer {stack.keys.run_key}' \\\n"
        '  -H \'Content-Type: application/json\' -d \'{"session_id": "ses_…", "reward": 1}\'\n'
        f"# admin page: {stack.admin_url}  key: {stack.keys.admin_key}"
    )
    return Panel(
        Syntax(code, "bash", word_wrap=True, background_color="default"), title=f"{name} is up", expand=False
    )
