"""`base-rl demo`: an unmodified agent learns to use its calculator while you watch."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from proxy.cli.drawing import LiveRun, live_line, live_table, transcript
from proxy.cli.extras import require_extras
from proxy.cli.operations import Operations
from proxy.cli.signals import end_on_signals
from proxy.cli.stack import Stack, running_stack, wait_until_ready
from proxy.cli.supervisor import PartFailed, die_with_parent
from proxy.cli.up import with_model
from proxy.private_files import open_file
from proxy.settings import ConfigurationError, EngineKind, Settings, load_settings

REWARD_WINDOW = 128
LEAST_RISE = 0.4
_GOOD = 0.9
_REFRESH_S = 0.5
_PLAIN_EVERY_S = 5.0
_HARNESS_STOP_S = 15.0
# Seconds for the harness after Ctrl-C; sessions that it does not end by then end when they are idle.
_HARNESS_CUT_S = 0.5
_EMPTIED = ("base-rl.sqlite3", "base-rl.sqlite3-wal", "base-rl.sqlite3-shm", "weights", "logs", "harness.json")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """`target` is a mean reward of the last 128 sessions; `time_limit` is in seconds from the first session."""

    engine: str
    seed: int
    keep: bool
    port: int
    target: float
    time_limit: float
    data_dir: Path
    plain: bool
    train: bool
    shuffle_rewards: bool


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The contents of `summary.json`. Rewards are means of the first and the last 128 sessions; times are seconds
    from the command to the end and to the target, None if the target was not reached."""

    first_reward: float | None
    last_reward: float | None
    versions: int
    swaps: int
    turns: int
    failed_calls: int
    seconds: float
    seconds_to_090: float | None
    max_staleness: int | None

    @property
    def rise(self) -> float:
        if self.first_reward is None or self.last_reward is None:
            return 0.0
        return self.last_reward - self.first_reward


async def run_demo(options: DemoOptions, out: Console) -> int:
    """Run the demo, print its result, and return the exit status: 0 if the reward rose by 0.4."""
    began = time.monotonic()
    require_extras(*(["embedded"] if options.engine == EngineKind.EMBEDDED else []), "train", "demo")
    folder = _example_folder()
    settings = _settings(options, folder)
    end_on_signals()
    notes: list[str] = []

    def listener(part: str, what: str) -> None:
        notes.append(f"{part} {what}")
        if options.plain or "started" not in what:
            out.print(f"{part:<8} {what}", style="dim")

    config_file = folder / "config.toml"
    async with running_stack(
        settings,
        config_file=config_file,
        with_trainer=options.train,
        seed=options.seed,
        listener=listener,
        prepare=lambda: _empty(options.data_dir),
        or_next_port=True,
    ) as stack:
        with out.status("starting engine, proxy and trainer …"):
            await wait_until_ready(stack)
        if options.plain:
            out.print(_admin_page(stack), soft_wrap=True)
        demo = _Demo(options, stack, settings, out, began)
        async with Operations(stack.url, stack.keys.admin_key) as operations:
            await demo.watch(operations, folder)
            summary = await demo.summarise(operations)
        _write_summary(options.data_dir / "summary.json", summary)
        demo.report(summary)
        if options.keep:
            out.print(f"Everything is still up, until Ctrl-C. {_admin_page(stack)}", soft_wrap=True)
            await stack.supervisor.wait_for_failure()
    return 0 if summary.rise >= LEAST_RISE else 1


class _Demo:
    """One demo. The harness runs as a process of its own; the figures shown come from the operating API."""

    def __init__(self, options: DemoOptions, stack: Stack, settings: Settings, out: Console, began: float) -> None:
        self._options = options
        self._stack = stack
        self._run = settings.run.name
        self._out = out
        self._began = began
        self._report_file = options.data_dir / "harness.json"
        self._history: list[float] = []
        self._reached_090_at: float | None = None
        self._at_the_end: dict[str, Any] | None = None
        """The harness's report at the end of the demo: sessions that end while the harness stops do not count."""
        self._first_session_at = 0.0

    async def watch(self, operations: Operations, folder: Path) -> None:
        """Run the harness until the target or the time limit is reached, and draw the figures meanwhile."""
        harness = await self._start_harness(folder)
        self._first_session_at = time.monotonic()
        live = Live(console=self._out, refresh_per_second=4, transient=True)
        try:
            with contextlib.nullcontext() if self._options.plain else live:
                printed = 0.0
                while not await self._over(harness):
                    view = await self._read_figures(operations)
                    if not self._options.plain:
                        live.update(self._picture(view))
                    elif time.monotonic() - printed > _PLAIN_EVERY_S:
                        printed = time.monotonic()
                        self._out.print(live_line(view), soft_wrap=True)
        except asyncio.CancelledError:
            await _stop(harness, _HARNESS_CUT_S)
            raise
        finally:
            await _stop(harness, _HARNESS_STOP_S)
        if self._options.plain:
            self._out.print(live_line(await self._read_figures(operations)), soft_wrap=True)

    async def summarise(self, operations: Operations) -> Summary:
        harness = self._at_the_end or self._harness_report()
        run = await operations.run(self._run)
        steps = (await operations.curves(self._run))["steps"]
        staleness = [step["staleness_max"] for step in steps if step["staleness_max"] is not None]
        return Summary(
            first_reward=harness.get("first_mean"),
            last_reward=harness.get("last_mean"),
            versions=run["head_version"],
            swaps=run["swaps"],
            turns=run["turn_count"],
            failed_calls=harness.get("failed_calls", 0),
            seconds=round(time.monotonic() - self._began, 1),
            seconds_to_090=None if self._reached_090_at is None else round(self._reached_090_at - self._began, 1),
            max_staleness=max(staleness, default=None),
        )

    def report(self, summary: Summary) -> None:
        harness = self._harness_report()
        for title, key in (
            ("before: the first session that ended", "first_transcript"),
            ("after: the last session that earned the full reward", "last_success_transcript"),
        ):
            if harness.get(key):
                self._out.print(transcript(title, harness[key]))
        if summary.first_reward is None or summary.last_reward is None:
            logs = f"; the logs are in {self._options.data_dir / 'logs'}"
            self._out.print(Text.assemble(("no session was finished", "red"), logs))
            return
        colour = "green" if summary.rise >= LEAST_RISE else "red"
        self._out.print(
            Text.assemble(
                "The agent went from ",
                (f"{summary.first_reward:.2f}", "bold"),
                " to ",
                (f"{summary.last_reward:.2f}", f"bold {colour}"),
                f" in {summary.seconds:.0f} s: {summary.versions} policy versions, {summary.swaps} hot swaps, "
                f"{summary.turns} calls, {summary.failed_calls} failed. Its code knows nothing of it.",
            ),
            soft_wrap=self._options.plain,
        )
        if summary.rise < LEAST_RISE:
            self._out.print(
                Text.assemble(
                    (f"The reward did not rise by {LEAST_RISE}.", "red"), f" Logs: {self._options.data_dir / 'logs'}"
                ),
                soft_wrap=True,
            )
        self._out.print(str(self._options.data_dir / "summary.json"), style="dim", soft_wrap=True)

    async def _start_harness(self, folder: Path) -> asyncio.subprocess.Process:
        options = self._options
        argv = [sys.executable, "-m", "agents_examples.calculator.harness", "--model", self._run]
        argv += ["--seed", str(options.seed), "--report", str(self._report_file.resolve())]
        if options.shuffle_rewards:
            argv.append("--shuffle-rewards")
        with open_file(options.data_dir / "logs" / "harness.log", "ab") as log:
            return await asyncio.create_subprocess_exec(
                *argv,
                env={
                    **os.environ,
                    "OPENAI_BASE_URL": self._stack.base_url,
                    "OPENAI_API_KEY": self._stack.keys.run_key,
                    "PYTHONPATH": str(folder.parent.parent),
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    async def _over(self, harness: asyncio.subprocess.Process) -> bool:
        """Return whether the demo is over. Raises PartFailed after a part or the harness has failed for good."""
        self._stack.supervisor.raise_for_failure()
        report = self._harness_report()
        reward = report.get("last_mean")
        if reward is not None and report["sessions"] >= REWARD_WINDOW:
            if self._reached_090_at is None and reward >= _GOOD:
                self._reached_090_at = time.monotonic()
            if reward >= self._options.target:
                self._at_the_end = report
        if time.monotonic() - self._first_session_at > self._options.time_limit:
            self._at_the_end = report
        if self._at_the_end is not None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFRESH_S):
                await harness.wait()
            log = self._options.data_dir / "logs" / "harness.log"
            raise PartFailed(f"the harness ended with status {harness.returncode}; see {log}")
        return False

    async def _read_figures(self, operations: Operations) -> LiveRun:
        run = await operations.run(self._run)
        harness = self._harness_report()
        reward = harness.get("last_mean")
        if reward is not None:
            self._history.append(reward)
        return LiveRun(
            sessions=harness.get("sessions", 0),
            open_sessions=run["open_sessions"],
            reward=reward,
            reward_history=self._history,
            version=run["serving_version"],
            swaps=run["swaps"],
            staleness_mean=run["staleness_mean"],
            staleness_max=run["staleness_max"],
            tokens_per_second=run["tokens_per_second"],
            failed_calls=harness.get("failed_calls", 0),
            turns=run["turn_count"],
            seconds=time.monotonic() - self._began,
        )

    def _picture(self, view: LiveRun) -> Any:
        return live_table(
            view,
            title="base-rl demo: an unmodified agent learns to use its calculator",
            admin_url=self._stack.admin_url,
            admin_key=self._stack.keys.admin_key,
            target=self._options.target,
        )

    def _harness_report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads(self._report_file.read_text())
        except FileNotFoundError:
            return {}
        return report


def _example_folder() -> Path:
    found = importlib.util.find_spec("agents_examples")
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError("agents_examples is not installed; run the demo from a clone: make demo")
    return Path(next(iter(found.submodule_search_locations))) / "calculator"


def _settings(options: DemoOptions, folder: Path) -> Settings:
    """Return the example's configuration with the demo's options over it."""
    overrides: dict[str, dict[str, Any]] = {
        "server": {"host": "127.0.0.1", "port": options.port, "data_dir": options.data_dir},
        "engine": {"kind": EngineKind(options.engine).value, "url": None},
    }
    settings = load_settings(folder / "config.toml", overrides)
    return with_model(settings, str(folder / "checkpoint"))


def _admin_page(stack: Stack) -> str:
    return f"admin page {stack.admin_url}  key {stack.keys.admin_key}"


def _empty(data_dir: Path) -> None:
    """Remove the store, weights and logs of an earlier demo: each begins with the base model. The keys stay."""
    for name in _EMPTIED:
        path = data_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_summary(path: Path, summary: Summary) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    partial.replace(path)


async def _stop(harness: asyncio.subprocess.Process, seconds: float) -> None:
    """Let the harness end its open sessions; kill it if that takes longer than `seconds`."""
    if harness.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        harness.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(seconds):
            await harness.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            harness.kill()
        await harness.wait()
