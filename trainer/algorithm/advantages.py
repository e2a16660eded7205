"""From rewards to one advantage per turn: pure functions over trajectories.

A session's reward belongs to the whole path to each leaf of its token tree, a turn's reward to that turn alone. A
critic is given the rewards where they came in, at the end of a turn, and says what each token had to do with them.
Answers that the agent did not go on with (`superseded`) get nothing of the session's reward: a reward of their own is
compared with those of the other answers to their prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import TurnState
from trainer.algorithm.baselines import RunningMean, baseline, scale
from trainer.algorithm.choices import against_siblings
from trainer.algorithm.overlong import overlong_penalty
from trainer.algorithm.parts import Algorithm
from trainer.config import RewardSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMeans:
    """What earlier batches were worth: of session rewards, and of turn rewards. Part of the trainer's state."""

    session: RunningMean
    turn: RunningMean

    @staticmethod
    def fresh(decay: float, session: float | None = None, turn: float | None = None) -> RunningMeans:
        """Means that start at the given values; None: nothing was seen yet."""
        return RunningMeans(
            session=RunningMean(decay=decay, value=session), turn=RunningMean(decay=decay, value=turn)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """`session[i]` is trajectory i's own, `turns[i][t]` that of its turn t. `fallbacks` counts trajectories without
    a cohort, which met the running mean. `means` are the running means after this batch. `for_critic`: they are
    rewards, `turns[i][t]` what came with the end of turn t."""

    session: tuple[float, ...]
    turns: tuple[tuple[float, ...], ...]
    fallbacks: int
    means: RunningMeans
    for_critic: bool = False

    def only(self, indices: Sequence[int]) -> Advantages:
        """Return the advantages of these trajectories, in this order; counts and means are those of all."""
        return dataclasses.replace(
            self,
            session=tuple(self.session[index] for index in indices),
            turns=tuple(self.turns[index] for index in indices),
        )

    def where(self, trained: Sequence[Sequence[bool]]) -> Advantages:
        """Return the advantages with 0 for turns that are not trained; `trained[i]` are the turns of trajectory i.

        A critic's are rewards and keep their values: those of a turn without trained tokens come with the last token
        before it.
        """
        if self.for_critic:
            return self
        turns = tuple(
            tuple(value if learns else 0.0 for value, learns in zip(values, learn, strict=True))
            for values, learn in zip(self.turns, trained, strict=True)
        )
        return dataclasses.replace(self, turns=turns)

    @property
    def all_zero(self) -> bool:
        """Whether nothing can be learnt. A critic learns from no reward too."""
        return not self.for_critic and not any(value for turns in self.turns for value in turns)


def assign(
    trajectories: Sequence[Trajectory], groups: Sequence[int], algorithm: Algorithm, means: RunningMeans
) -> Advantages:
    """Advantages of a batch. `groups` holds one index per trajectory, equal within a group.

    A trajectory without a session reward takes no part in any baseline, and its session advantage is 0.
    """
    rewarded = [index for index, trajectory in enumerate(trajectories) if trajectory.reward is not None]
    rewards_N = session_rewards([trajectories[index] for index in rewarded], algorithm)
    groups_N = torch.tensor([groups[index] for index in rewarded], dtype=torch.long)
    compared = baseline(algorithm.baseline, rewards_N, groups_N, means.session)
    advantages_N = rewards_N - compared.baseline_N
    if not algorithm.has_critic:
        advantages_N = advantages_N / scale(algorithm.scale, rewards_N, groups_N)
    session = [0.0] * len(trajectories)
    for index, advantage in zip(rewarded, advantages_N.tolist(), strict=True):
        session[index] = advantage

    turn_rewards = [
        turn.reward for trajectory in trajectories for turn in trajectory.turns if turn.reward is not None
    ]
    turns = tuple(
        as_they_came(trajectory, advantage, algorithm.reward)
        if algorithm.has_critic
        else credit(trajectory, advantage, algorithm, means.turn)
        for trajectory, advantage in zip(trajectories, session, strict=True)
    )
    return Advantages(
        session=tuple(session),
        turns=turns,
        fallbacks=int(compared.fallback_N.sum()),
        means=RunningMeans(
            session=means.session.updated(rewards_N),
            turn=means.turn.updated(shaped(turn_rewards, algorithm.reward)),
        ),
        for_critic=algorithm.has_critic,
    )


def credit(
    trajectory: Trajectory, session_advantage: float, algorithm: Algorithm, turn_mean: RunningMean
) -> tuple[float, ...]:
    """Return one advantage per turn: the session's, discounted by the turn's distance to its leaves, plus the turn's
    own. A superseded turn has only its own."""
    weights = discounts(continued(trajectory.turns), algorithm.turn_discount)
    compared = against_siblings(trajectory.turns, _turn_rewards(trajectory, algorithm.reward))
    advantages = []
    for index, turn in enumerate(trajectory.turns):
        advantage = 0.0 if turn.superseded else session_advantage * weights[index]
        if index in compared:
            advantage += compared[index]
        elif turn.reward is not None:
            advantage += shaped([turn.reward], algorithm.reward).item() - turn_mean.baseline
        advantages.append(advantage)
    return tuple(advantages)


def _turn_rewards(trajectory: Trajectory, settings: RewardSettings) -> dict[int, float]:
    """Return the shaped rewards of the turns that have one of their own."""
    rewarded = [(index, turn.reward) for index, turn in enumerate(trajectory.turns) if turn.reward is not None]
    values = shaped([reward for _, reward in rewarded], settings).tolist()
    return dict(zip((index for index, _ in rewarded), values, strict=True))


def as_they_came(trajectory: Trajectory, session_reward: float, settings: RewardSettings) -> tuple[float, ...]:
    """Return the rewards at the end of each turn: its own, and the session's where no turn goes on from it.

    A superseded turn has its own reward less the mean of the answers to its prompt: the critic does not know what
    would have come after it, so this difference is its advantage (`gae.RewardTree.apart`).
    """
    going_on = set(continued(trajectory.turns))
    own = _turn_rewards(trajectory, settings)
    compared = against_siblings(trajectory.turns, own)
    return tuple(
        compared.get(index, 0.0)
        if turn.superseded
        else own.get(index, 0.0) + (0.0 if index in going_on else session_reward)
        for index, turn in enumerate(trajectory.turns)
    )


def continued(turns: Sequence[TrajectoryTurn]) -> list[int | None]:
    """Return for each turn the one that it goes on from: the nearest before it on its path of whose output it keeps a
    token.

    A call may begin before the end of the turn that it is stored behind: a sub-agent that shares only its prompt, an
    edited past, a template that strips an earlier answer. Of what it does not keep it is not a later turn, so that no
    reward of its path is discounted there on its account. None where it keeps no output at all. None as well for
    answers that the agent did nothing with, which weigh on nothing before them: superseded ones, those of failed
    calls, and truncated ones of which no later turn keeps a token. Parents stand before their children.
    """
    found = _keeping_output(turns)
    used = set(found)
    return [
        None if turn.superseded or (turn.state is not TurnState.COMPLETE and place not in used) else owner
        for place, (turn, owner) in enumerate(zip(turns, found, strict=True))
    ]


def _keeping_output(turns: Sequence[TrajectoryTurn]) -> list[int | None]:
    """Return for each turn the nearest before it on its path of whose output it keeps a token."""
    found: list[int | None] = []
    for turn in turns:
        kept, owner = turn.prefix_tokens, turn.parent
        while owner is not None and kept <= turns[owner].prefix_tokens + len(turns[owner].prompt_ids):
            kept, owner = min(kept, turns[owner].prefix_tokens), turns[owner].parent
        found.append(owner)
    return found


def discounts(parents: Sequence[int | None], turn_discount: float) -> list[float]:
    """γ to the number of turns between a turn and the leaf of its path, 1 for a leaf; `parents` as of `continued`.

    A turn that several paths share gets the mean over the leaves below it, so that branching does not count it twice.
    Parents stand before their children.
    """
    leaves = [0] * len(parents)
    total = [0.0] * len(parents)
    for index in reversed(range(len(parents))):
        if leaves[index] == 0:
            leaves[index], total[index] = 1, 1.0
        parent = parents[index]
        if parent is not None:
            leaves[parent] += leaves[index]
            total[parent] += turn_discount * total[index]
    return [sum_ / count for sum_, count in zip(total, leaves, strict=True)]


def session_rewards(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> Tensor:
    """Return the session rewards as the algorithm sees them, as float64: bounded and scaled, less the penalty on
    overlong answers. The trajectories have such rewards."""
    rewards_N = shaped([trajectory.reward or 0.0 for trajectory in trajectories], algorithm.reward)
    return rewards_N + overlong_penalty(trajectories, algorithm)


def shaped(rewards: Sequence[float], settings: RewardSettings) -> Tensor:
    """scale × (clip(r, low, high) + bias), as float64."""
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    if settings.low is not None or settings.high is not None:
        rewards_N = rewards_N.clamp(settings.low, settings.high)
    return settings.scale * (rewards_N + settings.bias)
