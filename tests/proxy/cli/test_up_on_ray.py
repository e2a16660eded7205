"""`base-rl up --ray` before anything is placed: what it shows, and what it refuses."""

from __future__ import annotations

import importlib.util
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxy.cli.console import Refused
from proxy.cli.local_keys import load_or_make
from proxy.cli.operations import ProxyUnreachable
from proxy.cli.up import UpOptions
from proxy.cli.up_on_ray import run_up_on_ray
from proxy.settings import ConfigurationError


def configuration(place: Path, server: str = "") -> Path:
    data_dir = f'data_dir = "{place / "data"}"'
    rest = '[engine]\nreplicas = 2\n[run]\nname = "shop"\nmodel = "m"\n'
    (place / "run.toml").write_text(f"[server]\n{data_dir}\n{server}\n{rest}")
    return place / "run.toml"


async def up(config: Path | None, address: str = "auto", **options: Any) -> str:
    out = Console(file=io.StringIO(), width=300)
    given: dict[str, Any] = {"overrides": {}, "trainer": False, "seed": None, "dry_run": False} | options
    assert await run_up_on_ray(address, UpOptions(config=config, **given), out) == 0
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    return text


async def test_a_dry_run_shows_actors_and_bundles_without_ray(tmp_path: Path) -> None:
    config = configuration(tmp_path, 'public_url = "http://head:8080"')
    shown = json.loads(await up(config, dry_run=True))
    assert [(group["name"], group["bundles"]) for group in shown] == [
        ("shop-ray-1", [{"CPU": 1}]),
        ("shop-ray-2", [{"CPU": 1}]),
    ]
    command = shown[1]["actors"]["shop-ray-2"]
    assert {"serve", "shop-ray-2", str(config), "http://head:8080"} <= set(command)


async def test_the_address_of_the_proxy_is_needed(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"server\.public_url: set it"):
        await up(configuration(tmp_path), dry_run=True)


async def test_options_that_the_nodes_would_not_see_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"with --config$"):
        await up(None)
    with pytest.raises(Refused, match=r"--config instead of run\.model, --seed"):
        await up(configuration(tmp_path), overrides={"run": {"model": "other"}}, seed=3)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
async def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    load_or_make(tmp_path / "data")
    with pytest.raises(ConfigurationError, match=r"cannot start without ray: run.*\[ray\]"):
        await up(configuration(tmp_path, 'public_url = "http://head:8080"'))


async def test_missing_keys_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASE_RL_ADMIN_KEY", raising=False)
    with pytest.raises(Refused, match="BASE_RL_ADMIN_KEY"):
        await up(configuration(tmp_path, 'public_url = "http://head:8080"'))


async def test_a_proxy_that_is_away_is_named_before_anything_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_make(tmp_path / "data")
    monkeypatch.setattr("proxy.cli.up_on_ray.require_extras", lambda *_: None)
    with pytest.raises(ProxyUnreachable, match=r"127\.0\.0\.1:9"):
        await up(configuration(tmp_path, 'public_url = "http://127.0.0.1:9"'))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:9", r"no Ray cluster at 127\.0\.0\.1:9 \(.*refused.*\): start one"),
        ("127.0.0.1:99999", r"no Ray cluster at 127\.0\.0\.1:99999"),
        ("ray://head:10001", "Ray Client is not supported"),
    ],
)
async def test_an_address_without_a_cluster_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, reason: str
) -> None:
    load_or_make(tmp_path / "data")
    monkeypatch.setattr("proxy.cli.up_on_ray.require_extras", lambda *_: None)
    with served() as url, pytest.raises(Refused, match=reason):
        await up(configuration(tmp_path, f'public_url = "{url}"'), address)


@contextmanager
def served() -> Iterator[str]:
    """Serve an empty pool of engines, as a proxy does."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"engines": []}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
