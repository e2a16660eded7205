"""The proxy as a process of its own: kills, stops and wrong configurations."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from proxy.cli.supervisor import AWAY
from proxy.database.migrate import upgrade
from proxy.server import DATABASE_AWAY
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer

RUN, ADMIN = "rl-run-chosen", "rl-admin-chosen"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def environment(directory: Path, model: Path, **more: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("BASE_RL_")},
        "BASE_RL_SERVER__PORT": "0",
        "BASE_RL_SERVER__DATA_DIR": str(directory / "data"),
        "BASE_RL_ENGINE__URL": "http://127.0.0.1:9",
        "BASE_RL_RUN__MODEL": str(model),
        "BASE_RL_BOOTSTRAP__RUN_KEY": RUN,
        "BASE_RL_BOOTSTRAP__ADMIN_KEY": ADMIN,
        **more,
    }


@contextmanager
def proxy(directory: Path, model: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A running proxy whose engine is down, and a client with the run key."""
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy"], env=environment(directory, model, **more), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"running on (http://[0-9.:]+)", line)
            if found:
                with httpx.Client(base_url=found[1], headers=bearer(RUN), timeout=30) as client:
                    yield process, client
                break
        else:
            pytest.fail("the proxy did not start: " + "".join(lines))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_an_answered_reward_survives_a_kill(tmp_path: Path, model: Path) -> None:
    with proxy(tmp_path, model) as (process, client):
        session = client.post("/v1/sessions", json={"task": "t"}).json()
        body = {"reward": 0.75, "session_id": session["id"], "idempotency_key": "k"}
        first = client.post("/v1/feedback", json=body)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert first.status_code == 201
    with proxy(tmp_path, model) as (_, client):
        own = bearer(session["api_key"])
        view = client.get(f"/v1/sessions/{session['id']}", headers=own).json()
        assert [(entry["id"], entry["value"]) for entry in view["rewards"]] == [(first.json()["rewards"][0], 0.75)]
        assert client.post("/v1/feedback", json=body).json() == first.json()


def test_without_an_engine_other_endpoints_work_and_a_stop_is_obeyed(tmp_path: Path, model: Path) -> None:
    with proxy(tmp_path, model) as (process, client):
        assert client.get("/healthz").status_code == 200
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert "engine" in ready.json()["missing"]
        assert client.post("/v1/sessions").status_code == 201
        call = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        refused = client.post("/v1/chat/completions", json=call)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        with client.stream("GET", "/api/v1/runs/policy/events", headers=bearer(ADMIN)) as events:
            assert events.status_code == 200
            next(events.iter_raw())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) in (0, -signal.SIGTERM)


def test_a_wrong_configuration_ends_with_one_clear_line(tmp_path: Path, model: Path) -> None:
    for more, expected in (
        ({"BASE_RL_SERVER__PORT": "many"}, "server.port"),
        ({"BASE_RL_RUN__MODEL": str(tmp_path)}, "base-rl: "),
        ({"BASE_RL_RUN__MODEL": ""}, "base-rl: run.model"),
        ({"BASE_RL_ENGINE__URL": "localhost:30000"}, "base-rl: engine.url"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "proxy"],
            env=environment(tmp_path, model, **more),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 2, ended.stderr
        assert expected in ended.stderr.strip().splitlines()[-1]
        assert "Traceback" not in ended.stderr


def refused(directory: Path, model: Path, status: int, **more: str) -> str:
    """Return the last line of a proxy that does not start, and check that there is no traceback."""
    ended = subprocess.run(
        [sys.executable, "-m", "proxy"],
        env=environment(directory, model, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith("base-rl: ")
    return line


def test_a_damaged_store_is_found_at_the_start(tmp_path: Path, model: Path) -> None:
    """One page in the middle was overwritten, which a start would not read by itself."""
    store = tmp_path / "data" / "base-rl.sqlite3"
    upgrade(f"sqlite:///{store}")
    content = store.read_bytes()
    page = 16384
    middle = len(content) // 2 // page * page
    store.write_bytes(content[:middle] + b"\xff" * page + content[middle + page :])
    line = refused(tmp_path, model, 2)
    assert "the trajectory store is damaged (Page " in line
    assert "restore the store from a backup" in line


def test_a_directory_that_cannot_be_written_is_a_one_line_error(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(tmp_path / "file", model, 2)
    assert f"the data directory {tmp_path / 'file' / 'data'} cannot be used (Not a directory)" in line
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "base-rl.sqlite3.lock").mkdir()
    assert "base-rl.sqlite3 cannot be written" in refused(tmp_path, model, 2)


def test_an_unreachable_database_is_one_line_and_another_exit_status(tmp_path: Path, model: Path) -> None:
    """A supervisor may start it again later with success."""
    url = "postgresql://somebody:secret@127.0.0.1:1/store?connect_timeout=2"
    assert DATABASE_AWAY == AWAY
    line = refused(tmp_path, model, DATABASE_AWAY, BASE_RL_DATABASE__URL=url)
    assert "the database postgresql://somebody:***@127.0.0.1:1/store" in line
    assert "cannot be reached" in line
    assert "secret" not in line


KNOWN_LIMITS = {
    "BASE_RL_SERVER__HEADER_TIMEOUT_SECONDS": "10",
    "BASE_RL_SERVER__MAX_CONNECTIONS": "300",
}


def resident(process: subprocess.Popen[str]) -> int:
    """Return the peak resident memory of the process in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def connections(client: httpx.Client, number: int) -> Iterator[list[socket.socket]]:
    address = (client.base_url.host, client.base_url.port or 80)
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(number)]


def test_bodies_without_a_key_are_not_taken_into_memory(tmp_path: Path, model: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n"
    with proxy(tmp_path, model) as (process, client), connections(client, 20) as opened:
        before = resident(process)
        for connection in opened:
            connection.sendall(head + b"x" * 3_000_000)
        for connection in opened:
            assert connection.recv(100).startswith(b"HTTP/1.1 401")
        assert client.get("/healthz").status_code == 200
        assert resident(process) - before < 30 << 20


def test_many_large_bodies_at_once_are_refused_before_memory_runs_out(tmp_path: Path, model: Path) -> None:
    """The bounds are the defaults in a container of 1.5 GiB, and far less than that is used."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "ab " * 9_000_000}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {RUN}\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def send(connection: socket.socket) -> bytes:
        with suppress(ConnectionError):
            connection.sendall(request)
        return connection.recv(4096)

    with proxy(tmp_path, model, BASE_RL_SERVER__MAX_BODIES_MIB="192") as (process, client):
        with connections(client, 8) as opened, ThreadPoolExecutor(8) as senders:
            answers = [answer.split(b" ", 2)[1] for answer in senders.map(send, opened)]
        assert set(answers) == {b"429", b"503"}  # 503: there is no engine
        assert client.get("/healthz").status_code == 200
        assert resident(process) < 1 << 29


def test_connections_that_ask_for_nothing_neither_stay_nor_shut_others_out(tmp_path: Path, model: Path) -> None:
    with proxy(tmp_path, model, **KNOWN_LIMITS) as (_, client), connections(client, 1000) as opened:
        for connection in opened[::2]:
            with suppress(OSError):  # its place was given to a later one
                connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        assert client.get("/healthz").status_code == 200
        for connection in opened:
            with suppress(ConnectionResetError):
                assert connection.recv(4096)[:12] in (b"", b"HTTP/1.1 408")
        text = client.get("/metrics").text
        refused = dict(re.findall(r'base_rl_connections_refused_total\{reason="(\w+)"\} (\d+)', text))
        assert int(refused["idle"]) >= 700


def test_running_out_of_file_descriptors_is_logged_and_passes(tmp_path: Path, model: Path) -> None:
    with proxy(tmp_path, model, **KNOWN_LIMITS) as (process, client):
        assert process.stderr is not None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (250, 250))
        with connections(client, 260):
            assert any("nearly out of file descriptors" in line for line in process.stderr)
        assert any("file descriptors are free again" in line for line in process.stderr)
        assert client.post("/v1/sessions", json={}).status_code == 201
