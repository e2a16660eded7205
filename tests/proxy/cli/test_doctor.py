"""`base-rl doctor`: every failure has a remedy."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.doctor import Finding, Verdict, examine
from proxy.settings import load_settings


def findings(tmp_path: Path, **overrides: dict[str, Any]) -> dict[str, Finding]:
    overrides.setdefault("server", {"port": 0})
    overrides["server"].setdefault("data_dir", tmp_path)
    found = {finding.name: finding for finding in examine(load_settings(None, overrides))}
    for finding in found.values():
        assert (finding.remedy is not None) == (finding.verdict is Verdict.FAIL), finding
    return found


@pytest.fixture(autouse=True)
def _without_starting_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the check that starts a process with torch, which takes seconds; one test runs it."""
    monkeypatch.setattr("proxy.cli.doctor._TORCH_PROBE", 'print(\'{"version": "0", "gpus": []}\')')


def test_a_sound_installation(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {"python", "packages", "processor", "disk", "port", "database", "engine", "torch", "gpu"} == found.keys()
    assert all(finding.verdict is not Verdict.FAIL for finding in found.values())


def test_torch_is_looked_at_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert findings(tmp_path)["torch"].verdict is Verdict.OK


def test_torch_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.cli.doctor._TORCH_PROBE", "import torch_that_is_not_there")
    torch = findings(tmp_path)["torch"]
    assert torch.verdict is Verdict.FAIL
    assert "torch_that_is_not_there" in torch.detail


def test_a_port_that_another_program_holds(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0)
        port = other.getsockname()[1]
        taken = findings(tmp_path, server={"port": port})["port"]
    assert taken.verdict is Verdict.FAIL
    assert "--port" in str(taken.remedy)


class _Healthz(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/healthz", "/strange/model_info") else 404)
        self.end_headers()
        self.wfile.write(b'{"status": "ok", "service": "base-rl"}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_port_that_a_base_rl_holds(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Healthz) as server:
        threading.Thread(target=server.serve_forever).start()
        port = server.server_port
        others = findings(tmp_path, server={"port": port})["port"]
        (tmp_path / "address.json").write_text(f'{{"url": "http://127.0.0.1:{port}", "pid": 1}}')
        own = findings(tmp_path, server={"port": port})["port"]
        server.shutdown()
    assert others.verdict is Verdict.FAIL
    assert "another data directory" in others.detail
    assert own.verdict is Verdict.NOTE


@pytest.mark.parametrize("path", ["", "/strange"])
def test_an_engine_that_is_another_program(tmp_path: Path, path: str) -> None:
    with HTTPServer(("127.0.0.1", 0), _Healthz) as server:
        threading.Thread(target=server.serve_forever).start()
        engine = findings(tmp_path, engine={"kind": f"http://127.0.0.1:{server.server_port}{path}"})["engine"]
        server.shutdown()
    assert engine.verdict is Verdict.FAIL
    assert "\n" not in engine.detail


def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    assert findings(tmp_path, engine={"kind": "http://127.0.0.1:9"})["engine"].verdict is Verdict.FAIL


def test_sglang_that_is_not_installed(tmp_path: Path) -> None:
    engine = findings(tmp_path, engine={"kind": "sglang", "sglang_venv": tmp_path / "none"})["engine"]
    assert engine.verdict is Verdict.FAIL
    assert "make sglang-cpu" in str(engine.remedy)


def test_a_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "base-rl.sqlite3").write_bytes(b"this is no database, but it is long enough to be looked at" * 20)
    database = findings(tmp_path)["database"]
    assert database.verdict is Verdict.FAIL
    assert "not a database" in database.detail


def test_a_data_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = findings(tmp_path, server={"port": 0, "data_dir": tmp_path / "file" / "data"})["disk"]
    assert disk.verdict is Verdict.FAIL
    assert "--data-dir" in str(disk.remedy)


def test_a_script_is_read(tmp_path: Path) -> None:
    assert "2 rules" in findings(tmp_path, engine={"kind": "scripted"})["engine"].detail
    script = tmp_path / "script.toml"
    script.write_text("[[rule]]\n")
    engine = findings(tmp_path, engine={"kind": "scripted", "script": script})["engine"]
    assert engine.verdict is Verdict.FAIL
    assert "rule 1" in engine.detail
