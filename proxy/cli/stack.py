"""The three parts of a local installation, engine, proxy and trainer, under one supervisor."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from proxy.cli.addresses import NoFreePort, claimed_port, random_free_port
from proxy.cli.engine_plan import engine_plan
from proxy.cli.local_keys import LocalKeys, load_or_make
from proxy.cli.operations import Operations, ProxyUnreachable
from proxy.cli.supervisor import Listener, Part, PartFailed, Supervisor
from proxy.cli.trainer_process import trainer_command
from proxy.private_files import make_directory, open_file
from proxy.settings import ConfigurationError, EngineKind, ServerSettings, Settings, as_environment

ENGINE, PROXY, TRAINER = "engine", "proxy", "trainer"
_READY_POLL_S = 0.1
_MOST_RESTARTS_BEFORE_READY = 3
_ADDRESS_FILE = "address.json"
_SCRIPTED_MARK = "scripted"
# Ctrl-C must take two seconds at most, so no part has time to finish its work.
_GRACE_S = 0.3
# Seconds beyond the grace period, for recording the calls in flight: it takes milliseconds unless the disk hangs.
_PROXY_STOP_S = 5.0
# Seconds for the trainer to give claims back. During a step it cannot handle the signal: it is killed, the step is
# lost, and the next trainer gives its claims back.
_TRAINER_STOP_S = 0.8
# Seconds for a trainer with metric sinks, which waits five seconds for them.
_TRAINER_WITH_SINKS_STOP_S = 6.5
# Seconds for the engine, which has no state to save.
_ENGINE_STOP_S = 0.3


class AlreadyRunning(Exception):
    """Another base-rl uses the data directory."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the base-rl of a data directory, for commands such as `base-rl status`, and the run that it serves.
    `run` is None in a file that an older base-rl wrote."""

    url: str
    pid: int
    run: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A running installation. `base_url` is what an agent sets; `url` is the same without `/v1`."""

    url: str
    keys: LocalKeys
    supervisor: Supervisor
    started_at: float

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def admin_url(self) -> str:
        return f"{self.url}/admin"


@asynccontextmanager
async def running_stack(
    settings: Settings,
    *,
    config_file: Path | None,
    with_trainer: bool,
    nproc: int = 1,
    tells_metrics: bool = False,
    seed: int | None,
    listener: Listener,
    prepare: Callable[[], None] = lambda: None,
    or_next_port: bool = False,
) -> AsyncIterator[Stack]:
    """Start the parts at the same time, and end them with the block. `wait_until_ready` waits until they are ready.

    The trainer has `nproc` processes, and more time to end if it `tells_metrics` to a sink. `prepare` runs first,
    once no other base-rl uses the data directory. With `or_next_port`, the next free port replaces one that is taken.

    Raises AlreadyRunning, NoFreePort, ConfigurationError for a data directory that cannot be used.
    """
    data_dir = settings.server.data_dir.resolve()
    host, wanted_port = settings.server.host, settings.server.port
    with only_one(data_dir), claimed_port(host, wanted_port, or_next=or_next_port) as port:
        prepare()
        _keep_apart(data_dir, settings)
        settings = settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})})
        keys = load_or_make(data_dir)
        url = local_url(settings)
        parts = _parts(
            settings,
            url=url,
            keys=keys,
            config_file=config_file,
            with_trainer=with_trainer,
            nproc=nproc,
            tells_metrics=tells_metrics,
            seed=seed,
        )
        async with Supervisor(parts, data_dir / "logs", listener) as supervisor:
            with address_recorded(data_dir, url, settings.run.name):
                yield Stack(url=url, keys=keys, supervisor=supervisor, started_at=time.monotonic())


async def wait_until_ready(stack: Stack) -> None:
    """Wait until calls would be served: the engine has loaded its model and the proxy has verified it.

    There is no time limit, because a large model may take long to load. Raises PartFailed for a part that failed for
    good or died repeatedly meanwhile, and NoFreePort if another base-rl answers on the port.
    """
    before = {part: stack.supervisor.restarts(part) for part in stack.supervisor.parts}
    async with Operations(stack.url, stack.keys.admin_key) as operations:
        while not await operations.ready():
            stack.supervisor.raise_for_failure()
            for part in stack.supervisor.parts:
                if stack.supervisor.restarts(part) - before[part] > _MOST_RESTARTS_BEFORE_READY:
                    raise PartFailed(
                        f"{part} ends again and again before it is ready. The end of its log, "
                        f"{stack.supervisor.log(part)}:\n{stack.supervisor.log_tail(part)}"
                    )
            await asyncio.sleep(_READY_POLL_S)
        try:
            await operations.health()
        except ProxyUnreachable as error:
            raise NoFreePort(f"{error}: another base-rl took the port; name another with --port") from error


@contextmanager
def address_recorded(data_dir: Path, url: str, run: str) -> Iterator[None]:
    """Record in the data directory, for the length of the block, where this base-rl answers."""
    address_file = data_dir / _ADDRESS_FILE
    address_file.write_bytes(msgspec.json.encode(Address(url=url, pid=os.getpid(), run=run)))
    try:
        yield
    finally:
        address_file.unlink(missing_ok=True)


def read_address(data_dir: Path) -> Address | None:
    try:
        return msgspec.json.decode((data_dir / _ADDRESS_FILE).read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def local_url(settings: Settings) -> str:
    """Return the address of a proxy with these settings, as seen from this machine."""
    return f"http://{_reachable(settings.server.host)}:{settings.server.port}"


def trainer_environment(settings: Settings, *, url: str, seed: int | None) -> dict[str, str]:
    """Return the environment by which the trainer finds this proxy, run and directories."""
    environment = {
        "BASE_RL_SERVER__DATA_DIR": str(settings.server.data_dir.resolve()),
        "BASE_RL_TRAINER__PROXY_URL": url,
        "BASE_RL_TRAINER__RUN": settings.run.name,
        "BASE_RL_TRAINER__WEIGHTS__DIRECTORY": str(settings.weights_dir),
    }
    if seed is not None:
        environment["BASE_RL_TRAINER__SEED"] = str(seed)
    return environment


def _parts(
    settings: Settings,
    *,
    url: str,
    keys: LocalKeys,
    config_file: Path | None,
    with_trainer: bool,
    nproc: int,
    tells_metrics: bool,
    seed: int | None,
) -> list[Part]:
    parts, engine_urls = _engines(settings, seed=seed)
    resolved = settings.model_copy(
        update={
            "server": settings.server.model_copy(
                update={
                    "data_dir": settings.server.data_dir.resolve(),
                    "stop_grace_seconds": _grace_seconds(settings.server),
                }
            ),
            "engine": settings.engine.model_copy(
                update={"url": engine_urls[0], "replica_urls": tuple(engine_urls[1:])}
            ),
        }
    )
    config = ("--config", str(config_file.resolve())) if config_file is not None else ()
    parts.append(
        Part(
            name=PROXY,
            argv=(sys.executable, "-m", "proxy", *config),
            env={
                **as_environment(resolved),
                "BASE_RL_BOOTSTRAP__ADMIN_KEY": keys.admin_key,
                "BASE_RL_BOOTSTRAP__RUN_KEY": keys.run_key,
                "BASE_RL_BOOTSTRAP__TRAINER_KEY": keys.trainer_key,
            },
            stop_seconds=_grace_seconds(settings.server) + _PROXY_STOP_S,
        )
    )
    if with_trainer:
        parts.append(
            Part(
                name=TRAINER,
                argv=trainer_command(nproc, config),
                env={
                    **trainer_environment(settings, url=url, seed=seed),
                    "BASE_RL_TRAINER__NPROC": str(nproc),
                    "BASE_RL_TRAINER__API_KEY": keys.trainer_key,
                },
                stop_seconds=_TRAINER_WITH_SINKS_STOP_S if tells_metrics else _TRAINER_STOP_S,
            )
        )
    return parts


def _engines(settings: Settings, *, seed: int | None) -> tuple[list[Part], list[str]]:
    """Return the engines to start, and the addresses of all engines of `[engine]`, the first one first."""
    engine = settings.engine
    if engine.kind not in tuple(EngineKind):
        return [], [engine.url or engine.kind, *engine.replica_urls]
    parts: list[Part] = []
    urls: list[str] = []
    while len(parts) < engine.replicas:
        plan = engine_plan(settings, port=_unused_port(urls), seed=seed)
        name = ENGINE if not parts else f"{ENGINE}-{len(parts) + 1}"
        parts.append(Part(name=name, argv=plan.argv, env=plan.env, stop_seconds=_ENGINE_STOP_S))
        urls.append(plan.url)
    return parts, urls


def _unused_port(urls: Sequence[str]) -> int:
    """Return a free port that none of `urls` has: their engines do not listen yet, so their ports still look free."""
    taken = {urlsplit(url).port for url in urls}
    while (port := random_free_port("127.0.0.1")) in taken:
        pass
    return port


def _grace_seconds(server: ServerSettings) -> float:
    """Return the grace period of calls in flight: the configured one, or a short one if the setting has its
    default."""
    default = ServerSettings().stop_grace_seconds
    return _GRACE_S if server.stop_grace_seconds == default else server.stop_grace_seconds


def _reachable(host: str) -> str:
    """Return an address at which this machine reaches `host`, which may stand for every address."""
    if host in ("0.0.0.0", ""):  # noqa: S104  (compared with, not bound to)
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _keep_apart(data_dir: Path, settings: Settings) -> None:
    """Raise ConfigurationError if the data directory would mix sessions of a scripted engine with those of a model.

    A scripted engine's log-probabilities are invented, and must never be trained on.
    """
    mark = data_dir / _SCRIPTED_MARK
    scripted = settings.engine.kind == EngineKind.SCRIPTED
    if scripted and not mark.exists() and (data_dir / "base-rl.sqlite3").exists():
        raise ConfigurationError(
            f"the data directory {data_dir} has sessions of a model, which must not be mixed with scripted ones; "
            "choose another place with --data-dir"
        )
    if not scripted and mark.exists():
        raise ConfigurationError(
            f"the data directory {data_dir} has sessions of a scripted engine, which must not be mixed with those of "
            "a model; choose another place with --data-dir"
        )
    if scripted:
        mark.touch()


@contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Hold the data directory, so that no other base-rl uses it. Raise AlreadyRunning or ConfigurationError."""
    try:
        make_directory(data_dir)
        file = open_file(data_dir / "lock", "wb")
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {data_dir} cannot be used ({error.strerror or error}); "
            "choose another place with --data-dir"
        ) from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            address = read_address(data_dir)
            where = f" at {address.url} (pid {address.pid})" if address else ""
            raise AlreadyRunning(
                f"a base-rl{where} uses {data_dir} already; end it, or choose another place with --data-dir"
            ) from error
        yield
