"""The whole step with an in-memory proxy: exactly once, bit-exact after restarts, and no unnecessary version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from proxy.contract.claim import CommitRequest
from proxy.contract.policy import WeightsReference
from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.tiny import cut, group_of, settings, trajectory, turn
from trainer.errors import HeadMoved


def random_groups() -> Callable[[int], TrajectoryGroup]:
    """Return groups of four whose tokens and rewards depend only on the version."""

    def source(version: int) -> TrajectoryGroup:
        generator = torch.Generator().manual_seed(version)
        members = []
        for _ in range(4):
            output = torch.randint(0, 64, (6,), generator=generator).tolist()
            reward = float(torch.randint(0, 2, (1,), generator=generator))
            members.append(trajectory(turn(output, logprobs=[-4.0] * 6, version=version), reward=reward))
        return group_of([*members, trajectory(turn([5, 6], version=version), reward=0.5)])

    return source


def equal_rewards(version: int) -> TrajectoryGroup:
    return group_of([trajectory(turn([4, 5], version=version), reward=1.0) for _ in range(4)])


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_step_commits_a_version_that_from_pretrained_reads(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    before = trainer.weights()
    trainer.loop.step()
    (commit,) = proxy.commits
    assert proxy.version == trainer.loop.head.version == 1
    assert not same(before, trainer.weights())
    assert set(proxy.consumed.values()) == {1}
    published = AutoModelForCausalLM.from_pretrained(commit.weights.uri)
    assert published.dtype is torch.float32
    assert same(trainer.weights(), dict(published.named_parameters()))
    assert (Path(commit.weights.uri) / "tokenizer_config.json").is_file()
    assert commit.step.metrics["trajectories"] == len(commit.step.audit) == 10
    assert commit.step.metrics["tokens"] == sum(audit.trained_tokens for audit in commit.step.audit) == 52
    assert 0 < commit.step.metrics["tokens_computed"] < commit.step.metrics["tokens_in_sequences"]


@pytest.mark.parametrize(
    ("preset", "weights"),
    [("grpo", {}), ("ppo", {}), ("grpo", {"dtype": "bfloat16"}), ("grpo", {"type": "delta", "dtype": "bfloat16"})],
    ids=["grpo", "ppo", "bfloat16", "delta"],
)
def test_restarts_change_nothing(
    start: Start, tiny_model: Path, tmp_path: Path, preset: str, weights: dict[str, str]
) -> None:
    configured = settings(
        tmp_path,
        weights=weights,
        optimizer={"learning_rate": 1e-3, "warmup_steps": 6, "weight_decay": 0.1},
        algorithm={"preset": preset},
    )
    undisturbed_proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    undisturbed = start(undisturbed_proxy, configured)
    undisturbed.loop.resume()
    for _ in range(6):
        undisturbed.loop.step()

    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    for _ in range(3):
        trainer = start(proxy, configured)
        trainer.loop.resume()
        trainer.loop.step()
        trainer.loop.step()
    assert proxy.version == undisturbed_proxy.version == 6
    assert same(trainer.weights(), undisturbed.weights())
    assert [commit.weights.sha256 for commit in proxy.commits] == [
        commit.weights.sha256 for commit in undisturbed_proxy.commits
    ]
    assert trainer.loop.means == undisturbed.loop.means


def test_a_rollback_restores_the_critic(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path, algorithm={"preset": "ppo"}))
    critic = trainer.learner.critic
    assert critic is not None

    def values() -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in critic.model.named_weights()}

    trainer.loop.resume()
    before = [values()]
    for _ in range(2):
        trainer.loop.step()
        before.append(values())
    proxy.move_head(3, proxy.commits[0].weights)
    trainer.loop.resume()
    assert same(values(), before[1])
    assert critic.steps > 0
    proxy.move_head(4, None)
    trainer.loop.resume()
    assert same(values(), before[0])
    assert critic.steps == 0
    assert not same(before[1], before[2])


def test_a_missing_optimiser_state_is_a_fresh_optimiser(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    (Path(proxy.commits[0].weights.uri) / "trainer_state" / "state.json").unlink()
    again = start(proxy, settings(tmp_path))
    again.loop.resume()
    assert again.learner.steps == 0
    assert same(again.weights(), trainer.weights())


def test_a_lost_commit_answer_changes_nothing(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups(), lose_answers=2)
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    trainer.loop.step()
    assert (proxy.version, proxy.repeated, len(proxy.commits)) == (2, 2, 2)
    assert len(trainer.pauses) == 2
    assert set(proxy.consumed.values()) == {1}


def test_an_outage_is_waited_out_with_growing_pauses(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups(), outage=8)
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    assert trainer.pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_if_the_head_moves_the_step_is_dropped_and_the_head_reloaded(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    first = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    other = start(first, settings(tmp_path, optimizer={"learning_rate": 1e-2}))
    other.loop.resume()
    other.loop.step()

    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    proxy.before_commit = lambda: proxy.move_head(1, first.commits[0].weights)
    trainer.loop.step()
    assert proxy.commits == []
    assert proxy.consumed == {}
    assert proxy.released == proxy.claimed
    assert trainer.loop.head.version == 1
    assert same(trainer.weights(), other.weights())
    assert [str(path) for path in tmp_path.glob("*/v*")] == [first.commits[0].weights.uri]
    proxy.before_commit = lambda: None
    trainer.loop.step()
    assert proxy.version == 2
    assert set(proxy.consumed.values()) == {1}


def test_a_moved_head_is_noticed_at_the_claim(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    proxy.move_head(3, None)
    with pytest.raises(HeadMoved):
        trainer.claims.take(0)
    trainer.loop.step()
    assert proxy.version == 3
    assert trainer.loop.head.version == 3
    assert proxy.leases == {}


def test_a_lost_claim_is_not_committed(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    before = trainer.weights()
    proxy.before_commit = proxy.leases.clear
    trainer.loop.step()
    assert (proxy.version, proxy.consumed) == (0, {})
    assert same(trainer.weights(), before)
    assert trainer.learner.steps == 0


def test_untrainable_trajectories_are_consumed_and_named(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    def mixed(version: int) -> TrajectoryGroup:
        return group_of(
            [
                trajectory(turn([4], version=version), reward=1.0),
                trajectory(turn([5], version=version), reward=0.0),
                trajectory(turn([5], version=version - 5), reward=0.0),
                trajectory(turn([5], version=version), reward=None),
                trajectory(turn([5], version=version, trainable=False), reward=0.0),
                trajectory(turn([99], version=version), reward=0.0),
            ]
        )

    proxy = TrainingProxy(base_model=str(tiny_model), source=mixed, version=0)
    trainer = start(proxy, settings(tmp_path, batch={"trajectories": 6}))
    trainer.loop.resume()
    trainer.loop.step()
    reasons = sorted(audit.skipped or "trained" for audit in proxy.commits[0].step.audit)
    assert reasons == ["malformed", "no_reward", "nothing_trainable", "stale", "trained", "trained"]


def test_the_seed_of_a_step_follows_from_its_parent(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    def seeds(seed: int) -> list[CommitRequest]:
        proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
        trainer = start(proxy, settings(tmp_path / str(seed), seed=seed))
        trainer.loop.resume()
        trainer.loop.step()
        trainer.loop.step()
        return proxy.commits

    first, second = seeds(0), seeds(1)
    assert len({commit.step.seed for commit in [*first, *second]}) == 4
    assert first[0].step.config_hash != second[0].step.config_hash


def test_weights_that_differ_from_the_committed_ones_are_refused(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    from trainer.errors import WeightsUnusable

    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    assert isinstance(proxy.weights, WeightsReference)
    file = Path(proxy.weights.uri) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsUnusable, match="SHA-256"):
        start(proxy, settings(tmp_path)).loop.resume()


def test_old_weights_are_removed_except_those_with_a_trainer_state(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path, weights={"keep_versions": 1, "keep_optimizer_states": 2}))
    trainer.loop.resume()
    for _ in range(4):
        trainer.loop.step()
    assert sorted(path.name[:7] for path in tmp_path.glob("*/v*")) == ["v000003", "v000004"]
    again = start(proxy, settings(tmp_path))
    again.loop.resume()
    assert same(again.weights(), trainer.weights())


def test_a_proxy_without_pruning_does_not_stop_the_trainer(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path, weights={"keep_versions": 1, "keep_optimizer_states": 1}))
    trainer.loop.resume()
    proxy.refuse_to_prune = True
    for _ in range(3):
        trainer.loop.step()
    assert len(list(tmp_path.glob("*/v*"))) == proxy.version == 3
    proxy.refuse_to_prune = False
    trainer.loop.step()
    assert [path.name[:7] for path in tmp_path.glob("*/v*")] == ["v000004"]


def test_a_step_records_its_inputs(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    configured = settings(tmp_path, audit={"sample": 2}, algorithm={"mini_batches": 1})
    trainer = start(proxy, configured)
    trainer.loop.resume()
    trainer.loop.step()
    trainer.loop.step()
    first, second = (commit.step for commit in proxy.commits)
    assert first.inputs is not None
    assert second.inputs is not None
    assert (first.inputs.optimizer_steps, first.inputs.fresh_optimizer) == (0, True)
    assert (second.inputs.optimizer_steps, second.inputs.fresh_optimizer) == (1, False)
    assert first.inputs.config == configured.mathematics()
    assert "secret" not in str(first.inputs.config)
    assert not {"api_key", "proxy_url", "weights", "audit"} & set(first.inputs.config)
    assert len({audit.session_id for audit in first.tokens}) == 2
    lengths = {audit.session_id: audit.trained_tokens for audit in first.audit}
    assert all(len(audit.logprobs) == lengths[audit.session_id] for audit in first.tokens)


def test_a_session_of_cut_answers_is_skipped_with_the_reason(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    def source(version: int) -> TrajectoryGroup:
        whole = [trajectory(turn([4, 5], version=version), reward=reward) for reward in (1.0, 0.5)]
        return group_of([*whole, trajectory(cut(turn([6, 7], version=version)), reward=0.0)])

    proxy = TrainingProxy(base_model=str(tiny_model), source=source)
    trainer = start(proxy, settings(tmp_path, batch={"trajectories": 3}))
    trainer.loop.resume()
    trainer.loop.step()
    (commit,) = proxy.commits
    metrics, skipped = commit.step.metrics, [audit for audit in commit.step.audit if audit.skipped is not None]
    assert [(audit.skipped, audit.trained_tokens) for audit in skipped] == [("truncated", 0)]
    assert [turn.reason for turn in skipped[0].masked] == ["length"]
    assert (metrics["skipped_truncated"], metrics["masked_length"], metrics["tokens"]) == (1.0, 1.0, 4.0)
    assert metrics["cut_answer_share"] == pytest.approx(1 / 3)
    # Rewards of 1.0, 0.5 and 0.0: the skipped one keeps the mean at 0.5, so the middle one has no advantage.
    advantages = [audit.advantage for audit in commit.step.audit if audit.skipped is None]
    assert advantages == [pytest.approx(0.5 / (0.5 * (2 / 3) ** 0.5)), 0.0]


def test_the_audit_contains_the_advantage_from_turn_rewards(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    def source(version: int) -> TrajectoryGroup:
        return group_of([trajectory(turn([4], version=version, reward=each), reward=None) for each in (3.0, 1.0)])

    proxy = TrainingProxy(base_model=str(tiny_model), source=source)
    trainer = start(proxy, settings(tmp_path, batch={"trajectories": 2}))
    trainer.loop.resume()
    trainer.loop.step()
    assert [audit.advantage for audit in proxy.commits[0].step.audit] == [1.0, -1.0]
