"""The measured systems, each one process or two, started and ended here.

While one is measured the others are stopped (SIGSTOP), so that their background work does not disturb it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.proxy import conversations, store
from benchmarks.proxy.environments import LITELLM, RLLM_GATEWAY
from benchmarks.proxy.load import Requests
from proxy.cli.supervisor import die_with_parent
from proxy.engines.launch import scripted_plan
from proxy.engines.scripted.script import MODEL

READY_SECONDS = 120.0
STOP_SECONDS = 15.0
RUN_KEY = "rl-run-" + "b" * 32
MASTER_KEY = f"sk-{secrets.token_hex(24)}"
SCRIPT = f'[[rule]]\ntext = "{conversations.ANSWER}"\n'

BASE_RL, DIRECT = "base_rl", "direct"
BASE_RL_FSYNC, ENGINE_FSYNC = "base_rl_fsync", "direct_fsync"
BASE_RL_MANY, ENGINE_MANY = "base_rl_many", "direct_many"
BASE_RL_BEFORE, ENGINE_BEFORE = "base_rl_before", "direct_before"
LITELLM_NAME, RLLM_NAME, STUB = "litellm", "rllm_gateway", "stub"


@dataclass(frozen=True, kw_only=True)
class System:
    """A measured system. CPU time is counted for `measured`; `processes` are all that it needs. `requests(turns,
    stream)` makes a client's requests. `behind` is the system without it, for comparison: the same calls sent
    directly."""

    name: str
    port: int
    measured: int
    processes: tuple[int, ...]
    requests: Callable[[int, bool], Requests]
    behind: System | None = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the measured process so far, over all its threads."""
        return sum(thread_seconds(Path("/proc") / str(self.measured) / "task"))

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process, number)


def thread_seconds(tasks: Path) -> Iterator[float]:
    """Return a thread's CPU time from the scheduler's count in nanoseconds: `cpu_times` has steps of 10
    milliseconds."""
    for task in tasks.iterdir():
        yield int((task / "schedstat").read_text().split()[0]) / 1e9


@dataclass(kw_only=True)
class Bench:
    """Starts systems, and ends all of them at the end of the block. `runs` is the number of runs in the store of
    `BASE_RL_MANY`; `before` is the directory with the code of `BASE_RL_BEFORE`."""

    folder: Path
    runs: int = 200
    before: Path | None = None
    systems: dict[str, System] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Bench:
        """Raise BlockingIOError if another benchmark uses the folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = self._stack.enter_context(self.folder.with_suffix(".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> System:
        """Start the system of this name and whatever it needs behind it."""
        if name not in self.systems:
            starters: dict[str, Callable[[], System]] = {
                DIRECT: lambda: self._direct(DIRECT),
                ENGINE_FSYNC: lambda: self._direct(ENGINE_FSYNC),
                BASE_RL: lambda: self._base_rl(BASE_RL, "normal"),
                BASE_RL_FSYNC: lambda: self._base_rl(BASE_RL_FSYNC, "full"),
                ENGINE_MANY: lambda: self._direct(ENGINE_MANY),
                BASE_RL_MANY: lambda: self._base_rl(BASE_RL_MANY, "normal"),
                ENGINE_BEFORE: lambda: self._direct(ENGINE_BEFORE),
                BASE_RL_BEFORE: lambda: self._base_rl(BASE_RL_BEFORE, "normal"),
                STUB: self._stub,
                LITELLM_NAME: self._litellm,
                RLLM_NAME: self._rllm_gateway,
            }
            self.systems[name] = starters[name]()
        return self.systems[name]

    @contextmanager
    def alone(self, system: System) -> Iterator[None]:
        """Stop all other systems while the block lasts."""
        needed = {system.name, *([system.behind.name] if system.behind else [])}
        for other in self.systems.values():
            if other.name not in needed:
                other.pause()
        for name in needed:
            self.systems[name].resume()
        try:
            yield
        finally:
            for other in self.systems.values():
                other.resume()

    def _direct(self, name: str) -> System:
        """Start the scripted engine alone: the cost of base-rl's calls without base-rl."""
        script = self.folder / "script.toml"
        script.write_text(SCRIPT)
        port = free_port()
        plan = scripted_plan(model=str(MODEL), port=port, script=script)
        process = self._run(name, plan.argv, plan.env)
        _wait_for(f"{plan.url}/health_generate", process)
        return System(
            name=name,
            port=port,
            measured=process.pid,
            processes=(process.pid,),
            requests=lambda turns, stream: conversations.generations(turns=turns, stream=stream),
        )

    def _base_rl(self, name: str, synchronous: str) -> System:
        """Start the proxy as `base-rl up` does, with a scripted engine of its own, because it labels the weights of
        its engine."""
        behind = self.start(
            {
                BASE_RL: DIRECT,
                BASE_RL_FSYNC: ENGINE_FSYNC,
                BASE_RL_MANY: ENGINE_MANY,
                BASE_RL_BEFORE: ENGINE_BEFORE,
            }[name]
        )
        if name == BASE_RL_MANY:
            # One of them is the measured run, which the proxy adds.
            store.fill(self.folder / name / "base-rl.sqlite3", self.runs - 1, str(MODEL))
        port = free_port()
        environment = {
            "BASE_RL_SERVER__PORT": str(port),
            "BASE_RL_SERVER__DATA_DIR": str((self.folder / name).resolve()),
            "BASE_RL_ENGINE__KIND": "scripted",
            "BASE_RL_ENGINE__URL": f"http://127.0.0.1:{behind.port}",
            "BASE_RL_DATABASE__SYNCHRONOUS": synchronous,
            "BASE_RL_RUN__NAME": conversations.MODEL_NAME,
            "BASE_RL_RUN__MODEL": str(MODEL),
            "BASE_RL_BOOTSTRAP__RUN_KEY": RUN_KEY,
        }
        tree = self.before if name == BASE_RL_BEFORE else None
        process = self._run(name, (sys.executable, "-m", "proxy"), environment, tree=tree)
        _wait_for(f"http://127.0.0.1:{port}/readyz", process)
        headers = f"authorization: Bearer {RUN_KEY}\r\n"
        return System(
            name=name,
            port=port,
            measured=process.pid,
            processes=(process.pid,),
            requests=lambda turns, stream: conversations.chats(
                "/v1/chat/completions", turns=turns, stream=stream, headers=headers
            ),
            behind=behind,
        )

    def _stub(self) -> System:
        port = free_port()
        process = self._run(STUB, (sys.executable, "-m", "benchmarks.proxy.stub", str(port)), {})
        _wait_for(f"http://127.0.0.1:{port}/v1/models", process)
        return self._chat_system(STUB, port, process, "/v1/chat/completions", None)

    def _litellm(self) -> System:
        """Start LiteLLM with one worker, no database, its default logging, and the master key without which it does
        not start."""
        environment = LITELLM.made()
        behind = self.start(STUB)
        port = free_port()
        config = self.folder / "litellm.yaml"
        config.write_text(
            f"model_list:\n  - model_name: {conversations.MODEL_NAME}\n    litellm_params:\n"
            f"      model: openai/{conversations.MODEL_NAME}\n      api_key: none\n"
            f"      api_base: http://127.0.0.1:{behind.port}/v1\n"
        )
        argv = (environment / "bin" / "litellm", "--config", config, "--host", "127.0.0.1", "--port", port)
        variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER_KEY}
        process = self._run(LITELLM_NAME, tuple(map(str, (*argv, "--num_workers", 1))), variables)
        _wait_for(f"http://127.0.0.1:{port}/health/liveliness", process)
        return self._chat_system(LITELLM_NAME, port, process, "/v1/chat/completions", behind, key=MASTER_KEY)

    def _rllm_gateway(self) -> System:
        """Start rllm-model-gateway as its README does: one process, traces in SQLite. The path names its sessions."""
        environment = RLLM_GATEWAY.made()
        behind = self.start(STUB)
        port = free_port()
        argv = (
            *(str(environment / "bin" / "rllm-model-gateway"), "--host", "127.0.0.1", "--port", str(port)),
            *("--store", "sqlite", "--db-path", str(self.folder / "rllm.sqlite3")),
            *("--worker", f"http://127.0.0.1:{behind.port}/v1", "--log-level", "WARNING"),
        )
        process = self._run(RLLM_NAME, argv, {})
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        return self._chat_system(RLLM_NAME, port, process, "/sessions/{}/v1/chat/completions", behind)

    def _chat_system(
        self, name: str, port: int, process: subprocess.Popen[bytes], path: str, behind: System | None, key: str = ""
    ) -> System:
        headers = f"authorization: Bearer {key}\r\n" if key else ""
        return System(
            name=name,
            port=port,
            measured=process.pid,
            processes=(process.pid,),
            requests=lambda turns, stream: conversations.chats(path, turns=turns, stream=stream, headers=headers),
            behind=behind,
        )

    def _run(
        self, name: str, argv: tuple[str, ...], environment: Mapping[str, str], *, tree: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process. Modules are found in the directory `tree` first, by default in the current one; `tree`
        may have packages of its own in `packages`."""
        log = (self.folder / f"{name}.log").open("wb")
        self._stack.callback(log.close)
        variables = {key: value for key, value in os.environ.items() if not key.startswith("BASE_RL_")}
        process = subprocess.Popen(
            argv,
            cwd=tree,
            env={
                **variables,
                "OMP_NUM_THREADS": "1",
                **({} if tree is None else {"PYTHONPATH": str(tree / "packages")}),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # Killed: while it stands still it would not hear of SIGTERM.
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - nothing here has threads
        )
        self._stack.callback(_end, process)
        return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}; its log says why")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} did not answer for {READY_SECONDS:.0f} seconds")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
