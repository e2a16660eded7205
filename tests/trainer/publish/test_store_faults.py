"""Faults of an object store during a run: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.contract import object_store
from proxy.contract.identifiers import SessionId
from tests.object_store import DENIED, SLOW_DOWN, URL, ObjectServer, object_server
from tests.trainer.real_proxy import RealProxy, real_proxy, write_real_model
from tests.trainer.tiny import InProcess
from trainer.errors import ProxyRefused, TrainerError, WeightsUnusable

TEN_MINUTES = 600.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as started:
        yield started


def weights(tmp_path: Path) -> dict[str, Any]:
    return {"url": URL, "type": "delta", "directory": tmp_path / "elsewhere", "behind": False}


def consumed(proxy: RealProxy, sessions: list[SessionId]) -> list[int | None]:
    """Return the versions that the sessions were trained into."""
    return [proxy.do(proxy.world.session_row(session)).consumed_by for session in sessions]


class Outage:
    """Ten minutes without the store from the first request of a kind on, given by its method and the beginning of its
    range. They pass as fast as the store's clients pause: this is their clock, and what they wait with."""

    def __init__(self, server: ObjectServer) -> None:
        self._server = server
        self._now = 0.0
        self._begun: float | None = None

    def begin_at(self, method: str, span: str) -> None:
        self._method = method
        self._span = span
        self._server.fault = self._fault

    def monotonic(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        self._now += seconds

    sleep = wait

    @property
    def is_over(self) -> bool:
        return self._begun is not None and self._now >= self._begun + TEN_MINUTES

    def _fault(self, method: str, _path: str, span: str) -> tuple[str, bytes] | None:
        if self._begun is None and method == self._method and span.startswith(self._span):
            self._begun = self._now
        return ("503 Slow Down", SLOW_DOWN) if self._begun is not None and not self.is_over else None


@pytest.fixture
def outage(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Outage:
    made = Outage(server)
    monkeypatch.setattr(object_store, "time", made)
    monkeypatch.setattr(object_store, "threading", SimpleNamespace(Event=lambda: made))
    monkeypatch.setattr("botocore.endpoint.time", made)
    return made


@pytest.fixture
def proxy(outage: Outage, tmp_path: Path) -> Iterator[RealProxy]:
    with real_proxy(tmp_path / "proxy", write_real_model(tmp_path / "base"), weights_url=URL) as started:
        yield started


# The trainer lists what there is, uploads a version, the proxy fetches it, and the trainer removes the mark from it.
@pytest.mark.parametrize(
    ("method", "span"),
    [("GET", ""), ("PUT", ""), ("GET", "bytes="), ("POST", "")],
    ids=["start", "upload", "fetch", "settle"],
)
def test_a_store_that_is_away_ten_minutes_delays_a_version(
    proxy: RealProxy, outage: Outage, tmp_path: Path, method: str, span: str
) -> None:
    sessions = proxy.group([1.0, 0.0, 0.5, 0.0])
    outage.begin_at(method, span)
    with proxy.trainer(weights=weights(tmp_path)) as trainer:
        trainer.parts.connection.client.pause = outage.wait
        trainer.loop.step()
        assert outage.is_over
        assert trainer.loop.head.version == 1
    assert consumed(proxy, sessions) == [1] * 4


def other_bytes(method: str, path: str, span: str) -> tuple[str, bytes] | None:
    """Return bytes that were never stored, with a right length and the store's word that all is well."""
    if method != "GET" or "safetensors" not in path:
        return None
    first, last = span.removeprefix("bytes=").split("-")
    return "206 Partial Content", bytes(int(last) + 1 - int(first))


def half_an_upload(method: str, path: str, _span: str) -> tuple[str, bytes] | None:
    return ("403 Forbidden", DENIED) if method == "PUT" and "safetensors" in path else None


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        (half_an_upload, WeightsUnusable, r"cannot upload version 1: .*AccessDenied"),
        (other_bytes, ProxyRefused, r"model\.safetensors in s3://weights/site is not the file"),
    ],
    ids=["half uploaded", "other bytes"],
)
def test_a_version_that_the_store_spoils_is_made_again_of_the_same_sessions(
    server: ObjectServer, proxy: RealProxy, tmp_path: Path, fault: Any, error: type[TrainerError], reason: str
) -> None:
    sessions = proxy.group([1.0, 0.0, 0.5, 0.0])
    server.fault = fault
    with proxy.trainer("first", weights=weights(tmp_path)) as trainer, pytest.raises(error, match=reason):
        trainer.loop.step()
    assert proxy.get("/versions")["head"] == 0
    assert consumed(proxy, sessions) == [None] * 4
    server.fault = None
    with proxy.trainer("second", weights=weights(tmp_path)) as trainer:
        trainer.parts.connection.client.release_abandoned("first")
        trainer.loop.step()
        assert trainer.loop.head.version == 1
    assert consumed(proxy, sessions) == [1] * 4
    assert trained(trainer, proxy) == sorted(sessions)


def trained(trainer: InProcess, proxy: RealProxy) -> list[str]:
    record = proxy.get(f"/steps/{trainer.loop.head.version}")
    return sorted(entry["audit"]["session_id"] for entry in record["trajectories"])
