"""Turn rewards into one advantage per turn: pure functions over trajectories.

The return of a session is the sum of its rewards, all in the user's unit. Its two parts are compared separately:

- the session's reward, which belongs to the whole path to each leaf of the token tree;
- rewards of turns, which belong to their turn and the turns before it on its path, as returns-to-go.

    A[t] = γ^(turns between t and its leaf) · (R − baseline) / scale + (G[t] − baseline at t's position) / scale

`algorithm/baselines.py` defines baselines and scale. Superseded answers, with which the agent did not continue, have
no part in the session's reward. Rewards of several answers to one prompt are compared with each other; only what
follows the answer that the agent continued is compared by position. A critic gets every reward at the end of the turn
that it was given for, and estimates the part of each token in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import TurnState
from trainer.algorithm.baselines import Compared, Rewarded, compare
from trainer.algorithm.choices import against_siblings, rewarded_siblings
from trainer.algorithm.overlong import overlong_penalty
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.returns import positions, what_follows
from trainer.algorithm.running import SESSION, RunningMeans, task_of
from trainer.config import RewardSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallbacks:
    """Counts of the rewards for which a group or batch baseline had no cohort.

    `rewarded` trajectories have a reward. `trajectories` of these had no cohort for any reward, and `without_task` of
    these were compared with the estimates of the whole run. `turns` counts returns without a cohort at their
    position.
    """

    rewarded: int = 0
    trajectories: int = 0
    without_task: int = 0
    turns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The advantages of a batch: `session[i]` of trajectory i's session reward, `turns[i][t]` of its turn t.

    `means` are the running estimates after this batch. With `for_critic` the values are rewards: `turns[i][t]` is
    what came at the end of turn t.
    """

    session: tuple[float, ...]
    turns: tuple[tuple[float, ...], ...]
    fallbacks: Fallbacks
    means: RunningMeans
    for_critic: bool = False

    def only(self, indices: Sequence[int]) -> Advantages:
        """Return the advantages of these trajectories, in this order. Counts and means still cover all
        trajectories."""
        return dataclasses.replace(
            self,
            session=tuple(self.session[index] for index in indices),
            turns=tuple(self.turns[index] for index in indices),
        )

    def where(self, trained: Sequence[Sequence[bool]]) -> Advantages:
        """Return the advantages with 0 for turns that are not trained; `trained[i][t]` is about turn t of trajectory
        i.

        A critic's values are rewards and are kept: the reward of a turn without trained tokens comes with the last
        token before it.
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
        """Whether nothing can be learnt. A critic also learns from rewards of 0."""
        return not self.for_critic and not any(value for turns in self.turns for value in turns)


def assign(
    trajectories: Sequence[Trajectory], groups: Sequence[int], algorithm: Algorithm, means: RunningMeans
) -> Advantages:
    """Return the advantages of a batch. `groups` holds one index per trajectory, equal within a group.

    A trajectory without a session reward is not part of the sessions' baseline, and its session advantage is 0. A
    turn without a reward at or after it is not part of the turns' baseline.
    """
    places = _rewarded_sessions(trajectories, groups, algorithm)
    for index, trajectory in enumerate(trajectories):
        places += _rewarded_turns(index, trajectory, groups[index], algorithm)
    rewards = [each for _, each in places]
    compared = compare(rewards, algorithm.baseline, algorithm.scale, means)

    session = [0.0] * len(trajectories)
    own = [[0.0] * len(trajectory.turns) for trajectory in trajectories]
    for (turn, each), advantage in zip(places, compared.advantages, strict=True):
        if turn is None:
            session[each.trajectory] = advantage
        else:
            own[each.trajectory][turn] += advantage
    return Advantages(
        session=tuple(session),
        turns=tuple(
            as_they_came(trajectory, session[index], algorithm.reward)
            if algorithm.has_critic
            else credit(trajectory, session[index], own[index], algorithm.turn_discount)
            for index, trajectory in enumerate(trajectories)
        ),
        fallbacks=_fallbacks(rewards, compared),
        means=compared.means,
        for_critic=algorithm.has_critic,
    )


# A reward and the turn that it belongs to; None for a session's.
_Place = tuple[int | None, Rewarded]


def _rewarded_sessions(
    trajectories: Sequence[Trajectory], groups: Sequence[int], algorithm: Algorithm
) -> list[_Place]:
    rewarded = [index for index, trajectory in enumerate(trajectories) if trajectory.reward is not None]
    values = session_rewards([trajectories[index] for index in rewarded], algorithm).tolist()
    tasks = [task_of(trajectories[index], algorithm.task_by) for index in rewarded]
    return [
        (None, Rewarded(trajectory=index, group=groups[index], task=task, place=SESSION, value=value))
        for index, task, value in zip(rewarded, tasks, values, strict=True)
    ]


def _rewarded_turns(index: int, trajectory: Trajectory, group: int, algorithm: Algorithm) -> list[_Place]:
    """Return the values of a trajectory's turns that are compared: returns-to-go, and rewards of sibling answers.

    If a turn's reward is compared with its siblings', only the return after it is compared by position.
    """
    turns = trajectory.turns
    own = _turn_rewards(trajectory, algorithm.reward)
    among = rewarded_siblings(turns, own)
    following = what_follows([own.get(turn) for turn in range(len(turns))], continued(turns), algorithm.turn_discount)
    at = positions(_keeping_output(turns))
    task = task_of(trajectory, algorithm.task_by)
    found: list[_Place] = []

    def add(turn: int, value: float, siblings: int | None = None) -> None:
        place = Rewarded(trajectory=index, group=group, task=task, place=at[turn], value=value, siblings=siblings)
        found.append((turn, place))

    for turn, later in enumerate(following):
        if turn in among:
            add(turn, own[turn], among[turn])
            if later is not None:
                add(turn, later)
        elif turn in own or later is not None:
            add(turn, own.get(turn, 0.0) + (later or 0.0))
    return found


def _fallbacks(rewards: Sequence[Rewarded], compared: Compared) -> Fallbacks:
    alone = [each for each, lone in zip(rewards, compared.alone, strict=True) if lone]
    met = {each.trajectory for each, lone in zip(rewards, compared.alone, strict=True) if not lone}
    lonely = {each.trajectory: each.task for each in alone if each.trajectory not in met}
    return Fallbacks(
        rewarded=len({each.trajectory for each in rewards}),
        trajectories=len(lonely),
        without_task=sum(task is None for task in lonely.values()),
        turns=sum(each.place != SESSION for each in alone),
    )


def credit(
    trajectory: Trajectory, session_advantage: float, own: Sequence[float], turn_discount: float
) -> tuple[float, ...]:
    """Return one advantage per turn: the session's, discounted by the turn's distance to its leaves, plus its `own`.
    A superseded turn has only its own."""
    weights = discounts(continued(trajectory.turns), turn_discount)
    return tuple(
        advantage if turn.superseded else session_advantage * weight + advantage
        for turn, weight, advantage in zip(trajectory.turns, weights, own, strict=True)
    )


def _turn_rewards(trajectory: Trajectory, settings: RewardSettings) -> dict[int, float]:
    """Return the shaped rewards of the turns that have one of their own."""
    rewarded = [(index, turn.reward) for index, turn in enumerate(trajectory.turns) if turn.reward is not None]
    values = shaped([reward for _, reward in rewarded], settings).tolist()
    return dict(zip((index for index, _ in rewarded), values, strict=True))


def as_they_came(trajectory: Trajectory, session_reward: float, settings: RewardSettings) -> tuple[float, ...]:
    """Return the reward at the end of each turn: its own, plus the session's if no turn continues it.

    A superseded turn has its own reward minus the mean over the answers to its prompt: the critic cannot know what
    would have followed it, so this difference is its advantage (`gae.RewardTree.apart`).
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
    """Return for each turn the turn that it continues: the nearest one before it on its path of whose output it keeps
    a token. None if it keeps no output.

    A call may keep only a part of its parent turn: a sub-agent that shares the prompt alone, an edited history, a
    template that strips an earlier answer. It does not continue turns of which it keeps nothing, so it does not add
    to the discount of their rewards. The result is also None for answers that the agent did not use, which must not
    affect turns before them: superseded ones, those of failed calls, and truncated ones of which no later turn keeps
    a token. Parents come before their children.
    """
    found = _keeping_output(turns)
    used = set(found)
    return [
        None if turn.superseded or (turn.state is not TurnState.COMPLETE and place not in used) else owner
        for place, (turn, owner) in enumerate(zip(turns, found, strict=True))
    ]


def _keeping_output(turns: Sequence[TrajectoryTurn]) -> list[int | None]:
    """Return for each turn the nearest turn before it on its path of whose output it keeps a token."""
    found: list[int | None] = []
    for turn in turns:
        kept, owner = turn.prefix_tokens, turn.parent
        while owner is not None and kept <= turns[owner].prefix_tokens + len(turns[owner].prompt_ids):
            kept, owner = min(kept, turns[owner].prefix_tokens), turns[owner].parent
        found.append(owner)
    return found


def discounts(parents: Sequence[int | None], turn_discount: float) -> list[float]:
    """Return γ to the power of the number of turns between each turn and the leaf of its path: 1 for a leaf.

    `parents` is the result of `continued`. A turn on several paths gets the mean over the leaves below it, so that
    branching does not count it twice.
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
    """Return the session rewards that are compared, as float64: clipped, scaled, minus the penalty on overlong
    answers. Every trajectory must have a session reward."""
    rewards_N = shaped([trajectory.reward or 0.0 for trajectory in trajectories], algorithm.reward)
    return rewards_N + overlong_penalty(trajectories, algorithm)


def shaped(rewards: Sequence[float], settings: RewardSettings) -> Tensor:
    """Return scale × (clip(r, low, high) + bias) for each reward, as float64."""
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    if settings.low is not None or settings.high is not None:
        rewards_N = rewards_N.clamp(settings.low, settings.high)
    return settings.scale * (rewards_N + settings.bias)
