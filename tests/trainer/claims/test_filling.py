"""Dynamic sampling against an in-memory proxy: groups without signal are left out, and further claims replace them
exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Condition
from typing import Any

import hypothesis
import pytest
import structlog.testing
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.claim import ClaimedBatch
from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.test_loop import same
from tests.trainer.test_proxy_client import client_of
from tests.trainer.tiny import build, group_of, settings, trajectory, turn
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.assembly import Shared, connect
from trainer.batching.preparation import Prepared, prepare
from trainer.claims.filling import BatchSource
from trainer.claims.leased import MOST_KEPT
from trainer.config import AlgorithmSettings, TrainerSettings
from trainer.errors import ClaimLost


def group(*rewards: float, version: int = 0, name: str = "grp") -> TrajectoryGroup:
    return group_of([trajectory(turn([4, 5], version=version), reward=reward) for reward in rewards], name)


def silent(count: int) -> list[TrajectoryGroup]:
    return [group(1.0, 1.0, name=f"silent{number}") for number in range(count)]


def telling(count: int) -> list[TrajectoryGroup]:
    return [group(0.0, 1.0, name=f"telling{number}") for number in range(count)]


def filling(directory: Path, **changes: Any) -> TrainerSettings:
    """Return settings with batches of four trajectories."""
    batch = {"trajectories": 4, "wait_seconds": 0.05, **changes.pop("batch", {})}
    return settings(directory, batch=batch, algorithm={"fill": True, **changes.pop("algorithm", {})}, **changes)


def skipped(audits: Sequence[Any]) -> list[str]:
    return [audit.skipped or "trained" for audit in audits]


def test_the_batch_is_filled_up_from_what_waits(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(1), *silent(2), *telling(3)])
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    (commit,) = proxy.commits
    assert commit.claim_ids == tuple(proxy.claimed)
    assert len(proxy.claimed) == 4  # two groups, then one at a time: each claim requests only what is missing
    assert sorted(skipped(commit.step.audit)) == ["no_signal"] * 6 + ["trained"] * 4
    assert set(proxy.consumed.values()) == {1}
    assert len(proxy.consumed) == 10
    assert len(proxy.waiting) == 2
    told = commit.step.metrics
    assert (told["left_out"], told["extra_claims"], told["skipped_no_signal"]) == (6, 3, 6)
    assert told["without_signal_share"] == 0.6
    assert commit.step.inputs is not None
    assert commit.step.inputs.taken_together == (tuple(proxy.claimed),)


@pytest.mark.parametrize("fill", [True, False])
def test_each_batch_is_prepared_once(
    start: Start, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: bool
) -> None:
    """The preparation that counted the signal of the filled batch is the one that is trained."""
    prepared: list[int] = []

    def counted(batch: ClaimedBatch, *arguments: Any) -> Prepared:
        prepared.append(batch.trajectory_count)
        return prepare(batch, *arguments)

    monkeypatch.setattr("trainer.claims.filling.prepare", counted)
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(2)])
    trainer = start(proxy, filling(tmp_path, algorithm={"fill": fill}))
    trainer.loop.resume()
    trainer.loop.step()
    assert len(proxy.commits) == 1
    assert prepared == ([4, 6] if fill else [4])


def test_without_fill_nothing_more_is_claimed(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(3)])
    trainer = start(proxy, filling(tmp_path, algorithm={"fill": False}))
    trainer.loop.resume()
    trainer.loop.step()
    assert len(proxy.claimed) == 1
    assert skipped(proxy.commits[0].step.audit) == ["trained"] * 4


def test_leaving_out_changes_no_gradient(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """A filled batch gives the same weights as its groups with signal alone."""
    weights = []
    for groups in ([*silent(2), *telling(2)], telling(2)):
        proxy = TrainingProxy(base_model=str(tiny_model))
        proxy.offer(groups)
        trainer = start(proxy, filling(tmp_path / str(len(groups))))
        trainer.loop.resume()
        trainer.loop.step()
        weights.append(trainer.weights())
    assert same(*weights)


def test_an_incomplete_batch_is_used_when_nothing_more_arrives(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(1)])
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    with structlog.testing.capture_logs() as logs:
        trainer.loop.step()
    assert sorted(skipped(proxy.commits[0].step.audit)) == ["no_signal", "no_signal", "trained", "trained"]
    (line,) = [line for line in logs if line["event"] == "batch filled up"]
    assert (line["extra_claims"], line["with_signal"], line["wanted"]) == (0, 2, 4)


def test_the_number_of_held_claims_never_exceeds_the_bound(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """If no group has a signal, the claims are consumed by a version of unchanged weights."""
    proxy = TrainingProxy(base_model=str(tiny_model), source=lambda version: group(1.0, 1.0, version=version))
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    before = trainer.weights()
    trainer.loop.step()
    (commit,) = proxy.commits
    assert len(commit.claim_ids) == MOST_KEPT
    assert set(skipped(commit.step.audit)) == {"no_signal"}
    assert set(proxy.consumed.values()) == {1}
    assert proxy.leases == {}
    assert same(trainer.weights(), before)


def test_a_held_batch_of_several_claims_is_committed_with_the_next_version(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer(silent(3))
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    assert proxy.commits == []
    kept = tuple(proxy.claimed)
    assert len(kept) == 2
    proxy.offer([*silent(1), *telling(2)])
    trainer.loop.step()
    (commit,) = proxy.commits
    fresh = tuple(proxy.claimed[len(kept) :])
    assert commit.claim_ids == (*kept, *fresh)
    assert set(proxy.consumed.values()) == {1}
    assert commit.step.inputs is not None
    assert commit.step.inputs.taken_together == (kept, fresh)
    assert commit.step.inputs.trained_claim == fresh[0]
    assert trainer.claims.joined_to(kept[0]) == ()


def test_a_lost_lease_of_any_claim_discards_the_whole_batch(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(2), *silent(1)])
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    means = trainer.loop.means
    batch = trainer.loop.take(0, means)
    assert batch is not None
    assert batch.claim_id is not None
    (extra,) = trainer.claims.joined_to(batch.claim_id)
    trainer.leases.drop(extra)
    with pytest.raises(ClaimLost, match=extra):
        trainer.claims.begin_commit(batch.claim_id, ())
    trainer.loop.resume()
    assert trainer.claims.joined_to(batch.claim_id) == ()


def test_a_process_that_dies_between_the_claims_leaves_nothing_consumed(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    """The next process gets the same sessions, and each is consumed once."""
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(2)])
    dead = start(proxy, filling(tmp_path))
    dead.loop.resume()
    assert dead.loop.take(0, dead.loop.means) is not None
    assert len(proxy.leases) == 2
    for lease in proxy.leases.values():
        lease.expires_at = 0.0  # nobody renews them
    dead.parts.ending.close()
    again = start(proxy, filling(tmp_path))
    again.loop.resume()
    again.loop.step()
    assert set(proxy.consumed.values()) == {1}
    assert len(proxy.consumed) == 6


def test_a_proxy_that_stops_answering_leaves_the_batch_unchanged(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(3)])
    trainer = start(proxy, filling(tmp_path))
    trainer.loop.resume()
    trainer.parts.connection.client.patience = 0.0
    proxy_answers = proxy.handle

    def handle(method: str, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        if path.endswith("/claims") and proxy.claimed:
            raise ConnectionAbortedError("the proxy is gone")
        return proxy_answers(method, path, authorization, body)

    proxy.handle = handle  # type: ignore[method-assign]
    trainer.loop.step()
    assert sorted(skipped(proxy.commits[0].step.audit)) == ["no_signal", "no_signal", "trained", "trained"]


def test_prefetched_batches_are_filled_too(tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([*silent(1), *telling(2)])
    changed = Condition()
    trainer = build(proxy, filling(tmp_path), Shared(torch.device("cpu"), changed))
    try:
        trainer.loop.resume()
        prefetcher = trainer.parts.prefetcher
        assert prefetcher is not None
        prefetcher.ask(0, trainer.loop.means)
        with changed:
            assert changed.wait_for(lambda: prefetcher.is_ready, timeout=60)
        trainer.loop.step()
        assert sorted(skipped(proxy.commits[0].step.audit)) == ["no_signal"] * 2 + ["trained"] * 4
        assert len(proxy.commits[0].claim_ids) == 2
    finally:
        trainer.parts.ending.close()


def test_rewards_made_equal_by_the_penalty_are_logged(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """The log names the cause and the remedy."""
    proxy = TrainingProxy(base_model=str(tiny_model))
    long, short = turn([4] * 8), turn([4] * 2)
    proxy.offer([group_of([trajectory(long, reward=1.0), trajectory(short, reward=0.0)])])
    parts = {"preset": "dapo", "overlong_tokens": 8, "overlong_tail": 4}
    trainer = start(proxy, filling(tmp_path, algorithm=parts, batch={"trajectories": 2}))
    trainer.loop.resume()
    with structlog.testing.capture_logs() as logs:
        trainer.loop.step()
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert "made them equal" in line["event"]
    assert line["groups"] == 1
    assert len(proxy.leases) == 1


def test_a_changed_bound_is_logged_once(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), max_new_tokens=64)
    trainer = start(proxy, filling(tmp_path, algorithm={"preset": "dapo"}))
    trainer.loop.resume()
    with structlog.testing.capture_logs() as logs:
        for bound in (64, 128, 128):
            proxy.max_new_tokens = bound
            proxy.offer(telling(2))
            trainer.loop.step()
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert "run.max_new_tokens has changed" in line["event"]
    assert (line["max_new_tokens"], line["overlong_tokens"]) == (128, 64)


@hypothesis.settings(max_examples=40, deadline=None)
@given(
    offered=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=24),
    want=st.integers(1, 8),
    kept=st.integers(0, MOST_KEPT - 1),
)
def test_a_batch_has_the_requested_number_or_all_available(
    offered: list[tuple[int, bool]], want: int, kept: int
) -> None:
    """A batch contains no session twice, no more claims than the bound, and at most one group more with a signal than
    requested."""
    groups = [
        group_of([trajectory(turn([4]), reward=float(told and not index)) for index in range(size + 1)], f"g{number}")
        for number, (size, told) in enumerate(offered)
    ]
    proxy = TrainingProxy(base_model="m")
    client, _ = client_of(proxy.transport())
    configured = settings(Path("unused"), batch={"trajectories": want, "wait_seconds": 0.001})
    algorithm = resolve(AlgorithmSettings(fill=True))
    means = RunningMeans.fresh(0.9)
    with ExitStack() as ending:
        claims = connect(client, configured, "a-process", ending).claims
        for number in range(kept):
            proxy.offer([group(1.0, name=f"kept{number}")])
            own = claims.take(0)
            assert own is not None
            assert own.claim_id is not None
            claims.keep(own.claim_id, ())
        proxy.offer(groups)
        batch = BatchSource(claims, configured.batch, algorithm, 64).take(0, means)
    if batch is None:
        assert not groups
        return
    prepared = prepare(batch, 0, configured.batch, algorithm, means, 64)
    found = len(prepared.batch.trajectories)
    ids = [one.session_id for each in batch.groups for one in each.trajectories]
    assert len(set(ids)) == len(ids)
    assert len(proxy.claimed) <= MOST_KEPT
    largest = max(len(each.trajectories) for each in groups)
    assert found < want + largest
    if found < want:
        assert len(proxy.claimed) == MOST_KEPT or not proxy.waiting
