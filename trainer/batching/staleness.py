"""Decide which trajectories of a claim can be trained, and give the reasons for the others."""

from __future__ import annotations

import math

from proxy.contract.arrays import unpack_ids
from proxy.contract.claim import SkipReason
from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from trainer.batching.grouping import Batch


def drop_unusable(
    batch: Batch, max_staleness: int, vocabulary: int, *, from_words: bool = False
) -> tuple[Batch, dict[int, SkipReason]]:
    """Return the batch without the trajectories that cannot be trained, and their reasons by index.

    `from_words`: a trajectory without a reward can be trained if it has hints.

    The proxy checks staleness when it hands out a claim. The trainer checks it again, because it may have committed
    versions since then.
    """
    skipped = {
        index: reason
        for index, trajectory in enumerate(batch.trajectories)
        if (reason := unusable(trajectory, batch.base_version, max_staleness, vocabulary, from_words)) is not None
    }
    kept = [index for index in range(len(batch.trajectories)) if index not in skipped]
    return batch.only(kept), skipped


def unusable(
    trajectory: Trajectory, base_version: int, max_staleness: int, vocabulary: int, from_words: bool = False
) -> SkipReason | None:
    """Return why a trajectory cannot be trained; None if it can. `vocabulary` is the model's number of token ids."""
    oldest = trajectory.oldest_version
    if oldest is not None and oldest < base_version - max_staleness:
        return SkipReason.STALE
    hinted = from_words and any(turn.hints and is_trained(turn) for turn in trajectory.turns)
    if not has_reward(trajectory) and not hinted:
        return SkipReason.NO_REWARD
    if not well_formed(trajectory, vocabulary):
        return SkipReason.MALFORMED
    if not any(is_trained(turn) for turn in trajectory.turns):
        return SkipReason.NOTHING_TRAINABLE
    return None


def has_reward(trajectory: Trajectory) -> bool:
    """Return whether the session or one of its turns has a reward."""
    return trajectory.reward is not None or any(turn.reward is not None for turn in trajectory.turns)


def is_trained(turn: TrajectoryTurn) -> bool:
    """Return whether the turn has tokens to learn from.

    A greedy turn was not drawn from a distribution, and a wholly redacted output has no token left. A superseded
    answer is trained only if it has a reward of its own: to a critic, an answer without any reward would look like a
    failure.
    """
    judged = not turn.superseded or turn.reward is not None
    return turn.trainable and judged and turn.temperature > 0 and bool(turn.learnt)


def well_formed(trajectory: Trajectory, vocabulary: int) -> bool:
    """Whether the token tree is consistent.

    Parents come before their children, prefixes lie within the parents' paths, ids are in the vocabulary, every
    output token has a finite log-probability and a version span, a token precedes each output, and hints have their
    places in the prompts.
    """
    lengths: list[int] = []
    for index, turn in enumerate(trajectory.turns):
        if turn.parent is not None and not 0 <= turn.parent < index:
            return False
        reach = 0 if turn.parent is None else lengths[turn.parent]
        prompt = turn.prefix_tokens + len(turn.prompt_ids)
        if not 0 <= turn.prefix_tokens <= reach or (turn.output_ids and prompt == 0):
            return False
        if not _output_is_whole(turn):
            return False
        ids = turn.prompt_ids + turn.output_ids
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            return False
        lengths.append(prompt + len(turn.output_ids))
    return math.isfinite(trajectory.reward or 0.0) and _hints_fit(trajectory, vocabulary)


def _hints_fit(trajectory: Trajectory, vocabulary: int) -> bool:
    """Return whether hints are in the vocabulary and have their places in the prompts."""
    try:
        hints = [unpack_ids(hint) for hint in trajectory.hints]
    except ValueError:
        return False
    for turn in trajectory.turns:
        prompt = turn.prefix_tokens + len(turn.prompt_ids)
        if not all(0 < place <= prompt and 0 <= hint < len(hints) for place, hint in turn.hints):
            return False
    return all(0 <= token < vocabulary for hint in hints for token in hint)


def _output_is_whole(turn: TrajectoryTurn) -> bool:
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == len(turn.output_ids) == len(turn.logprobs) and all(map(math.isfinite, turn.logprobs))
