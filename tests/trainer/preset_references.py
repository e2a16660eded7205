"""The gradients of all presets in closed form, derived from their papers, in float64 and without the trainer's code.

The policy is a table of logits, so that the gradient of a token's log-probability is its unit vector less the softmax
of its row. Every preset is then a coefficient for each token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxy.contract.trajectory import TrajectoryGroup
from trainer.distances import LONGEST, Tables


@dataclass(frozen=True)
class Token:
    """A token's log-probabilities under the policy that sampled it, at the start of the step, after earlier steps of
    the batch, of the base model and of the teacher; `value` is the critic's before it."""

    group: int
    session: int
    answer: int
    before: int
    token: int
    behaviour: float
    start: float
    moved: float
    base: float
    teacher: float
    value: float


@dataclass(frozen=True)
class Batch:
    tokens: list[Token]
    rewards: dict[int, float]
    groups: dict[int, list[int]]
    lengths: dict[int, int]

    def of_answer(self, answer: int) -> list[Token]:
        return [token for token in self.tokens if token.answer == answer]

    @property
    def answers(self) -> int:
        return len({token.answer for token in self.tokens})


def batch_of(known: Tables, groups: Sequence[TrajectoryGroup]) -> Batch:
    start, moved, base, teacher = (
        each.log_softmax(-1).tolist() for each in (known.start, known.moved, known.base, known.teacher)
    )
    tokens: list[Token] = []
    rewards: dict[int, float] = {}
    members: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    answer = 0
    for group, each in enumerate(groups):
        members[group] = list(range(len(rewards), len(rewards) + len(each.trajectories)))
        for session, trajectory in zip(members[group], each.trajectories, strict=True):
            assert trajectory.reward is not None
            rewards[session] = trajectory.reward
            lengths[session] = max(len(turn.output_ids) for turn in trajectory.turns)
            for turn in trajectory.turns:
                before = turn.prompt_ids[-1]
                for token, behaviour in zip(turn.output_ids, turn.logprobs, strict=True):
                    tokens.append(
                        Token(
                            group=group,
                            session=session,
                            answer=answer,
                            before=before,
                            token=token,
                            behaviour=behaviour,
                            start=start[before][token],
                            moved=moved[before][token],
                            base=base[before][token],
                            teacher=teacher[before][token],
                            value=float(known.values[before]),
                        )
                    )
                    before = token
                answer += 1
    return Batch(tokens, rewards, members, lengths)


def gradient_of(batch: Batch, logits: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the sum over tokens of coefficient · ∇ log π(token)."""
    found = torch.zeros_like(logits)
    for token, coefficient in zip(batch.tokens, coefficients, strict=True):
        found[token.before] -= coefficient * logits[token.before].softmax(-1)
        found[token.before, token.token] += coefficient
    return found


def centred(batch: Batch, rewards: dict[int, float]) -> dict[int, float]:
    return {
        session: rewards[session] - statistics.fmean(rewards[each] for each in members)
        for members in batch.groups.values()
        for session in members
    }


def by_group(batch: Batch, rewards: dict[int, float]) -> dict[int, float]:
    """Return (r − mean) / deviation within each group (Shao et al. 2024), or 0 if all are equal."""
    differences = centred(batch, rewards)
    return {
        session: differences[session] / (statistics.pstdev(rewards[each] for each in members) or 1.0)
        for members in batch.groups.values()
        for session in members
    }


def weight(token: Token, advantage: float = 0.0) -> float:
    """Return the weight of a stale token: exp(start − behaviour), at most 2 (Fu et al. 2025; Espeholt et al.
    2018), and at least 1 for a positive advantage (after Le Roux et al. 2025)."""
    truncated = min(math.exp(token.start - token.behaviour), 2.0)
    return max(truncated, 1.0) if advantage > 0 else truncated


def clipped(ratio: float, advantage: float, low: float = 0.2, high: float = 0.28) -> float:
    """Return the derivative of −min(ρA, clip(ρ)A) by log ρ (Schulman et al. 2017, Yu et al. 2025)."""
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        return 0.0
    return -ratio * advantage


def ppo_terms(batch: Batch, advantages: Sequence[float], denominator: float) -> list[float]:
    return [
        weight(token, advantage) * clipped(math.exp(token.moved - token.start), advantage) / denominator
        for token, advantage in zip(batch.tokens, advantages, strict=True)
    ]


def per_token(batch: Batch, advantages: dict[int, float]) -> list[float]:
    return [advantages[token.session] for token in batch.tokens]


def grpo(batch: Batch) -> list[float]:
    return ppo_terms(batch, per_token(batch, by_group(batch, batch.rewards)), len(batch.tokens))


def dapo(batch: Batch) -> list[float]:
    """Yu et al. 2025, equation 13: the reward falls linearly over the last half of the bound, by at most 1."""
    tail = LONGEST // 2
    rewards = {
        session: reward - min(1.0, max(0.0, (batch.lengths[session] - (LONGEST - tail)) / tail))
        for session, reward in batch.rewards.items()
    }
    advantages = by_group(batch, rewards)
    counted = sum(advantages[token.session] != 0 for token in batch.tokens)
    return ppo_terms(batch, per_token(batch, advantages), counted)


def dr_grpo(batch: Batch) -> list[float]:
    return ppo_terms(batch, per_token(batch, centred(batch, batch.rewards)), batch.answers * 1024)


def lite_ppo(batch: Batch) -> list[float]:
    spread = statistics.pstdev(batch.rewards.values())
    advantages = {session: each / spread for session, each in centred(batch, batch.rewards).items()}
    return ppo_terms(batch, per_token(batch, advantages), len(batch.tokens))


def gspo(batch: Batch) -> list[float]:
    """Zheng et al. 2025, equations 5 to 7: the ratio of an answer is the geometric mean of its tokens'."""
    advantages = by_group(batch, batch.rewards)
    found = []
    for token in batch.tokens:
        answer = batch.of_answer(token.answer)
        ratio = math.exp(statistics.fmean(each.moved - each.start for each in answer))
        slope = clipped(ratio, advantages[token.session], 3e-4, 4e-4)
        found.append(weight(token, advantages[token.session]) * slope / len(answer) / batch.answers)
    return found


def rloo(batch: Batch) -> list[float]:
    """Ahmadian et al. 2024, equation 6: REINFORCE on the whole session, with the mean of the others as baseline."""
    advantages = {
        session: batch.rewards[session] - statistics.fmean(batch.rewards[each] for each in members if each != session)
        for members in batch.groups.values()
        for session in members
    }
    return [
        -weight(token, advantages[token.session]) * advantages[token.session] / len(batch.rewards)
        for token in batch.tokens
    ]


def reinforce_pp(batch: Batch) -> list[float]:
    """Hu et al. 2025: r − β Σ KL over the rest of the answer, normalised over all tokens of the batch."""
    shaped = []
    for place, token in enumerate(batch.tokens):
        rest = [each for each in batch.tokens[place:] if each.answer == token.answer]
        shaped.append(batch.rewards[token.session] - 0.01 * math.fsum(each.start - each.base for each in rest))
    mean, spread = statistics.fmean(shaped), statistics.pstdev(shaped)
    return ppo_terms(batch, [(each - mean) / spread for each in shaped], len(batch.tokens))


def cispo(batch: Batch) -> list[float]:
    """MiniMax 2025, equation 4: the clipped ratio as a weight of every token."""
    advantages = by_group(batch, batch.rewards)
    return [
        -min(max(math.exp(token.moved - token.behaviour), 0.01), 5.0) * advantages[token.session] / len(batch.tokens)
        for token in batch.tokens
    ]


def sapo(batch: Batch) -> list[float]:
    """Gao et al. 2025: the derivative of −(4/τ)σ(τ(ρ − 1))A by log ρ is −4σ(1 − σ)ρA."""
    advantages = by_group(batch, batch.rewards)
    found = []
    for token in batch.tokens:
        advantage, ratio = advantages[token.session], math.exp(token.moved - token.behaviour)
        gate = 1 / (1 + math.exp(-(1.0 if advantage > 0 else 1.05) * (ratio - 1)))
        found.append(-4 * gate * (1 - gate) * ratio * advantage / len(batch.of_answer(token.answer)) / batch.answers)
    return found


def m2po(batch: Batch) -> list[float]:
    """Zheng et al. 2025: of the tokens that a clip could affect, the furthest are left out until the mean square is
    0.04."""
    advantages = by_group(batch, batch.rewards)
    squares = sorted(
        (token.start - token.behaviour) ** 2
        for token in batch.tokens
        if advantages[token.session] * (token.start - token.behaviour) > 0
    )
    while squares and statistics.fmean(squares) > 0.04:
        squares.pop()
    assert squares
    found = []
    for token in batch.tokens:
        advantage, distance = advantages[token.session], token.start - token.behaviour
        left_out = advantage * distance > 0 and distance**2 > squares[-1]
        found.append(0.0 if left_out else -math.exp(distance) * advantage / len(batch.tokens))
    return found


def ppo(batch: Batch) -> list[float]:
    """Schulman et al. 2016 with γ = λ = 1: the later rewards minus the value, over their root mean square."""
    raw = [batch.rewards[token.session] - token.value for token in batch.tokens]
    spread = math.sqrt(statistics.fmean(each**2 for each in raw)) + 1e-4
    return ppo_terms(batch, [each / spread for each in raw], len(batch.tokens))


def distillation(batch: Batch) -> list[float]:
    """Return the gradient of KL(policy ‖ teacher) at each sampled token (Agarwal et al. 2024)."""
    return [weight(token) * (token.start - token.teacher) / len(batch.tokens) for token in batch.tokens]


REFERENCES: dict[str, Callable[[Batch], list[float]]] = {
    each.__name__: each
    for each in (
        grpo,
        dapo,
        dr_grpo,
        gspo,
        rloo,
        lite_ppo,
        reinforce_pp,
        cispo,
        sapo,
        m2po,
        ppo,
        distillation,
    )
}
ONE_STEP = ("rloo", "m2po", "distillation")
"""Presets with one step per batch, whose gradient is taken at its start."""
