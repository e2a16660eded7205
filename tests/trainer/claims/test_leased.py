from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import structlog.testing

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.test_proxy_client import REQUEST, client_of
from tests.trainer.tiny import group_of, settings, trajectory, turn
from trainer.assembly import Connection, connect

PROCESS = "a-process"


@pytest.fixture
def proxy() -> TrainingProxy:
    proxy = TrainingProxy(base_model="m")
    proxy.offer([group_of([trajectory(turn([4]))], name) for name in ("one", "two", "three")])
    return proxy


def connected(proxy: TrainingProxy, directory: Path, ending: ExitStack) -> Connection:
    client, _ = client_of(proxy.transport())
    return connect(client, settings(directory, batch={"trajectories": 1}), PROCESS, ending)


def test_the_end_releases_claims_whose_answer_was_lost(proxy: TrainingProxy, tmp_path: Path) -> None:
    """A claim whose answer was lost is released together with the current one; another process's claim is not."""
    with ExitStack() as ending:
        connection = connected(proxy, tmp_path, ending)
        for process in (PROCESS, "another"):
            connection.client.claim(msgspec.structs.replace(REQUEST, process=process))
        assert connection.claims.take(0) is not None
        unseen, others, seen = proxy.claimed
        connection.claims.leave()
        assert set(proxy.released) == {unseen, seen}
        assert list(proxy.leases) == [others]
        assert connection.leases.held() == []


def test_the_end_does_not_wait_for_a_proxy(proxy: TrainingProxy, tmp_path: Path) -> None:
    """Current claims are named if they cannot be released; without any, nothing is logged."""
    with ExitStack() as ending:
        claims = connected(proxy, tmp_path, ending).claims
        claims.take(0)
        proxy.outage = 2
        with structlog.testing.capture_logs() as logs:
            claims.leave()
            claims.leave()
    assert [(line["event"], line["claims"]) for line in logs] == [
        ("claims not released, their leases will expire", proxy.claimed)
    ]
