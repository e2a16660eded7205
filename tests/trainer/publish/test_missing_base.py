"""A version whose base has disappeared: the trainer says so, and the run goes on from a version that is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.contract.delta import is_delta
from proxy.contract.policy import Head
from tests.trainer.real_proxy import ADMIN, RUN, RealProxy, real_proxy, write_real_model
from trainer.errors import WeightsUnusable

WEIGHTS = {"type": "delta", "full_every": 4, "behind": False}


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RealProxy]:
    with real_proxy(tmp_path / "proxy", write_real_model(tmp_path / "base")) as started:
        yield started


def directory(head: Head) -> Path:
    assert head.weights is not None
    return Path(head.weights.uri)


def test_the_run_goes_on_from_the_last_version_that_can_be_made(proxy: RealProxy, tmp_path: Path) -> None:
    sessions = []
    heads = []
    with proxy.trainer("first", weights=WEIGHTS) as trainer:
        for version in range(3):
            sessions += proxy.group([1.0, 0.0, 0.5, 0.0], version=version)
            trainer.loop.step()
            heads.append(trainer.loop.head)
    assert [head.weights is not None and is_delta(head.weights) for head in heads] == [False, True, True]
    proxy.get_when("/versions", lambda answer: answer["serving"] == 3)
    shutil.rmtree(directory(heads[1]))

    with (
        pytest.raises(WeightsUnusable, match=rf"{directory(heads[1]).name}.*missing"),
        proxy.trainer("second", weights=WEIGHTS),
    ):
        pass
    assert proxy.get("/versions")["serving"] == 3, "engines have the whole files"
    answer = httpx.post(
        f"{proxy.url}/api/v1/runs/{RUN}/versions/rollback",
        json={"reason": "a base was deleted", "to": 1},
        headers={"authorization": f"Bearer {ADMIN}"},
    )
    assert answer.status_code == 200, answer.text
    more = proxy.group([1.0, 0.0, 0.5, 0.0], version=1)
    with proxy.trainer("third", weights=WEIGHTS) as trainer:
        assert trainer.loop.head.version == 1
        trainer.loop.step()
        assert trainer.loop.head.version == 4
        assert trainer.loop.head.weights is not None
        assert not is_delta(trainer.loop.head.weights), "the first version after a start is whole"
    consumed = [proxy.do(proxy.world.session_row(session)).consumed_by for session in [*sessions, *more]]
    assert consumed == [version for version in (1, 2, 3, 4) for _ in range(4)]
    proxy.get_when("/versions", lambda found: found["serving"] == 4)
