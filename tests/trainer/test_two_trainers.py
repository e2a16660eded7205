"""Two trainers on one run, at the real proxy: nothing is trained twice, and the slower one continues from the
other's version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.real_proxy import RealProxy, real_proxy, write_real_model
from tests.trainer.tiny import InProcess


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RealProxy]:
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as started:
        yield started


def states(proxy: RealProxy) -> dict[str, str]:
    sessions: list[dict[str, Any]] = proxy.get("/sessions?limit=200")["sessions"]
    return {session["id"]: session["training"] for session in sessions}


def step_of(proxy: RealProxy, trainer: InProcess) -> dict[str, Any]:
    """Return the record of the trainer's newest version."""
    view: dict[str, Any] = proxy.get(f"/steps/{trainer.loop.head.version}")
    return view


def batch(proxy: RealProxy, version: int) -> list[str]:
    """Offer eight sessions in two groups."""
    return [*proxy.group([1.0, 0.0, 0.5, 0.0], version=version), *proxy.group([0.0, 1.0, 1.0, 0.0], version=version)]


def test_claims_are_disjoint_and_the_second_committer_starts_again(proxy: RealProxy) -> None:
    ours, theirs = batch(proxy, 0), batch(proxy, 0)
    with proxy.trainer("one") as first, proxy.trainer("two") as second:
        slow = second.claims.take(0)
        assert slow is not None
        assert sorted(t.session_id for group in slow.groups for t in group.trajectories) == sorted(ours)
        first.loop.step()
        assert first.loop.head.version == 1
        assert {state: list(states(proxy).values()).count(state) for state in ("leased", "consumed")} == {
            "leased": 8,
            "consumed": 8,
        }
        trained = {entry["audit"]["session_id"] for entry in step_of(proxy, first)["trajectories"]}
        assert trained == set(theirs)

        batch(proxy, 1)
        second.loop.step()  # finds that the head has moved, releases everything, and reloads
        assert second.loop.head.version == 1
        assert all((first.weights()[name] == weight).all() for name, weight in second.weights().items())
        assert "leased" not in states(proxy).values()
        second.loop.step()
        assert second.loop.head.version == 2
        assert {entry["audit"]["session_id"] for entry in step_of(proxy, second)["trajectories"]} == set(ours)


def test_only_one_of_two_commits_on_one_head_succeeds(proxy: RealProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers have computed their step when the first one commits."""
    batch(proxy, 0)
    batch(proxy, 0)
    with proxy.trainer("one") as first, proxy.trainer("two") as second:
        stage = second.loop.versions.publisher.stage

        def overtaken(*arguments: Any, **options: Any) -> Any:
            staged = stage(*arguments, **options)
            if first.loop.head.version == 0:
                first.loop.step()
            return staged

        monkeypatch.setattr(second.loop.versions.publisher, "stage", overtaken)
        second.loop.step()
        assert (first.loop.head.version, second.loop.head.version) == (1, 1)
        assert list(states(proxy).values()).count("ready") == 8
        assert len(list(proxy.weights.glob("*/v*"))) == 1
        second.loop.step()
        assert second.loop.head.version == 2
        assert set(states(proxy).values()) == {"consumed"}
        claims = proxy.get("/claims")["claims"]
        assert sorted((claim["state"], claim["process"]) for claim in claims) == [
            ("committed", "one"),
            ("committed", "two"),
            ("released", "two"),
        ]
