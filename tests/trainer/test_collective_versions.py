"""Versions that a trainer sends to engines: served before the disk has them; lost ones are made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import real_proxy, write_real_model
from tests.trainer.test_behind import batches
from tests.trainer.test_memory_versions import Killed, embedded_engine
from tests.trainer.tiny import settings
from trainer.publish.collective import CollectivePublisher

SENT = {"type": "collective"}


def test_versions_are_those_of_the_disk(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    found: list[list[str]] = []
    batch = {"trajectories": 4, "at_least": 4, "wait_seconds": 0.2, "max_staleness": 8}
    for weights in ({}, SENT, {**SENT, "behind": None}):
        proxy = TrainingProxy(base_model=str(tiny_model))
        batches(proxy, 4)
        trainer = start(proxy, settings(tmp_path / f"weights-{len(found)}", batch=batch, weights=weights))
        trainer.loop.resume()
        for _ in range(4):
            trainer.loop.step()
        trainer.loop.step()  # finds no batch, and waits for the version behind
        assert proxy.is_saved
        assert proxy.leases == {}
        made = [commit.weights for commit in proxy.commits] if weights == {} else proxy.saved
        assert all(Path(each.uri).is_dir() for each in made)
        found.append([each.sha256 for each in made])
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


@pytest.mark.timeout(300)
def test_a_real_engine_serves_what_a_dying_trainer_sent_until_it_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_real_model(tmp_path / "base")

    with embedded_engine(base) as url, real_proxy(tmp_path, base, url) as proxy:

        def die(*_: Any, **__: Any) -> None:
            proxy.get_when("/versions", lambda answer: answer["head"] == answer["serving"] == 2)
            raise Killed

        sessions = [*proxy.group([1.0, 0.0]), *proxy.group([0.0, 1.0])]
        batch = {"trajectories": 2}
        with proxy.trainer(weights=SENT, batch=batch) as first:
            first.loop.step()
            proxy.get_when("/versions", lambda answer: answer["serving"] == 1)
            with monkeypatch.context() as patched:
                patched.setattr(CollectivePublisher, "_write_to", die)
                with pytest.raises(Killed):
                    first.loop.step()
            label = httpx.get(f"{url}/model_info").json()["weight_version"]
            assert label.endswith("@2")
            assert len(list((tmp_path / "weights").glob("run_*/v*"))) == 1
        with proxy.trainer("another", weights=SENT, batch=batch) as second:
            assert second.loop.head.version == 1
            proxy.get_when("/versions", lambda answer: answer["head"] == answer["serving"] == 1)
            second.parts.connection.client.release_abandoned("a-process")
            second.loop.step()
            found = proxy.get_when("/versions", lambda answer: answer["versions"][0]["state"] == "serving")
        states = {each["version"]: each["state"] for each in found["versions"]}
        assert states == {3: "serving", 2: "rolled_back", 1: "retired", 0: "retired"}
        consumed = [proxy.do(proxy.world.session_row(session)).consumed_by for session in sessions]
        assert sorted(consumed) == [1, 1, 3, 3]
