"""Apply the user's own filter and advantage function to a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from proxy.contract.claim import SkipReason
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import Advantages, Fallbacks, session_rewards, shaped
from trainer.algorithm.custom import Session, Turn
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.user_functions import call_advantage, call_filter
from trainer.batching.grouping import Batch
from trainer.batching.staleness import is_trained
from trainer.config import RewardSettings

_AS_POSTED = RewardSettings()


def without_filtered(batch: Batch, algorithm: Algorithm) -> tuple[Batch, list[tuple[Trajectory, SkipReason]]]:
    """Return the batch without the trajectories that the user's filter drops, and the dropped ones with the reason.

    Without a filter the batch is returned whole. Raises UserFunctionFailed.
    """
    if algorithm.filter is None or not batch.trajectories:
        return batch, []
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    kept = call_filter(algorithm.filter, sessions_of(batch.trajectories, batch.groups, rewards, _AS_POSTED))
    dropped = [
        (each, SkipReason.FILTERED) for each, is_kept in zip(batch.trajectories, kept, strict=True) if not is_kept
    ]
    return batch.only([index for index, is_kept in enumerate(kept) if is_kept]), dropped


def with_own_advantages(
    assigned: Advantages, trajectories: Sequence[Trajectory], groups: Sequence[int], algorithm: Algorithm
) -> Advantages:
    """Replace the advantages in `assigned` by those of the user's function, if the algorithm has one.

    A session's advantage is the mean over its turns. The running means are means of rewards, so they stay. Raises
    UserFunctionFailed.
    """
    if algorithm.advantage is None or not trajectories:
        return assigned
    rewards = [
        None if trajectory.reward is None else reward
        for trajectory, reward in zip(trajectories, session_rewards(trajectories, algorithm).tolist(), strict=True)
    ]
    turns = call_advantage(algorithm.advantage, sessions_of(trajectories, groups, rewards, algorithm.reward))
    means = tuple(math.fsum(values) / len(values) if values else 0.0 for values in turns)
    return dataclasses.replace(assigned, session=means, turns=turns, fallbacks=Fallbacks())


def sessions_of(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    rewards: Sequence[float | None],
    turn_rewards: RewardSettings,
) -> tuple[Session, ...]:
    """Convert trajectories to the sessions that user functions take, with these rewards. Rewards of turns are shaped
    by `turn_rewards`."""
    return tuple(
        Session(
            id=trajectory.session_id,
            group=group,
            task=trajectory.task,
            reward=reward,
            turns=tuple(
                Turn(
                    parent=turn.parent,
                    prompt_ids=turn.prompt_ids,
                    output_ids=turn.output_ids,
                    logprobs=turn.logprobs,
                    temperature=turn.temperature,
                    trained=is_trained(turn),
                    superseded=turn.superseded,
                    reward=None if turn.reward is None else shaped([turn.reward], turn_rewards).item(),
                    finish_reason=turn.finish_reason,
                )
                for turn in trajectory.turns
            ),
        )
        for trajectory, group, reward in zip(trajectories, groups, rewards, strict=True)
    )
