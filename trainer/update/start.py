"""Scores of tokens under the weights at the start of a step, and choices made from them over the whole batch.

Axes: N trained tokens of a micro-batch, or of all that a rank has; R trajectories with a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.divergence import divergence, still_to_come
from trainer.algorithm.entropy import high_entropy_threshold
from trainer.algorithm.losses import beyond_behaviour, loglinear_proximal, second_moment_cut, squared
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.whitening import whitened
from trainer.batching.hindsight import Shift, by_turn, shift_of
from trainer.batching.packing import MicroBatch
from trainer.batching.teaching import Taught
from trainer.config import Proximal
from trainer.critic import Credit
from trainer.models.passes import Scores
from trainer.models.policy import Policy, Scorer
from trainer.parallel.mesh import Ranks


class TokensAtStart(NamedTuple):
    """The tokens of a micro-batch under the weights at the start of the step.

    - `logprobs_N` and `entropy_N` are under these weights, `proximal_N` and `reference_N` are log-probabilities under
      the proximal policy and the reference (None: there is no reference).
    - `cost_N` is subtracted from the advantages, or with a critic from the rewards, for the divergence from the
      reference (None: nothing is).
    - `advantages_N` are normalised over the batch, and contain what hindsight adds (None: those of the micro-batch
      less the cost are used).
    - `included_N` marks the tokens in the loss (None: all), `policy_loss_N` those among them that are in the policy's
      own loss, besides divergence and entropy (None: all).
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    proximal_N: Tensor
    reference_N: Tensor | None = None
    cost_N: Tensor | None = None
    advantages_N: Tensor | None = None
    included_N: Tensor | None = None
    policy_loss_N: Tensor | None = None

    def to(self, device: torch.device) -> TokensAtStart:
        return TokensAtStart(*(None if each is None else each.to(device) for each in self))  # type: ignore[arg-type]

    def advantages(self, batch: MicroBatch, credit: Credit | None) -> Tensor:
        """Return the advantages that the policy learns from: the critic's, those normalised over the batch, or those
        of the micro-batch."""
        if credit is not None:
            return credit.advantages_N
        if self.advantages_N is not None:
            return self.advantages_N
        return batch.advantages_N if self.cost_N is None else batch.advantages_N - self.cost_N


BatchAtStart = list[list[TokensAtStart]]
"""The tokens of each micro-batch of this rank, by mini-batch."""


class StartScores:
    """Scores tokens under the policy before the step moves it, and under the reference.

    Every rank calls the same methods in the same order, since most of them are collectives.
    """

    def __init__(self, policy: Policy, reference: Scorer | None, algorithm: Algorithm, ranks: Ranks) -> None:
        self._policy = policy
        self._reference = reference
        self._algorithm = algorithm
        self._ranks = ranks

    def of_batch(self, shares: Sequence[Sequence[MicroBatch]]) -> BatchAtStart:
        """Score the whole batch, by mini-batch. Scores wait for their mini-batch on the CPU, not in GPU memory."""
        batches = [each.to(self._ranks.device) for share in shares for each in share]
        scores = self._policy.score([each.rows for each in batches])
        tokens = (
            self.of_micro_batch(each, batch, reference_N).to(torch.device("cpu"))
            for each, batch, reference_N in zip(scores, batches, self.of_reference(batches), strict=True)
        )
        return [[next(tokens) for _ in share] for share in shares]

    def of_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return the reference's log-probabilities of the micro-batches; None for each without a reference."""
        if self._reference is None or not self._algorithm.has_divergence:
            return [None] * len(batches)
        return [scores.logprobs_N for scores in self._reference.score([each.rows for each in batches])]

    def of_micro_batch(self, scores: Scores, batch: MicroBatch, reference_N: Tensor | None) -> TokensAtStart:
        """Return the tokens of a micro-batch without gradient; `scores` are under the weights at the start."""
        current_N = scores.logprobs_N.detach()
        tokens = TokensAtStart(current_N, scores.entropies_N.detach(), self._proximal(current_N, batch), reference_N)
        if reference_N is None or not self._algorithm.pays_divergence_in_reward:
            return tokens
        apart_N = divergence(self._algorithm.kl_form, current_N, reference_N)
        # A critic's returns already include the costs of later tokens.
        if not self._algorithm.has_critic:
            apart_N = still_to_come(apart_N, batch.answer_N)
        return tokens._replace(cost_N=self._algorithm.kl_coefficient * apart_N)

    def _proximal(self, current_N: Tensor, batch: MicroBatch) -> Tensor:
        if self._algorithm.proximal is Proximal.RECOMPUTE:
            return current_N
        other_N = batch.behaviour_N
        if self._algorithm.proximal is Proximal.LOGLINEAR:
            other_N = loglinear_proximal(current_N, batch.behaviour_N, batch.staleness_N)
        # Altered tokens were drawn from a distribution that no policy has, so none can be interpolated from it.
        return torch.where(batch.altered_N, current_N, other_N)

    def of_hinted(self, batches: Sequence[MicroBatch]) -> Taught:
        """Return the reference's log-probabilities of all answers with hints, from batches that contain the hints.

        `batches` are this rank's, as many as every other rank's. A collective.
        """
        assert self._reference is not None
        here = [each.to(self._ranks.device) for each in batches]
        mine: dict[tuple[int, int], list[float]] = {}
        for batch, scores in zip(here, self._reference.score([each.rows for each in here]), strict=True):
            mine |= by_turn(batch.trajectory_N, batch.turn_N, scores.logprobs_N.detach())
        gathered = self._ranks.gather(mine)
        return self._ranks.from_first(lambda: {key: found for part in gathered for key, found in part.items()})

    def add_hindsight(
        self, tokens: BatchAtStart, shares: Sequence[Sequence[MicroBatch]], teacher: Taught
    ) -> tuple[BatchAtStart, list[Shift]]:
        """Add hindsight_coefficient × clip(teacher − policy) to the advantages of answers with hints.

        Tokens that a grammar forced keep their advantage of 0.
        """
        algorithm = self._algorithm
        found: BatchAtStart = []
        shifts: list[Shift] = []
        for part, share in zip(tokens, shares, strict=True):
            found.append([])
            for each, batch in zip(part, share, strict=True):
                shift = shift_of(
                    batch.trajectory_N,
                    batch.turn_N,
                    each.logprobs_N,
                    teacher,
                    clip=algorithm.hindsight_clip,
                    floor=algorithm.hindsight_floor,
                )
                shifts.append(shift)
                added_N = algorithm.hindsight_coefficient * torch.where(batch.forced_N, 0.0, shift.shift_N)
                found[-1].append(each._replace(advantages_N=each.advantages(batch, None) + added_N))
        return found, shifts

    def select_high_entropy(self, tokens: BatchAtStart) -> tuple[BatchAtStart, float | None]:
        """Restrict the policy's loss to the tokens of the whole batch, over all ranks, whose entropy is in the
        algorithm's top share. Return the least entropy of these as well; None where all tokens take part."""
        share = self._algorithm.top_entropy_share
        if share == 1:
            return tokens, None
        mine_N = torch.cat([each.entropy_N for part in tokens for each in part])
        gathered = self._ranks.gather(mine_N)
        threshold = self._ranks.from_first(lambda: high_entropy_threshold(torch.cat(list(gathered)), share))
        selected = [[each._replace(policy_loss_N=each.entropy_N >= threshold) for each in part] for part in tokens]
        return selected, threshold

    def normalise_advantages(
        self, tokens: BatchAtStart, shares: Sequence[Sequence[MicroBatch]], rewarded: frozenset[int]
    ) -> BatchAtStart:
        """Normalise the advantages, less the cost of the divergence, over the tokens of the whole batch.

        Only tokens that the policy chose in `rewarded` trajectories count. A batch with one such trajectory stays as
        it is, since it has no other to be compared with.
        """
        rewarded_R = torch.tensor(sorted(rewarded), dtype=torch.long)
        pairs = [pair for part, share in zip(tokens, shares, strict=True) for pair in zip(part, share, strict=True)]
        mine = [
            (
                each.advantages(batch, None).double(),
                torch.isin(batch.trajectory_N, rewarded_R) & ~batch.forced_N & (len(rewarded) > 1),
            )
            for each, batch in pairs
        ]
        gathered = self._ranks.gather(tuple(torch.cat(column) for column in zip(*mine, strict=True)))

        def over_all_ranks() -> list[Tensor]:
            counts = [advantages_N.numel() for advantages_N, _ in gathered]
            every_N = whitened(*(torch.cat(column) for column in zip(*gathered, strict=True)))
            return list(torch.split(every_N.float(), counts))

        own_N = self._ranks.from_first(over_all_ranks)[self._ranks.data_rank]
        parts = iter(torch.split(own_N, [advantages_N.numel() for advantages_N, _ in mine]))
        return [[each._replace(advantages_N=next(parts)) for each in part] for part in tokens]

    def bound_second_moment(
        self,
        tokens: BatchAtStart,
        shares: Sequence[Sequence[MicroBatch]],
        credited: Sequence[Sequence[Credit]] | None,
        bound: float,
    ) -> BatchAtStart:
        """Leave out of the loss the tokens that moved furthest from the behaviour policy in the direction of their
        advantage, until the second moment is within `bound`.

        Altered tokens stay: their behaviour log-probability is of another distribution, so their distance is
        meaningless.
        """
        every_credit = credited if credited is not None else [[None] * len(share) for share in shares]
        distances, candidates = [], []
        for each, batch, credit in (
            triple for parts in zip(tokens, shares, every_credit, strict=True) for triple in zip(*parts, strict=True)
        ):
            distance_N = each.logprobs_N - batch.behaviour_N
            distances.append(distance_N)
            candidates.append(beyond_behaviour(distance_N, each.advantages(batch, credit)) & ~batch.altered_N)
        mine_N = torch.cat([each[chosen] for each, chosen in zip(distances, candidates, strict=True)])
        gathered = self._ranks.gather(mine_N)
        cut = self._ranks.from_first(lambda: second_moment_cut(torch.cat(list(gathered)), bound))
        included = iter(
            [~chosen | (squared(each) <= cut) for each, chosen in zip(distances, candidates, strict=True)]
        )
        return [[each._replace(included_N=next(included)) for each in part] for part in tokens]
