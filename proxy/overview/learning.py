"""Reasons why a run cannot have learnt anything yet, for its page, `base-rl status` and `base-rl doctor`. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from proxy.contract.states import RunState, TrainingState

# Below this sum of learning rates, training has no visible effect. AdamW moves a weight by at most about the learning
# rate per step, and weights are of the order of 0.01 to 0.1: they have moved by at most a thousandth.
ENOUGH_MOVEMENT = 3e-5
# After this many steps a run gets no hints: its curves show more.
ENOUGH_STEPS = 100
# Above this share of cut-off answers, which the trainer masks by default, hardly anything is left to learn from.
_MOST_CUT = 0.9
# Fewer equal rewards may be chance.
_LEAST_REWARDS = 8


class LearningFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run, from the store and the trainer's last request.

    `sessions` counts sessions by training state; `rewards` are (group, reward) of the last rewarded ones.
    `learning_rates` are those of the newest `ENOUGH_STEPS` versions that a gradient made. `trainer_seen`: a trainer
    claimed or asked within the lease time. `wanted` is the batch size in trajectories that a trainer last asked for,
    None if none has. `has_weights` is False for a scripted engine. `cut_share` is the share of cut-off answers among
    the recent ones, None if there are none.
    """

    state: str
    head_version: int
    sessions: Mapping[str, int]
    open_sessions: int
    rewards: Sequence[tuple[str | None, float]]
    learning_rates: Sequence[float]
    trainer_seen: bool
    wanted: int | None
    has_weights: bool = True
    cut_share: float | None = None


def why_not_learnt(facts: LearningFacts) -> tuple[str, ...]:
    """Return the reasons in the order in which they should be fixed; none for a run that may have learnt
    something."""
    if not facts.has_weights:
        return ("a scripted engine answers by fixed rules: it has no weights to train",)
    if facts.head_version >= ENOUGH_STEPS:
        return ()
    causes = (_no_data, _no_contrast, _no_whole_answers, _no_trainer, _no_batch, _no_movement)
    return tuple(reason for cause in causes for reason in cause(facts))


def _no_data(facts: LearningFacts) -> Sequence[str]:
    if facts.head_version or _rewarded(facts):
        return ()
    if not sum(facts.sessions.values()):
        return ("no agent has made a call yet",)
    waiting = (
        facts.sessions.get(TrainingState.PENDING, 0)
        + facts.sessions.get(TrainingState.EXPIRED, 0)
        - facts.open_sessions
    )
    parts = []
    if waiting > 0:
        parts.append(f"{waiting} ended without one")
    if facts.open_sessions:
        parts.append(f"{facts.open_sessions} {'is' if facts.open_sessions == 1 else 'are'} open")
    if excluded := facts.sessions.get(TrainingState.EXCLUDED, 0):
        parts.append(f"{excluded} {'is' if excluded == 1 else 'are'} not for training (evaluations, failed attempts)")
    details = f" ({', '.join(parts)})" if parts else ""
    return (f"no session has a reward yet{details}: post one number per session to /v1/feedback",)


def _no_contrast(facts: LearningFacts) -> Sequence[str]:
    """Report equal rewards: without a difference, every advantage is zero."""
    values = [reward for _, reward in facts.rewards]
    if len(values) < _LEAST_REWARDS:
        return ()
    if len(set(values)) == 1:
        return (
            f"the last {len(values)} rewards are all {values[0]:g}, so every advantage is zero: some attempts must"
            " succeed and some fail; use tasks that the model sometimes solves, or finer rewards",
        )
    groups: dict[str, list[float]] = defaultdict(list)
    for group, reward in facts.rewards:
        if group is not None:
            groups[group].append(reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    grouped = sum(len(rewards) for rewards in several)
    if grouped == len(values) and all(len(set(rewards)) == 1 for rewards in several):
        return (
            f"within each of the last {len(several)} groups all rewards are equal, so every advantage is zero:"
            " attempts at one task must differ; sample with a temperature, and use tasks that are sometimes solved",
        )
    return ()


def _no_whole_answers(facts: LearningFacts) -> Sequence[str]:
    """Report that nearly all answers are cut off."""
    # A run that has moved its weights had whole answers to learn from, or trains cut ones.
    if facts.learning_rates or facts.cut_share is None or facts.cut_share < _MOST_CUT:
        return ()
    return (
        f"{facts.cut_share:.0%} of the recent answers were cut off, and the trainer masks such answers by default:"
        " raise run.max_new_tokens or the agent's max_tokens, or set trainer.algorithm.truncated",
    )


def _no_trainer(facts: LearningFacts) -> Sequence[str]:
    if facts.state == RunState.PAUSED:
        return ("training is paused: resume the run",)
    if facts.trainer_seen or not _rewarded(facts):
        return ()
    return ("no trainer is asking for trajectories: start `base-rl train`, or `base-rl up --trainer`",)


def _no_batch(facts: LearningFacts) -> Sequence[str]:
    if facts.head_version or facts.state == RunState.PAUSED:
        return ()
    if facts.sessions.get(TrainingState.LEASED, 0):
        return ("the first training step is under way",)
    ready = facts.sessions.get(TrainingState.READY, 0)
    if facts.wanted is None or not _rewarded(facts) or ready >= facts.wanted:
        return ()
    return (
        f"{ready} of {facts.wanted} trajectories of the first batch are ready: collect more, or make batches smaller"
        " (trainer.batch.trajectories)",
    )


def _no_movement(facts: LearningFacts) -> Sequence[str]:
    if not facts.head_version:
        return ()
    rates = facts.learning_rates
    if not rates:
        return ()  # fitted and imported versions report no learning rate
    moved = sum(rates)
    if moved >= ENOUGH_MOVEMENT:
        return ()
    steps = "1 step" if len(rates) == 1 else f"{len(rates)} steps"
    return (
        f"{steps} at a learning rate of {max(rates):g} cannot have moved a weight by more than about {moved:.1g},"
        " which rarely has a visible effect: raise trainer.optimizer.learning_rate, or train for longer",
    )


def _rewarded(facts: LearningFacts) -> int:
    """Count the sessions in a training state that requires a reward."""
    return sum(
        facts.sessions.get(state, 0)
        for state in (TrainingState.READY, TrainingState.LEASED, TrainingState.CONSUMED, TrainingState.STALE)
    )
