"""`base-rl doctor`: check everything that a run needs, and print a remedy for each failure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx

from proxy.cli.addresses import is_free
from proxy.cli.local_keys import load
from proxy.cli.stack import read_address
from proxy.contract.extras import install_command
from proxy.engines.scripted.script import BUILT_IN, read_script
from proxy.settings import ConfigurationError, EngineKind, Settings

_OLDEST_PYTHON = (3, 11)
# The import names that the wheel installs.
_TOP_LEVEL = ("proxy", "trainer", "migrations", "agents_examples")

_LEAST_FREE_GIB = 2.0
_GIB = 1024**3
_PROBE_TIMEOUT_S = 60.0
_HTTP_TIMEOUT_S = 3.0

_TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
torch.ones(4, 4).matmul(torch.ones(4, 4))
print(json.dumps({"version": torch.__version__, "gpus": gpus}))
"""


class Verdict(StrEnum):
    """Result of a check. `note`: nothing is wrong, but the user should know."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check. A failure has a remedy: what to do, as a command where there is one."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str | None = None


def _ok(name: str, detail: str) -> Finding:
    return Finding(name=name, verdict=Verdict.OK, detail=detail)


def _note(name: str, detail: str) -> Finding:
    return Finding(name=name, verdict=Verdict.NOTE, detail=detail)


def _fail(name: str, detail: str, *, remedy: str) -> Finding:
    return Finding(name=name, verdict=Verdict.FAIL, detail=detail, remedy=remedy)


def examine(settings: Settings) -> Iterator[Finding]:
    """Run every check, the quick ones first, and yield their findings."""
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _cores,
        _disk,
        _port,
        _database,
        _engine,
        _torch,
        _learning,
    )
    for check in checks:
        yield from check(settings)


def _python(_: Settings) -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info >= _OLDEST_PYTHON:
        yield _ok("python", f"{version} at {sys.executable}")
    else:
        yield _fail(
            "python",
            f"{version} is too old",
            remedy="install Python 3.11 or newer and make .venv anew: rm -rf .venv && PYTHON=python3.12 make demo",
        )


def _packages(_: Settings) -> Iterator[Finding]:
    wanted = ("fastapi", "sqlalchemy", "tokenizers")
    missing = []
    found = []
    for name in wanted:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield _fail(
            "packages",
            f"not installed: {', '.join(missing)}",
            remedy=f"run, in the clone: {sys.executable} -m pip install -c constraints.txt -e .",
        )
    elif others := _other_owners():
        yield _fail(
            "packages",
            f"{', '.join(others)} installs modules under names of base-rl ({', '.join(_TOP_LEVEL)})",
            remedy="install base-rl in an environment of its own",
        )
    else:
        yield _ok("packages", ", ".join(found))


def _other_owners() -> list[str]:
    """Return the distributions besides base-rl that own one of its import names."""
    owners = importlib.metadata.packages_distributions()
    return sorted({owner for name in _TOP_LEVEL for owner in owners.get(name, ()) if owner != "base-rl"})


def _cores(_: Settings) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores >= 2:
        yield _ok("processor", f"{cores} cores")
    else:
        yield _note("processor", "1 core: engine, proxy and trainer share it, so expect half the speed")


def _disk(settings: Settings) -> Iterator[Finding]:
    place = settings.server.data_dir.resolve()
    existing = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"base-rl")
    except OSError as error:
        yield _fail(
            "disk",
            f"{existing} cannot be written: {error.strerror}",
            remedy="choose another place with --data-dir, or BASE_RL_SERVER__DATA_DIR",
        )
        return
    if free < _LEAST_FREE_GIB:
        yield _fail(
            "disk",
            f"{free:.1f} GiB free at {existing}; trajectories and weights need {_LEAST_FREE_GIB:.0f} or more",
            remedy="free some space, or choose another place with --data-dir",
        )
    else:
        yield _ok("disk", f"{free:.0f} GiB free at {existing}")


def _port(settings: Settings) -> Iterator[Finding]:
    host, port = settings.server.host, settings.server.port
    if is_free(host, port):
        yield _ok("port", f"{host}:{port} is free")
        return
    try:
        reply = httpx.get(f"http://{host}:{port}/healthz", timeout=_HTTP_TIMEOUT_S)
        ours = reply.status_code == 200 and reply.json().get("service") == "base-rl"
    except (httpx.HTTPError, ValueError):
        ours = False
    address = read_address(settings.server.data_dir)
    if ours and address is not None and address.url.endswith(f":{port}"):
        yield _note("port", f"the base-rl of this data directory is at {address.url}")
    elif ours:
        yield _fail(
            "port",
            f"a base-rl with another data directory answers on {host}:{port}",
            remedy="end it, or name another port with --port",
        )
    else:
        yield _fail(
            "port",
            f"another program listens on {host}:{port}",
            remedy="name another port with --port, or let `base-rl demo` take the next free one",
        )


def _database(settings: Settings) -> Iterator[Finding]:
    import sqlite3

    from sqlalchemy import make_url

    url = make_url(settings.database_url)
    if url.get_backend_name() != "sqlite":
        yield _postgresql(settings.database_url)
        return
    if sqlite3.sqlite_version_info < (3, 35):
        yield _fail(
            "database",
            f"SQLite {sqlite3.sqlite_version} is too old",
            remedy="use a Python that was built with SQLite 3.35 or newer",
        )
        return
    path = Path(str(url.database))
    if not path.exists():
        yield _ok("database", f"SQLite {sqlite3.sqlite_version}; {path} will be made")
        return
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_HTTP_TIMEOUT_S)
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        connection.close()
    except sqlite3.Error as error:
        answer = str(error)
    if answer == "ok":
        yield _ok("database", f"SQLite {sqlite3.sqlite_version}; {path} is sound")
    else:
        yield _fail(
            "database",
            f"{path}: {answer}",
            remedy=f"restore {path.name} from a backup, or move it away to start with an empty store",
        )


def _postgresql(url: str) -> Finding:
    from proxy.database.migrate import current, newest
    from proxy.errors import StoreUnavailable
    from proxy.settings import ConfigurationError

    try:
        revision = current(url)
    except (ConfigurationError, StoreUnavailable) as error:
        return _fail(
            "database",
            str(error),
            remedy="start the server, or correct BASE_RL_DATABASE__URL: postgresql://user:password@host:5432/database",
        )
    found = "its tables will be made" if revision is None else f"at revision {revision} of {newest()}"
    return _ok("database", f"PostgreSQL answers; {found}")


def _engine(settings: Settings) -> Iterator[Finding]:
    kind = settings.engine.kind
    if kind == EngineKind.EMBEDDED:
        yield _ok("engine", "embedded (PyTorch, in a process of its own)")
    elif kind == EngineKind.SCRIPTED:
        yield _scripted_engine(settings)
    elif kind == EngineKind.SGLANG:
        environment = settings.engine.sglang_venv
        if (environment / "bin" / "python").exists():
            yield _ok("engine", f"SGLang in {environment}")
        else:
            yield _fail(
                "engine",
                f"no SGLang in {environment}",
                remedy="make sglang-cpu, or name its environment: BASE_RL_ENGINE__SGLANG_VENV=DIR",
            )
    else:
        yield from _engine_at(kind)


def _scripted_engine(settings: Settings) -> Finding:
    script = settings.engine.script or BUILT_IN
    try:
        rules = len(read_script(script).rule)
    except ConfigurationError as error:
        return _fail("engine", str(error), remedy=f"correct {script}")
    detail = f"scripted, {rules} rules of {script}; no model runs"
    return _ok("engine", detail)


def _engine_at(url: str) -> Iterator[Finding]:
    try:
        reply = httpx.get(f"{url.rstrip('/')}/model_info", timeout=_HTTP_TIMEOUT_S)
        if reply.status_code != httpx.codes.OK:
            raise ValueError(f"/model_info answers {reply.status_code}")
        model = reply.json()["model_path"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        yield _fail(
            "engine",
            f"{url} does not answer as SGLang does: {error}",
            remedy="start the engine, or name its native port (not one of a gateway before it)",
        )
    else:
        yield _ok("engine", f"{url} serves {model}")


def _learning(settings: Settings) -> Iterator[Finding]:
    """Yield, for each run of a running base-rl, why it cannot have learnt yet; nothing if none is running."""
    data_dir = settings.server.data_dir
    address = read_address(data_dir)
    keys = load(data_dir) if address is not None else None
    if address is None or keys is None:
        return
    try:
        reply = httpx.get(
            f"{address.url}/api/v1/runs",
            headers={"authorization": f"Bearer {keys.admin_key}"},
            timeout=_HTTP_TIMEOUT_S,
        )
        runs = reply.json()["runs"] if reply.status_code == httpx.codes.OK else []
    except (httpx.HTTPError, ValueError, KeyError):
        return  # the findings about port and database have the reason
    for run in runs:
        reasons = run["not_learnt_because"]
        detail = (
            f"{run['name']}: {'; '.join(reasons)}" if reasons else f"{run['name']}: nothing keeps it from learning"
        )
        yield Finding(name="learning", verdict=Verdict.NOTE if reasons else Verdict.OK, detail=detail)


def _torch(settings: Settings) -> Iterator[Finding]:
    """Yield whether torch works, and its GPUs. A process of its own imports it: the proxy never does."""
    if importlib.util.find_spec("torch") is None:
        detail = "not installed; the embedded engine and the trainer need it"
        command = install_command("embedded", "train")
        if settings.engine.kind == EngineKind.EMBEDDED:
            yield _fail("torch", detail, remedy=command)
        else:
            yield _note("torch", f"{detail}: {command}")
        return
    try:
        result = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        found = json.loads(result.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        stderr = getattr(error, "stderr", None) or str(error)
        yield _fail("torch", str(stderr).strip().splitlines()[-1], remedy=install_command("embedded", "train"))
        return
    yield _ok("torch", str(found["version"]))
    if found["gpus"]:
        yield _ok("gpu", ", ".join(found["gpus"]))
    else:
        yield _note("gpu", "none: engine and trainer run on the processor")
