"""Replay past steps from the real proxy's records: the weights are equal bit for bit, or the reason is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import select

from proxy.contract.claim import decode
from proxy.contract.replay import StepBatch
from proxy.database.tables import Base, ClaimedSessionRow, PolicyVersionRow, SessionRow
from tests.trainer.real_proxy import ADMIN, RUN, TRAINER, RealProxy, real_proxy, write_real_model
from tests.trainer.serve_trainer import forked_trainer
from trainer.replay.command import DIFFERENT, IMPOSSIBLE, main

STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealProxy]:
    """Make a run whose steps differ in everything that affects a replay.

    Step 1: groups and single sessions, which use the running mean. 2: two held claims first. 3: by a restarted
    trainer; some trajectories are skipped, one of them as stale. 4: turn rewards, and older versions. 5: held claims
    alone, with unchanged weights. 6: another configuration. 7: the first with a critic. 8: continued with it.
    """
    directory = tmp_path_factory.mktemp("replay")
    with real_proxy(directory, write_real_model(directory / "base")) as proxy:
        _train(proxy)
        yield proxy


def _train(proxy: RealProxy) -> None:
    strict = {"max_staleness": 1}
    with pytest.MonkeyPatch.context() as patch, proxy.trainer(batch=strict) as trainer:
        patch.setattr("trainer.claims.leased.MOST_KEPT", 3)
        mixed(proxy, version=0)
        trainer.loop.step()
        for reward in (0.75, 0.5):
            without_signal(proxy, reward, version=1)
            trainer.loop.step()
        assert trainer.loop.head.version == 1
        mixed(proxy, version=1)
        trainer.loop.step()
        assert trainer.loop.head.version == 2

    with pytest.MonkeyPatch.context() as patch, proxy.trainer(batch=strict) as trainer:
        patch.setattr("trainer.claims.leased.MOST_KEPT", 3)
        proxy.group([1.0, 0.0, 0.5], version=2)
        proxy.session(1.0, version=2)
        proxy.session(1.0, version=2, highest=64 + 32)  # ids that the model does not have
        late = proxy.session(0.0, version=0)
        proxy.set_session(late, oldest_version=2)  # the trainer notices this by itself
        for reward in (0.0, 1.0):
            proxy.session(reward, version=2)
        trainer.loop.step()
        for session_reward in (1.0, 0.0, None, None):
            proxy.session(session_reward, version=2, turn_reward=0.5)
        proxy.group([1.0, 1.0, 0.0, 0.0], version=3)
        trainer.loop.step()
        for reward in (0.25, 0.5, 0.75):
            without_signal(proxy, reward, version=4)
            trainer.loop.step()
        assert trainer.loop.head.version == 5

    other = {"baseline": "batch_mean", "scale": "none"}
    with proxy.trainer(algorithm=other, batch={"packing": "packed", "row_tokens": 32}, seed=7) as trainer:
        mixed(proxy, version=5)
        trainer.loop.step()
        assert trainer.loop.head.version == 6

    for version in (6, 7):
        with proxy.trainer(algorithm={"preset": "ppo"}, weights={"keep_optimizer_states": 4}) as trainer:
            mixed(proxy, version=version)
            trainer.loop.step()
            assert trainer.loop.head.version == version + 1
            assert trainer.learner.critic is not None
            assert trainer.learner.critic.steps == 2 * (version - 5)


def mixed(proxy: RealProxy, *, version: int) -> None:
    """Offer a batch of eight: a group, and single sessions."""
    proxy.group([1.0, 0.0, 0.5, 0.0], version=version)
    for reward in (1.0, -1.0, 0.25, 2.0):
        proxy.session(reward, version=version)


def without_signal(proxy: RealProxy, reward: float, *, version: int) -> None:
    for _ in range(2):
        proxy.group([reward] * 4, version=version)


def replay(proxy: RealProxy, version: int, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    """Run a replay. Return (exit status, verdict)."""
    status = main([RUN, str(version), "--proxy", proxy.url, "--json", *options])
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]  # others: the log
    return status, json.loads(answers[0])


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the changes that the command makes to its process, since it is meant for a process of its own."""
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", TRAINER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("version", range(1, STEPS + 1))
def test_every_step_is_replayed_bit_for_bit(
    trained: RealProxy, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, verdict = replay(trained, version, capsys, "--verify")
    assert status == 0
    assert verdict["identical"]
    assert verdict["committed_sha256"] == verdict["replayed_sha256"]
    assert (verdict["conditions"], verdict["tensors"]) == ([], [])
    if version != 5:
        assert verdict["committed_loss"] == verdict["replayed_loss"]
        assert verdict["committed_gradient_norm"] == verdict["replayed_gradient_norm"]


def test_the_replayed_run_covers_all_kinds_of_steps(trained: RealProxy) -> None:
    """Without these differences the previous test would prove little."""
    steps = {version: trained.get(f"/steps/{version}") for version in range(1, STEPS + 1)}
    assert [len(steps[version]["claim_ids"]) for version in steps] == [1, 3, 1, 1, 3, 1, 1, 1]
    skipped = {entry["audit"]["skipped"] for entry in steps[3]["trajectories"]}
    assert skipped == {None, "stale", "malformed"}
    assert steps[5]["step"]["weights"]["sha256"] == steps[4]["step"]["weights"]["sha256"]
    assert steps[1]["step"]["metrics"]["baseline_fallbacks"] > 0
    assert len({steps[version]["config_hash"] for version in steps}) == 3
    assert steps[8]["step"]["metrics"]["value_mean"] != 0


def batch_of(proxy: RealProxy, version: int) -> StepBatch:
    answer = httpx.get(
        f"{proxy.url}/api/v1/runs/{RUN}/steps/{version}/batch", headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert answer.status_code == 200, answer.text
    return decode(answer.content, StepBatch)


@contextmanager
def changed(proxy: RealProxy, table: type[Base], condition: Any, **values: Any) -> Iterator[None]:
    """Change the store's record for the duration of the block."""

    async def read() -> dict[str, Any]:
        row = await proxy.world.database.read(
            lambda connection: connection.execute(select(table.__table__).where(condition)).first()
        )
        assert row is not None
        return {name: getattr(row, name) for name in values}

    before = proxy.do(read())
    proxy.change(table, condition, **values)
    try:
        yield
    finally:
        proxy.change(table, condition, **before)


def test_rewards_after_training_change_no_replay(trained: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    before = batch_of(trained, 4)
    trajectory = before.claims[0].groups[0].trajectories[0]

    async def revise() -> None:
        world = trained.world
        await world.reward(trajectory.session_id, -5.0, after_training=True)
        await world.reward(
            trajectory.session_id, 9.0, turn_id=trajectory.turns[1].id, final=False, after_training=True
        )
        await world.turn(trajectory.session_id, conversation="later")

    trained.do(revise())
    assert batch_of(trained, 4) == before
    status, verdict = replay(trained, 4, capsys, "--verify")
    assert (status, verdict["identical"]) == (0, True)
    view = trained.get("/steps/4")
    (entry,) = (e for e in view["trajectories"] if e["audit"]["session_id"] == trajectory.session_id)
    assert [(used["value"], used["value_now"]) for used in entry["rewards"]] == [(0.5, 9.0), (1.0, -5.0)]


def test_a_changed_reward_changes_the_weights_and_the_verdict_names_them(
    trained: RealProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    session = batch_of(trained, 6).claims[0].groups[0].trajectories[0].session_id
    with changed(trained, ClaimedSessionRow, ClaimedSessionRow.session_id == session, reward=-3.0):
        status, verdict = replay(trained, 6, capsys, "--verify")
        assert status == DIFFERENT
        assert not verdict["identical"]
        assert verdict["compared"]
        assert {tensor["name"] for tensor in verdict["tensors"]} >= {"model.embed_tokens.weight"}
        assert all(0 < tensor["elements"] <= tensor["of"] and tensor["largest"] > 0 for tensor in verdict["tensors"])
        assert replay(trained, 6, capsys)[0] == 0
        assert main([RUN, "6", "--proxy", trained.url]) == 0
        said = capsys.readouterr().out
        assert "version 6 of policy: differs" in said
        assert "model.embed_tokens.weight" in said
        assert "conditions      the same as then" in said


def test_a_held_claim_moved_the_running_means_of_a_step(
    trained: RealProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = batch_of(trained, 2).claims[0].groups[0].trajectories
    with changed(trained, ClaimedSessionRow, ClaimedSessionRow.session_id == kept[0].session_id, reward=9.0):
        assert replay(trained, 2, capsys, "--verify")[0] == DIFFERENT
    assert replay(trained, 2, capsys, "--verify")[0] == 0


def test_changed_conditions_are_named(trained: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    session = batch_of(trained, 6).claims[0].groups[0].trajectories[0].session_id
    inputs = trained.get("/steps/6")["inputs"]
    older = {**inputs, "conditions": {**inputs["conditions"], "torch": "1.0.0"}}
    with (
        changed(trained, PolicyVersionRow, PolicyVersionRow.version == 6, inputs=older),
        changed(trained, ClaimedSessionRow, ClaimedSessionRow.session_id == session, reward=-3.0),
    ):
        _, verdict = replay(trained, 6, capsys)
    assert [(each["name"], each["then"]) for each in verdict["conditions"]] == [("torch", "1.0.0")]


def test_a_step_recorded_without_a_packing_is_replayed_packed(
    trained: RealProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = trained.get("/steps/6")["inputs"]
    config = {**inputs["config"], "batch": {**inputs["config"]["batch"]}}
    assert config["batch"].pop("packing") == "packed"
    with changed(trained, PolicyVersionRow, PolicyVersionRow.version == 6, inputs={**inputs, "config": config}):
        status, verdict = replay(trained, 6, capsys, "--verify")
    assert (status, verdict["identical"]) == (0, True)


def test_deleted_states_are_replayed_first(trained: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(trained, 4, capsys, "--verify")[1]["replayed"] == [1, 2, 3, 4]
    assert replay(trained, 6, capsys, "--verify")[1]["replayed"] == [6]


def test_deleted_weights_are_replayed_first(trained: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(batch_of(trained, 7).weights.uri)
    aside = directory.with_name("aside")
    directory.rename(aside)
    try:
        status, verdict = replay(trained, 8, capsys, "--verify")
    finally:
        aside.rename(directory)
    assert (status, verdict["replayed"]) == (0, [7, 8])


def test_weights_marked_as_removed_are_not_used(trained: RealProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever deletes the files may be doing so now, and they may be incomplete."""
    with changed(trained, PolicyVersionRow, PolicyVersionRow.version == 5, weights_removed_at=1.0):
        status, verdict = replay(trained, 6, capsys, "--verify")
    assert (status, verdict["replayed"]) == (0, [1, 2, 3, 4, 5, 6])


def impossible(proxy: RealProxy, version: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([RUN, str(version), "--proxy", proxy.url, "--verify"]) == IMPOSSIBLE
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_reason_why_a_step_cannot_be_replayed_is_reported(
    trained: RealProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no version 99" in impossible(trained, 99, capsys)
    assert "version 0 is what the run began from" in impossible(trained, 0, capsys)
    with changed(trained, PolicyVersionRow, PolicyVersionRow.version == 6, inputs=None):
        assert "did not tell what it made it with" in impossible(trained, 6, capsys)
    inputs = trained.get("/steps/6")["inputs"]
    unknown = {**inputs, "config": {**inputs["config"], "momentum": 1}}
    with changed(trained, PolicyVersionRow, PolicyVersionRow.version == 6, inputs=unknown):
        assert f"use version {inputs['conditions']['trainer']} of base-rl" in impossible(trained, 6, capsys)
    session = batch_of(trained, 6).claims[0].groups[0].trajectories[0].session_id
    with changed(trained, SessionRow, SessionRow.id == session, erased_at=1.0):
        said = impossible(trained, 6, capsys)
        assert session in said
        assert "erased" in said
    with changed(trained, ClaimedSessionRow, ClaimedSessionRow.session_id == session, turn_count=9):
        assert session in impossible(trained, 6, capsys)


def test_the_command_line_asks_the_trainer_in_a_process_of_its_own(trained: RealProxy, tmp_path: Path) -> None:
    """The step follows another one in the state of both the policy and the critic."""
    before = sorted(str(path) for path in trained.weights.rglob("*"))
    answered = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "replay", RUN, "8", "--verify", "--url", trained.url, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "BASE_RL_ADMIN_KEY": ADMIN},
        cwd=tmp_path,
    )
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["identical"]
    assert sorted(str(path) for path in trained.weights.rglob("*")) == before


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("forked")
@pytest.mark.parametrize(
    "options", [("backend=fsdp",), pytest.param(("backend=archon", "layout=p2"), marks=pytest.mark.archon)]
)
def test_a_step_of_two_processes_is_replayed_by_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    filled = ("batch.trajectories=8", "algorithm.fill=true")  # the first rank fills the batch for both
    all_options = (f"api_key={TRAINER}", "batch.max_tokens_per_microbatch=32", *filled, *options)
    words = [word for option in all_options for word in ("--set", option)]
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        proxy.group([1.0] * 4, version=0)
        mixed(proxy, version=0)
        proxy.group([1.0, 0.0] * 2, version=0)
        log = tmp_path / "log"
        with forked_trainer(proxy.url, proxy.weights, log, *words, size=2) as process:
            proxy.wait_for_version(1, lambda: process.poll() is None)
            process.terminate()
            process.wait(60)
        inputs = proxy.get("/steps/1")["inputs"]
        assert inputs["conditions"]["ranks"] == 2
        assert [len(claims) for claims in inputs["taken_together"]] == [2]
        status, verdict = replay(proxy, 1, capsys, "--verify")
    assert (status, verdict["identical"]) == (0, True)


def test_steps_of_several_mini_batches_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second step is replayed too; it continues from the state after the first, including the reference in it."""
    several = {
        "preset": "m2po",
        "kl_coefficient": 0.1,
        "mini_batches": 3,
        "overlong_factor": 0.1,
        "overlong_tokens": 8,
        "overlong_tail": 6,
    }
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(algorithm=several, reference={"ema": 0.5}) as trainer:
            for version in range(2):
                mixed(proxy, version=version)
                trainer.loop.step()
            assert trainer.learner.steps == 6
        assert [proxy.get(f"/steps/{version}")["inputs"]["optimizer_steps"] for version in (1, 2)] == [0, 3]
        for version in (1, 2):
            status, verdict = replay(proxy, version, capsys, "--verify")
            assert (status, verdict["identical"]) == (0, True)


def test_a_batch_that_was_filled_up_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its claims are joined as they were, and so are those of a batch held before it."""
    parts = {"fill": True, "scale": "batch_std"}
    batch = {"trajectories": 8, "wait_seconds": 0.1}
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(algorithm=parts, batch=batch) as trainer:
            for _ in range(3):
                proxy.group([0.25] * 4, version=0)
            trainer.loop.step()
            assert trainer.loop.head.version == 0
            without_signal(proxy, 1.0, version=0)
            mixed(proxy, version=0)
            trainer.loop.step()
            assert trainer.loop.head.version == 1
        kept, trained = proxy.get("/steps/1")["inputs"]["taken_together"]
        assert (len(kept), len(trained)) == (2, 2)
        status, verdict = replay(proxy, 1, capsys, "--verify")
    assert (status, verdict["identical"]) == (0, True)
