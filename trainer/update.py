"""One optimiser step over the micro-batches of a batch.

Axes: N trained tokens of the whole batch, in the order of the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.correction import importance_weight
from trainer.algorithm.custom import LossInputs
from trainer.algorithm.divergence import divergence, still_to_come
from trainer.algorithm.entropy import entropy_loss, high_entropy_threshold
from trainer.algorithm.imitation import distillation
from trainer.algorithm.losses import (
    PolicyLossInputs,
    beyond_behaviour,
    loglinear_proximal,
    policy_loss,
    second_moment_cut,
    squared,
)
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.user_functions import call_loss
from trainer.algorithm.whitening import whitened
from trainer.batching.packing import MicroBatch, MiniBatch, idle_micro_batch
from trainer.batching.teaching import Taught, taught_of
from trainer.config import Denominator, OptimizerSettings, Packing, Proximal
from trainer.critic import Credit, Critic
from trainer.errors import UserFunctionFailed
from trainer.models.passes import Scores
from trainer.models.policy import Policy, Scorer
from trainer.models.value import ValueModel
from trainer.optimizer import adamw, clip_gradients, learning_rate_at, step_at
from trainer.parallel.checkpoint import below, capture_optimizer, restore_optimizer
from trainer.parallel.mesh import Ranks
from trainer.reference import FollowingReference


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """What the step saw of each trained token, on the CPU. `logprobs_N` and `entropy_N` are those before the step;
    `reference_N` are NaN where there is no reference, `values_N` and `returns_N` where there is no critic."""

    logprobs_N: Tensor
    reference_N: Tensor
    behaviour_N: Tensor
    entropy_N: Tensor
    weight_N: Tensor
    clipped_N: Tensor
    advantages_N: Tensor
    values_N: Tensor
    returns_N: Tensor
    staleness_N: Tensor
    trajectory_N: Tensor
    turn_N: Tensor
    altered_N: Tensor

    @staticmethod
    def concatenate(records: Sequence[TokenRecord]) -> TokenRecord:
        names = TokenRecord.__slots__
        return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`stepped` false: no gradient was finite and within `skip_norm`, and the weights are as before; `skipped`
    mini-batches had none that was. `tokens` is None on all ranks but the first. `loss` is the mean of the
    mini-batches'; `gradient_norm` is before clipping, the largest. Those of the critic are None where there is none.
    `entropy_threshold` is the least entropy of tokens in the policy's loss, None where all are. `failure` says why a
    user's own loss could not be used for a mini-batch, which was skipped; None on all ranks but the first.
    """

    stepped: bool
    skipped: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: TokenRecord | None
    value_loss: float | None = None
    value_gradient_norm: float | None = None
    entropy_threshold: float | None = None
    failure: str | None = None


class _Look(NamedTuple):
    """The tokens of a micro-batch under the weights at the start of the step.

    Log-probabilities and entropies under these weights, log-probabilities of the proximal policy and of the reference
    (None: there is none); the cost of the divergence in advantage, or with a critic in reward (None: nothing); the
    advantages after normalisation over the batch (None: those of the micro-batch, less the cost); which tokens take
    part (None: all), and which of these in the policy's own loss (None: all).
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    proximal_N: Tensor
    reference_N: Tensor | None = None
    cost_N: Tensor | None = None
    advantages_N: Tensor | None = None
    kept_N: Tensor | None = None
    forking_N: Tensor | None = None

    def to(self, device: torch.device) -> _Look:
        return _Look(*(None if each is None else each.to(device) for each in self))  # type: ignore[arg-type]


class Learner:
    """A model and its optimiser, and the reference that it is held to and the critic that it learns with, if its
    algorithm has them. Every rank has a learner and calls the same methods in the same order."""

    def __init__(
        self,
        model: Policy,
        algorithm: Algorithm,
        settings: OptimizerSettings,
        ranks: Ranks,
        reference: Scorer | None = None,
        critic: ValueModel | None = None,
    ) -> None:
        if algorithm.has_reference != (reference is not None):
            raise ValueError("a reference belongs to algorithms with a kl_coefficient, and to no other")
        if algorithm.has_critic != (critic is not None):
            raise ValueError("a critic belongs to algorithms with that baseline, and to no other")
        self.model = model
        self._reference = reference
        self._following = reference if isinstance(reference, FollowingReference) else None
        self._taught: Taught | None = None
        self.steps = 0
        """Optimiser steps taken since version 0."""
        self.steps_before = 0
        """As many as there were when the last update began."""
        self._algorithm = algorithm
        self._settings = settings
        self._ranks = ranks
        self._parameters = list(model.parameters())
        self._optimizer = adamw(model, settings)
        self.critic = None if critic is None else Critic(critic, algorithm, settings, ranks)

    @property
    def packings(self) -> frozenset[Packing]:
        """Those that all its models take."""
        return self.model.packings if self.critic is None else self.model.packings & self.critic.model.packings

    def update(self, mini_batches: Sequence[MiniBatch], taught: Taught | None = None) -> Outcome:
        """Forward, backward and one step for each mini-batch, shared by the ranks. `taught` is the teacher's, where
        the algorithm has one."""
        if self._algorithm.has_teacher != (taught is not None):
            raise ValueError("a teacher belongs to algorithms with a distill_coefficient, and to no other")
        self._taught = taught
        self._failures: list[str] = []
        self.steps_before = self.steps
        shares = [
            self._share(mini_batch.micro_batches, learns=True) + self._share(mini_batch.micro_batches, learns=False)
            for mini_batch in mini_batches
        ]
        if self._algorithm.has_teacher:  # it answers at temperature 1, and like is compared with like
            shares = [[each.at_temperature_one() for each in share] for share in shares]
        looks = self._look(shares) if self._algorithm.looks_first else None
        threshold = self._keep_high_entropy(looks) if looks is not None else None
        if looks is not None and self._algorithm.whitens:
            looks = self._whitened(looks, shares, frozenset().union(*(each.rewarded for each in mini_batches)))
        credited = self._credit(mini_batches, shares, looks)
        if looks is not None and self._algorithm.second_moment is not None:
            looks = self._within_second_moment(looks, shares, credited, self._algorithm.second_moment)
        losses, value_losses, norms, value_norms, records = [], [], [], [], []
        for number, (mini_batch, share) in enumerate(zip(mini_batches, shares, strict=True)):
            self._zero_grad()
            batches = [each.to(self._ranks.device) for each in share]
            look = looks[number] if looks is not None else None
            credit = [each.to(self._ranks.device) for each in credited[number]] if credited is not None else None
            balance = self._algorithm.router_aux_coefficient / max(1, mini_batch.trained_tokens)
            loss, found = self._accumulate(batches, mini_batch.denominator, look, credit, balance)
            records += found
            value_loss = 0.0
            if self.critic is not None and credit is not None:
                for micro_batch, each in zip(batches, credit, strict=True):
                    value_loss += self.critic.accumulate(micro_batch, each, mini_batch.trained_tokens)
            learning_rate = learning_rate_at(self.steps, self._settings)
            norms.append(clip_gradients(self._parameters, self._settings.clip_norm, self.model.gradient_norm()))
            losses.append(loss)
            if self.critic is not None:
                value_norms.append(self.critic.clip_gradients())
                value_losses.append(value_loss)
                norms[-1] += 0.0 * value_norms[-1]  # neither learns from what is not finite for one of them
            if self._is_sound(norms[-1]):
                self._step(learning_rate)
        self._zero_grad()
        mean, value_mean = (sum(each) / max(1, len(each)) for each in (losses, value_losses))
        gathered = self._ranks.gather((mean, value_mean, TokenRecord.concatenate(records), self._failures))
        sound = [norm for norm in norms if self._is_sound(norm)]
        return Outcome(
            stepped=bool(sound),
            skipped=len(norms) - len(sound),
            loss=sum(part for part, *_ in gathered),
            gradient_norm=max(sound or norms),
            learning_rate=learning_rate,
            tokens=TokenRecord.concatenate([tokens for _, _, tokens, _ in gathered]) if gathered else None,
            value_loss=sum(part for _, part, _, _ in gathered) if self.critic is not None else None,
            value_gradient_norm=max(filter(math.isfinite, value_norms), default=0.0)
            if self.critic is not None
            else None,
            entropy_threshold=threshold,
            failure=next((failure for *_, failures in gathered for failure in failures), None),
        )

    def _is_sound(self, norm: float) -> bool:
        bound = self._settings.skip_norm
        return math.isfinite(norm) and (bound is None or norm <= bound)

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.zero_grad()

    def _step(self, learning_rate: float) -> None:
        if not self._waits:
            step_at(self._optimizer, learning_rate)
            self.steps += 1
            if self._following is not None:
                self._following.follow(self.steps)
        if self.critic is not None:
            self.critic.step()

    @property
    def _waits(self) -> bool:
        """For a critic that has seen too little to be learnt with."""
        return self.critic is not None and self.critic.learns_alone

    def _credit(
        self,
        mini_batches: Sequence[MiniBatch],
        shares: Sequence[Sequence[MicroBatch]],
        looks: Sequence[Sequence[_Look]] | None,
    ) -> list[list[Credit]] | None:
        """What the critic at the start of the step makes of the whole batch."""
        if self.critic is None:
            return None
        costs = looks if looks is not None else [[None] * len(share) for share in shares]
        rewards = {index: tree for mini_batch in mini_batches for index, tree in mini_batch.rewards.items()}
        return self.critic.credit(
            shares, [[None if look is None else look.cost_N for look in each] for each in costs], rewards
        )

    def _look(self, shares: Sequence[Sequence[MicroBatch]]) -> list[list[_Look]]:
        """The whole batch under the weights at the start of the step, before any of it moves them."""
        batches = [each.to(self._ranks.device) for share in shares for each in share]
        scores = self.model.score([each.rows for each in batches])
        looks = (
            self._looked(each, batch, reference_N).to(torch.device("cpu"))
            for each, batch, reference_N in zip(scores, batches, self._references(batches), strict=True)
        )
        return [[next(looks) for _ in share] for share in shares]

    def _whitened(
        self, looks: list[list[_Look]], shares: Sequence[Sequence[MicroBatch]], rewarded: frozenset[int]
    ) -> list[list[_Look]]:
        """Normalise the advantages, less the cost of the divergence, over the tokens of the whole batch.

        Only tokens that somebody chose in `rewarded` trajectories count. A batch with one of these is left as it is:
        it has nothing to be compared with.
        """
        rewarded_R = torch.tensor(sorted(rewarded), dtype=torch.long)
        pairs = [pair for found, share in zip(looks, shares, strict=True) for pair in zip(found, share, strict=True)]
        mine = [
            (
                _advantages(look, batch, None).double(),
                torch.isin(batch.trajectory_N, rewarded_R) & ~batch.forced_N & (len(rewarded) > 1),
            )
            for look, batch in pairs
        ]
        gathered = self._ranks.gather(tuple(torch.cat(column) for column in zip(*mine, strict=True)))

        def over_all_ranks() -> list[Tensor]:
            counts = [advantages_N.numel() for advantages_N, _ in gathered]
            every_N = whitened(*(torch.cat(column) for column in zip(*gathered, strict=True)))
            return list(torch.split(every_N.float(), counts))

        own_N = self._ranks.from_first(over_all_ranks)[self._ranks.data_rank]
        parts = iter(torch.split(own_N, [advantages_N.numel() for advantages_N, _ in mine]))
        return [[look._replace(advantages_N=next(parts)) for look in found] for found in looks]

    def _within_second_moment(
        self,
        looks: list[list[_Look]],
        shares: Sequence[Sequence[MicroBatch]],
        credited: Sequence[Sequence[Credit]] | None,
        bound: float,
    ) -> list[list[_Look]]:
        """Leave out the tokens that moved furthest from the policy that acted, in the direction of their advantage.

        The behaviour log-probability of a constrained token is of another distribution: its distance says nothing.
        """
        every_credit = credited if credited is not None else [[None] * len(share) for share in shares]
        distances, candidates = [], []
        for look, batch, credit in (
            each for parts in zip(looks, shares, every_credit, strict=True) for each in zip(*parts, strict=True)
        ):
            distance_N = look.logprobs_N - batch.behaviour_N
            distances.append(distance_N)
            candidates.append(beyond_behaviour(distance_N, _advantages(look, batch, credit)) & ~batch.altered_N)
        mine_N = torch.cat([each[chosen] for each, chosen in zip(distances, candidates, strict=True)])
        gathered = self._ranks.gather(mine_N)
        cut = self._ranks.from_first(lambda: second_moment_cut(torch.cat(list(gathered)), bound))
        kept = iter([~chosen | (squared(each) <= cut) for each, chosen in zip(distances, candidates, strict=True)])
        return [[look._replace(kept_N=next(kept)) for look in found] for found in looks]

    def _keep_high_entropy(self, looks: list[list[_Look]]) -> float | None:
        """Mark in `looks` the tokens of the whole batch, over all ranks, whose entropy is in the algorithm's top
        share; the least entropy of these. None, and nothing marked, where all take part."""
        share = self._algorithm.top_entropy_share
        if share == 1:
            return None
        mine_N = torch.cat([look.entropy_N for each in looks for look in each])
        gathered = self._ranks.gather(mine_N)
        threshold = self._ranks.from_first(lambda: high_entropy_threshold(torch.cat(list(gathered)), share))
        for each in looks:
            each[:] = [look._replace(forking_N=look.entropy_N >= threshold) for look in each]
        return threshold

    def _references(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """What the reference says of the micro-batches; None where there is none."""
        if self._reference is None:
            return [None] * len(batches)
        return [scores.logprobs_N for scores in self._reference.score([each.rows for each in batches])]

    def _looked(self, scores: Scores, batch: MicroBatch, reference_N: Tensor | None) -> _Look:
        """`scores` are those under the weights at the start of the step; their gradient is left out."""
        current_N = scores.logprobs_N.detach()
        look = _Look(current_N, scores.entropies_N.detach(), self._proximal(current_N, batch), reference_N)
        if reference_N is None or not self._algorithm.pays_divergence_in_reward:
            return look
        apart_N = divergence(self._algorithm.kl_form, current_N, reference_N)
        if self.critic is None:  # which knows what is still to come
            apart_N = still_to_come(apart_N, batch.answer_N)
        return look._replace(cost_N=self._algorithm.kl_coefficient * apart_N)

    def _share(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> list[MicroBatch]:
        """Every `size`-th micro-batch of a kind, and an idle one at the end where others have one more: all ranks
        must take part in the same collectives."""
        rank, size = self._ranks.data_rank, self._ranks.data_size
        kind = [micro_batch for micro_batch in micro_batches if micro_batch.learns is learns]
        mine = kind[rank::size]
        return mine + [idle_micro_batch(learns)] * (math.ceil(len(kind) / size) - len(mine))

    def _proximal(self, current_N: Tensor, batch: MicroBatch) -> Tensor:
        """See `_looked`."""
        if self._algorithm.proximal is Proximal.RECOMPUTE:
            return current_N
        other_N = batch.behaviour_N
        if self._algorithm.proximal is Proximal.LOGLINEAR:
            other_N = loglinear_proximal(current_N, batch.behaviour_N, batch.staleness_N)
        # Altered tokens were drawn from no policy that one could be between, or keep close to.
        return torch.where(batch.altered_N, current_N, other_N)

    def _accumulate(
        self,
        batches: Sequence[MicroBatch],
        denominator: int,
        looks: Sequence[_Look] | None,
        credit: Sequence[Credit] | None,
        balance: float,
    ) -> tuple[float, list[TokenRecord]]:
        """Adds the gradient of those micro-batches that have one; the loss of all.

        Without looks before, this is the first step of its batch: the weights at its start are those of these very
        forward passes, so the recomputed proximal policy is the current one without its gradient.
        """
        references = self._references(batches) if looks is None else []
        judged: dict[int, tuple[float, TokenRecord]] = {}

        def judge(place: int, scores: Scores) -> Tensor:
            batch = batches[place]
            look = self._looked(scores, batch, references[place]) if looks is None else looks[place]
            loss, record = self._judged(batch, scores, denominator, look, None if credit is None else credit[place])
            judged[place] = loss.item(), record
            return loss

        places = range(len(batches))
        learnt = [place for place in places if batches[place].learns and not self._waits]
        others = [place for place in places if place not in learnt]
        found = self.model.learn(
            [batches[place].rows._replace(balance=balance) for place in learnt],
            lambda number, scores: judge(learnt[number], scores),
        )
        found += self.model.score([batches[place].rows for place in others])
        for place, scores in zip([*learnt, *others], found, strict=True):
            if place not in judged:  # those without gradient, and those whose loss was another rank's to compute
                judge(place, scores)
        return sum((judged[place][0] for place in places), 0.0), [judged[place][1] for place in places]

    def _judged(
        self, batch: MicroBatch, scores: Scores, denominator: int, look: _Look, credit: Credit | None
    ) -> tuple[Tensor, TokenRecord]:
        """The loss of a micro-batch and the record of its tokens."""
        logprobs_N, entropy_N = scores
        look = look.to(logprobs_N.device)
        share_N, advantages_N = self._share_of(batch, denominator), _advantages(look, batch, credit)
        if look.kept_N is not None:
            share_N = share_N * look.kept_N
        policy_share_N = share_N if look.forking_N is None else share_N * look.forking_N
        inputs = PolicyLossInputs(
            logprobs_N=logprobs_N,
            proximal_N=look.proximal_N,
            behaviour_N=batch.behaviour_N,
            advantages_N=advantages_N,
            answer_N=batch.answer_N,
            share_N=policy_share_N,
            altered_N=batch.altered_N,
        )
        own_N = None if self._algorithm.loss is None else self._own_terms(batch, inputs, entropy_N, look)
        result = policy_loss(inputs, self._algorithm.objective, own_N)
        loss, reference_N = result.loss, look.reference_N
        if reference_N is None:
            reference_N = torch.full_like(share_N, math.nan)
        elif look.cost_N is None:
            apart_N = divergence(self._algorithm.kl_form, logprobs_N, reference_N)
            loss = (
                loss
                + self._algorithm.kl_coefficient * (share_N * self._weight_now(batch, logprobs_N) * apart_N).sum()
            )
        if self._algorithm.entropy_coefficient > 0:
            loss = loss + entropy_loss(entropy_N, share_N, self._algorithm.entropy_coefficient)
        if self._taught is not None:
            teacher_N = taught_of(batch.trajectory_N, batch.turn_N, self._taught).to(logprobs_N.device)
            apart = distillation(logprobs_N, teacher_N, share_N, self._weight_now(batch, logprobs_N))
            loss = self._algorithm.rl_coefficient * loss + self._algorithm.distill_coefficient * apart
        unknown_N = torch.full_like(share_N, math.nan)
        clipped_N = result.clipped_N | (policy_share_N == 0)
        record = TokenRecord(
            logprobs_N=look.logprobs_N.cpu(),
            reference_N=reference_N.cpu(),
            behaviour_N=batch.behaviour_N.cpu(),
            entropy_N=look.entropy_N.cpu(),
            weight_N=result.weight_N.cpu(),
            clipped_N=clipped_N.cpu(),
            advantages_N=advantages_N.cpu(),
            values_N=(unknown_N if credit is None else credit.values_N).cpu(),
            returns_N=(unknown_N if credit is None else credit.returns_N).cpu(),
            staleness_N=batch.staleness_N.cpu(),
            trajectory_N=batch.trajectory_N.cpu(),
            turn_N=batch.turn_N.cpu(),
            altered_N=batch.altered_N.cpu(),
        )
        return loss, record

    def _weight_now(self, batch: MicroBatch, logprobs_N: Tensor) -> Tensor:
        """Return the importance weight of divergences, which are those of the current policy, whatever the proximal
        one is."""
        logratio_N = logprobs_N - batch.behaviour_N
        return importance_weight(self._algorithm.objective, logratio_N, batch.answer_N, batch.altered_N)

    def _own_terms(self, batch: MicroBatch, inputs: PolicyLossInputs, entropy_N: Tensor, look: _Look) -> Tensor:
        """Return the terms of the user's loss. Where it fails they are NaN, not an exception: this rank alone would
        leave the collectives of the step, and the others would wait for it. So no rank finds a gradient, and all go
        on."""
        function = self._algorithm.loss
        assert function is not None
        if not batch.learns or not inputs.logprobs_N.numel():
            return 0 * inputs.logprobs_N
        tokens = LossInputs(
            logprobs_N=inputs.logprobs_N,
            entropy_N=entropy_N,
            proximal_N=inputs.proximal_N.detach(),
            behaviour_N=inputs.behaviour_N,
            reference_N=look.reference_N,
            advantages_N=inputs.advantages_N,
            answer_N=inputs.answer_N,
            staleness_N=batch.staleness_N,
        )
        try:
            return call_loss(function, tokens)
        except UserFunctionFailed as error:
            self._failures.append(str(error))
            return math.nan * inputs.logprobs_N

    def _share_of(self, batch: MicroBatch, denominator: int) -> Tensor:
        """Of each token in the loss."""
        even_N = torch.full_like(batch.advantages_N, 1 / denominator)
        if self._algorithm.denominator is not Denominator.ANSWERS or not batch.answer_N.numel():
            return even_N
        return even_N / torch.bincount(batch.answer_N)[batch.answer_N]

    def capture(self) -> dict[str, Any]:
        """Return the optimiser's state and its place in the schedule, the critic, and a reference that follows the
        policy, as this rank has them, without copies."""
        optimizer = capture_optimizer(self.model.named_weights(), self._optimizer)
        critic = {} if self.critic is None else {"critic": self.critic.capture()}
        reference = {} if self._following is None else {"reference": self._following.capture()}
        return {"steps": self.steps, "optimizer": optimizer, **critic, **reference}

    def divided(self) -> dict[str, Tensor | None]:
        """Return tensors that are sharded as the captured ones at their place, or below it, are; None where those are
        another rank's or not wanted."""
        critic = {} if self.critic is None else below("critic", self.critic.divided())
        weights = {**dict.fromkeys(self.model.elsewhere), **dict(self.model.named_weights())}
        # A reference that was captured is left out where the policy is now held to another one.
        reference = weights if self._following is not None else dict.fromkeys(weights)
        return {**below("optimizer", weights), **below("reference", reference), **critic}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take over what was captured, after the policy's weights. Without a state the optimiser, the critic and the
        reference begin anew; a state without a critic or a reference makes that part begin anew.

        Raises WeightsUnusable."""
        if self.critic is not None:
            self.critic.restore(None if state is None else state.get("critic"))
        if self._following is not None:
            self._following.restore(None if state is None else state.get("reference"))
        self.steps = 0 if state is None else int(state["steps"])
        optimizer = {} if state is None else state["optimizer"]
        here = {name: values for name, values in optimizer.items() if name not in self.model.elsewhere}
        restore_optimizer(self.model.named_weights(), self._optimizer, here)


def _advantages(look: _Look, batch: MicroBatch, credit: Credit | None) -> Tensor:
    """Return what the policy learns from: the critic's, those normalised over the batch, or the micro-batch's own."""
    if credit is not None:
        return credit.advantages_N
    if look.advantages_N is not None:
        return look.advantages_N
    return batch.advantages_N if look.cost_N is None else batch.advantages_N - look.cost_N
