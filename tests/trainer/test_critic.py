"""The policy and the critic in one update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import LogprobConvention
from tests.trainer.test_update import packed_of
from tests.trainer.tiny import draw, learner_of, load_tiny, save_tiny_model, trajectory, turn
from trainer.algorithm.presets import resolve
from trainer.config import AlgorithmSettings, BatchSettings, Divergence, OptimizerSettings, Scale
from trainer.update import Learner, TokenRecord


def ppo(**parts: Any) -> AlgorithmSettings:
    return AlgorithmSettings(preset="ppo", **parts)


def learner_for(algorithm: AlgorithmSettings, base: Path, learning_rate: float = 1e-3) -> Learner:
    return learner_of(load_tiny(base), resolve(algorithm), OptimizerSettings(learning_rate=learning_rate), base)


def two_turns(
    reward: float | None, *, first: list[int], second: list[int], between: float | None = None
) -> Trajectory:
    return trajectory(
        turn(first, reward=between), turn(second, parent=0, prefix=3 + len(first), prompt=[9, 9]), reward=reward
    )


def batch() -> list[Trajectory]:
    return [
        two_turns(1.0, first=[4, 5], second=[6, 7, 8]),
        two_turns(0.0, first=[4, 6], second=[6], between=0.5),
        two_turns(None, first=[9], second=[6, 7], between=-1.0),
        two_turns(0.5, first=[12, 13, 14], second=[15]),
    ]


def learn(learner: Learner, algorithm: AlgorithmSettings, members: list[Trajectory], **settings: Any) -> TokenRecord:
    outcome = learner.update(packed_of(members, [0] * len(members), algorithm, BatchSettings(**settings)))
    assert outcome.stepped
    assert outcome.tokens is not None
    return outcome.tokens


def of_trajectory(tokens: TokenRecord, index: int, name: str) -> list[float]:
    """Return values of one trajectory in the order of its turns."""
    mine = (tokens.trajectory_N == index).nonzero()[:, 0]
    ordered = mine[torch.argsort(tokens.turn_N[mine], stable=True)]
    found: list[float] = getattr(tokens, name)[ordered].tolist()
    return found


def test_advantages_continue_through_the_turns_of_a_path(tiny_model: Path) -> None:
    """Each sequence is in a micro-batch of its own, and the turns of branches are in several."""
    algorithm = ppo(scale=Scale.NONE, gae_lambda=0.5, discount=0.9, mini_batches=2)
    learner = learner_for(algorithm, tiny_model)
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.model.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    members = batch()
    tokens = learn(learner, algorithm, members, max_tokens_per_microbatch=8)
    for index, member in enumerate(members):
        values = of_trajectory(tokens, index, "values_N")
        rewards = [0.0] * len(values)
        rewards[len(member.turns[0].output_ids) - 1] = member.turns[0].reward or 0.0
        rewards[-1] = member.reward or 0.0
        errors = [
            reward + 0.9 * following - value
            for reward, following, value in zip(rewards, [*values[1:], 0.0], values, strict=True)
        ]
        wanted = [
            sum(0.45**step * error for step, error in enumerate(errors[place:])) for place in range(len(errors))
        ]
        assert of_trajectory(tokens, index, "advantages_N") == pytest.approx(wanted, abs=1e-5)
        returns = [value + advantage for value, advantage in zip(values, wanted, strict=True)]
        assert of_trajectory(tokens, index, "returns_N") == pytest.approx(returns, abs=1e-5)
        assert min(map(abs, values)) > 0


def test_the_critic_learns_the_expected_return(tiny_model: Path) -> None:
    """Values are those at the start of the step, and the critic does not change the policy's reward."""
    algorithm = ppo(scale=Scale.NONE)
    learner = learner_for(algorithm, tiny_model)
    members = [trajectory(turn([token, 5, 6]), reward=float(token == 4)) for token in (4, 10, 20, 30)]
    first = learn(learner, algorithm, members)
    assert first.values_N.tolist() == [0.0] * 12
    for _ in range(30):
        tokens = learn(learner, algorithm, members)
    for index, member in enumerate(members):
        values = of_trajectory(tokens, index, "values_N")
        assert values[0] == pytest.approx(0.25, abs=0.15), "the first token is not there yet"
        assert values[1:] == pytest.approx([member.reward] * 2, abs=0.15)


def test_a_critic_that_warms_up_learns_alone(tiny_model: Path) -> None:
    algorithm = ppo(critic_warmup=3, mini_batches=1)
    learner = learner_for(algorithm, tiny_model)
    assert learner.critic is not None
    policy = [weight.detach().clone() for weight in learner.model.parameters()]

    def unchanged() -> bool:
        return all(torch.equal(old, new) for old, new in zip(policy, learner.model.parameters(), strict=True))

    seen = []
    for _ in range(4):
        tokens = learn(learner, algorithm, batch())
        seen.append((unchanged(), learner.steps, learner.critic.steps, bool(tokens.values_N.any())))
    assert seen == [(True, 0, 1, False), (True, 0, 2, True), (True, 0, 3, True), (False, 1, 4, True)]


def test_the_divergence_is_part_of_the_return(tiny_model: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=1)
    algorithm = ppo(scale=Scale.NONE, kl_coefficient=0.5, kl_form=Divergence.K1, discount=0.9)
    learner = learner_of(load_tiny(tiny_model), resolve(algorithm), OptimizerSettings(), tmp_path)
    members = batch()
    tokens = learn(learner, algorithm, members)
    for index, member in enumerate(members):
        logprobs, base = (of_trajectory(tokens, index, name) for name in ("logprobs_N", "reference_N"))
        costs = [0.5 * (mine - theirs) for mine, theirs in zip(logprobs, base, strict=True)]
        rewards = [-cost for cost in costs]
        rewards[len(member.turns[0].output_ids) - 1] += member.turns[0].reward or 0.0
        rewards[-1] += member.reward or 0.0
        wanted = [
            sum(0.9**step * reward for step, reward in enumerate(rewards[place:])) for place in range(len(rewards))
        ]
        assert of_trajectory(tokens, index, "advantages_N") == pytest.approx(wanted, abs=1e-5)


def test_tokens_without_a_choice_get_no_credit(tiny_model: Path) -> None:
    """Values are still learnt there, and the scale is computed from the other tokens."""
    forced = turn([4, 5], logprobs=[0.0, -1.0], convention=LogprobConvention.CONSTRAINED)
    algorithm = ppo()
    tokens = learn(learner_for(algorithm, tiny_model), algorithm, [trajectory(forced, reward=3.0)])
    assert tokens.advantages_N.tolist() == pytest.approx([0.0, 1.0], abs=1e-3)
    assert tokens.returns_N.tolist() == pytest.approx([3.0, 3.0])


def test_a_gradient_not_finite_for_one_model_updates_neither(tiny_model: Path) -> None:
    algorithm = ppo(scale=Scale.BATCH_STD, mini_batches=1)
    learner = learner_for(algorithm, tiny_model)
    assert learner.critic is not None
    members = [trajectory(turn([4]), reward=1e30), trajectory(turn([5]), reward=0.0)]
    before = [weight.detach().clone() for weight in [*learner.model.parameters(), *learner.critic.model.parameters()]]
    outcome = learner.update(packed_of(members, [0, 0], algorithm))
    assert (outcome.stepped, outcome.skipped, learner.steps, learner.critic.steps) == (False, 1, 0, 0)
    after = [*learner.model.parameters(), *learner.critic.model.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_state_restores_the_critic_and_without_one_it_starts_anew(tiny_model: Path) -> None:
    algorithm = ppo(critic_warmup=1)
    learner = learner_for(algorithm, tiny_model)
    learn(learner, algorithm, batch())
    state = copy.deepcopy(learner.capture())
    policy = {name: weight.detach().clone() for name, weight in learner.model.named_weights()}
    later = learn(learner, algorithm, batch())

    other = learner_for(algorithm, tiny_model)
    with torch.no_grad():
        for name, weight in other.model.named_weights():
            weight.copy_(policy[name])
    other.restore(state)
    again = learn(other, algorithm, batch())
    for name in ("values_N", "advantages_N", "logprobs_N"):
        assert torch.equal(getattr(later, name), getattr(again, name))
    mine, theirs = (
        [weight for _, weight in [*each.model.named_weights(), *each.critic.model.named_weights()]]
        for each in (learner, other)
        if each.critic is not None
    )
    assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))

    other.restore({"steps": 3, "optimizer": {}})  # state of a trainer without a critic
    assert other.critic is not None
    assert (other.steps, other.critic.steps) == (3, 0)
    assert not learn(other, algorithm, batch()).values_N.any()


def test_a_policy_with_a_critic_learns(tiny_model: Path) -> None:
    """Two tokens after a prompt, with a reward for even second tokens."""
    algorithm = ppo()
    learner = learner_for(algorithm, tiny_model, 5e-3)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(12):
        drawn = draw(learner.model, (1, 2, 3), 2, generator, count=64)
        members = [
            trajectory(turn(output, logprobs=logprobs), reward=float(output[1] % 2 == 0))
            for output, logprobs in drawn
        ]
        rewards.append(sum(member.reward or 0.0 for member in members) / 64)
        learn(learner, algorithm, members)
    assert rewards[0] < 0.65
    assert sum(rewards[-3:]) / 3 > 0.9


def test_a_critic_learns_nothing_from_superseded_choices(tiny_model: Path) -> None:
    """The returns of superseded choices are the critic's own values; the policy learns from the difference to the
    sibling."""
    choices = [
        turn([6, 5], parent=0, prefix=5, prompt=[9], reward=1.0),
        turn([7, 5], parent=0, prefix=5, prompt=[9], reward=3.0, superseded=True),
        turn([8, 5], parent=0, prefix=5, prompt=[9], superseded=True),
    ]
    member = trajectory(turn([4, 5]), *choices, turn([7], parent=1, prefix=8, prompt=[9]), reward=2.0)
    algorithm = ppo(scale=Scale.NONE)
    tokens = learn(learner_for(algorithm, tiny_model), algorithm, [member, *batch()])
    mine = tokens.trajectory_N == 0
    assert set(tokens.turn_N[mine].tolist()) == {0, 1, 2, 4}, "one without any reward is not trained"
    left = mine & (tokens.turn_N == 2)
    assert tokens.advantages_N[left].tolist() == [1.0, 1.0]
    assert torch.equal(tokens.returns_N[left], tokens.values_N[left])
    taken = mine & (tokens.turn_N == 1)
    torch.testing.assert_close(tokens.returns_N[taken], torch.full((2,), 3.0))
