"""A learner: gradients and optimiser steps over the micro-batches of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.parts import Algorithm
from trainer.batching.hindsight import Shift, hindsight_figures, joined_figures
from trainer.batching.packing import MicroBatch, MiniBatch, idle_micro_batch
from trainer.batching.teaching import Taught
from trainer.config import OptimizerSettings, Packing
from trainer.critic import Credit, Critic
from trainer.models.passes import Scores
from trainer.models.policy import Policy, Scorer
from trainer.models.trained import TRAINED, capture_trained, restore_trained
from trainer.models.value import ValueModel
from trainer.optimizer import adamw, clip_gradients, learning_rate_at, step_at
from trainer.parallel.checkpoint import below, capture_optimizer, restore_optimizer
from trainer.parallel.mesh import Ranks
from trainer.reference import FollowingReference
from trainer.update.loss import MicroBatchLoss
from trainer.update.outcome import Outcome, TokenRecord
from trainer.update.start import BatchAtStart, StartScores, TokensAtStart


class _Result(NamedTuple):
    """The result of one mini-batch on this rank."""

    loss: float
    value_loss: float
    norm: float
    value_norm: float
    learning_rate: float
    records: list[TokenRecord]


class Learner:
    """A model with its optimiser, and the reference and the critic if its algorithm has them.

    Every rank has a learner and calls the same methods in the same order.
    """

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
            raise ValueError("pass a reference if the algorithm has a kl_ or a hindsight_coefficient, and only then")
        if algorithm.has_critic != (critic is not None):
            raise ValueError("pass a critic if the algorithm's baseline is `critic`, and only then")
        self.model = model
        self.reference = reference
        self.steps = 0
        """Optimiser steps taken since version 0."""
        self.steps_before = 0
        """`steps` when the last update began."""
        self.optimizer = adamw(model, settings)
        self.critic = None if critic is None else Critic(critic, algorithm, settings, ranks)
        self._algorithm = algorithm
        self._settings = settings
        self._ranks = ranks
        self._parameters = list(model.parameters())
        self._following = reference if isinstance(reference, FollowingReference) else None
        self._start = StartScores(model, reference, algorithm, ranks)

    @property
    def packings(self) -> frozenset[Packing]:
        """The layouts of rows that the model and the critic both take."""
        return self.model.packings if self.critic is None else self.model.packings & self.critic.model.packings

    def update(
        self,
        mini_batches: Sequence[MiniBatch],
        taught: Taught | None = None,
        hinted: Sequence[MicroBatch] = (),
    ) -> Outcome:
        """Train on each mini-batch in turn: forward, backward and one optimiser step, shared by the ranks.

        `taught` are the teacher's log-probabilities; pass them if the algorithm has a teacher, and only then.
        `hinted` are the answers with feedback in words as the hindsight teacher reads them.
        """
        if self._algorithm.has_teacher != (taught is not None):
            raise ValueError("a teacher belongs to algorithms with a distill_coefficient, and to no other")
        self.steps_before = self.steps
        shares = [self._share(mini_batch) for mini_batch in mini_batches]
        start, credited, threshold = self._scored_first(mini_batches, shares)
        shifts: list[Shift] = []
        if start is not None and self._algorithm.learns_from_words:
            teacher = self._start.of_hinted(self._every_nth(hinted, learns=False))
            start, shifts = self._start.add_hindsight(start, shares, teacher)
        compute_loss = MicroBatchLoss(self._algorithm, taught)
        results = [
            self._learn(
                mini_batch,
                [each.to(self._ranks.device) for each in share],
                None if start is None else start[number],
                None if credited is None else [each.to(self._ranks.device) for each in credited[number]],
                compute_loss,
            )
            for number, (mini_batch, share) in enumerate(zip(mini_batches, shares, strict=True))
        ]
        self._zero_grad()
        return self._outcome(results, threshold, compute_loss.failures, shifts)

    def _share(self, mini_batch: MiniBatch) -> list[MicroBatch]:
        """Return this rank's micro-batches: those with a gradient, then those without."""
        micro_batches = mini_batch.micro_batches
        share = self._every_nth(micro_batches, learns=True) + self._every_nth(micro_batches, learns=False)
        # The teacher scores tokens at temperature 1, so the policy must as well.
        return [each.at_temperature_one() for each in share] if self._algorithm.has_teacher else share

    def _every_nth(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> list[MicroBatch]:
        """Return every `size`-th micro-batch with a gradient (`learns`) or without, and an idle one at the end where
        other ranks have one more, because all ranks must take part in the same collectives."""
        rank, size = self._ranks.data_rank, self._ranks.data_size
        kind = [micro_batch for micro_batch in micro_batches if micro_batch.learns is learns]
        mine = kind[rank::size]
        return mine + [idle_micro_batch(learns)] * (math.ceil(len(kind) / size) - len(mine))

    def _scored_first(
        self, mini_batches: Sequence[MiniBatch], shares: Sequence[Sequence[MicroBatch]]
    ) -> tuple[BatchAtStart | None, list[list[Credit]] | None, float | None]:
        """Compute everything that needs the whole batch under the weights at the start of the step.

        Return the tokens (None: no part of the algorithm needs them so early), the critic's credit (None: no critic)
        and the least entropy of tokens in the policy's loss (None: all are).
        """
        algorithm = self._algorithm
        if not algorithm.looks_first:
            return None, self._credit(mini_batches, shares, None), None
        start, threshold = self._start.select_high_entropy(self._start.of_batch(shares))
        if algorithm.whitens:
            rewarded = frozenset().union(*(each.rewarded for each in mini_batches))
            start = self._start.normalise_advantages(start, shares, rewarded)
        credited = self._credit(mini_batches, shares, start)
        if algorithm.second_moment is not None:
            start = self._start.bound_second_moment(start, shares, credited, algorithm.second_moment)
        return start, credited, threshold

    def _credit(
        self,
        mini_batches: Sequence[MiniBatch],
        shares: Sequence[Sequence[MicroBatch]],
        start: BatchAtStart | None,
    ) -> list[list[Credit]] | None:
        """Return the critic's credit of the whole batch; None without a critic."""
        if self.critic is None:
            return None
        costs: list[list[Tensor | None]] = [[None] * len(share) for share in shares]
        if start is not None:
            costs = [[tokens.cost_N for tokens in part] for part in start]
        rewards = {index: tree for mini_batch in mini_batches for index, tree in mini_batch.rewards.items()}
        return self.critic.credit(shares, costs, rewards)

    def _learn(
        self,
        mini_batch: MiniBatch,
        batches: Sequence[MicroBatch],
        start: Sequence[TokensAtStart] | None,
        credit: Sequence[Credit] | None,
        compute_loss: MicroBatchLoss,
    ) -> _Result:
        """Compute the gradient and take one optimiser step; skip the step if `_is_sound` rejects the gradient's
        norm."""
        self._zero_grad()
        balance = self._algorithm.router_aux_coefficient / max(1, mini_batch.trained_tokens)
        loss, records = self._accumulate(batches, mini_batch.denominator, start, credit, balance, compute_loss)
        value_loss = value_norm = 0.0
        if self.critic is not None and credit is not None:
            for micro_batch, each in zip(batches, credit, strict=True):
                value_loss += self.critic.accumulate(micro_batch, each, mini_batch.trained_tokens)
        learning_rate = learning_rate_at(self.steps, self._settings)
        norm = clip_gradients(self._parameters, self._settings.clip_norm, self.model.gradient_norm())
        if self.critic is not None:
            value_norm = self.critic.clip_gradients()
            # Makes the norm NaN if the critic's is not finite: then neither of the two learns.
            norm += 0.0 * value_norm
        if self._is_sound(norm):
            self._step(learning_rate)
        return _Result(loss, value_loss, norm, value_norm, learning_rate, records)

    def _accumulate(
        self,
        batches: Sequence[MicroBatch],
        denominator: int,
        start: Sequence[TokensAtStart] | None,
        credit: Sequence[Credit] | None,
        balance: float,
        compute_loss: MicroBatchLoss,
    ) -> tuple[float, list[TokenRecord]]:
        """Add the gradient of the micro-batches that have one. Return the summed loss of all and their records.

        Without `start`, this is the first step of its batch: the weights at its start are those of these forward
        passes, so the recomputed proximal policy is the current one without its gradient.
        """
        references = self._start.of_reference(batches) if start is None else []
        losses: dict[int, tuple[float, TokenRecord]] = {}

        def loss_at(place: int, scores: Scores) -> Tensor:
            batch = batches[place]
            tokens = self._start.of_micro_batch(scores, batch, references[place]) if start is None else start[place]
            loss, record = compute_loss(batch, scores, denominator, tokens, None if credit is None else credit[place])
            losses[place] = loss.item(), record
            return loss

        places = range(len(batches))
        learnt = [place for place in places if batches[place].learns and not self._only_critic_learns]
        others = [place for place in places if place not in learnt]
        found = self.model.learn(
            [batches[place].rows._replace(balance=balance) for place in learnt],
            lambda number, scores: loss_at(learnt[number], scores),
        )
        found += self.model.score([batches[place].rows for place in others])
        for place, scores in zip([*learnt, *others], found, strict=True):
            if place not in losses:  # it has no gradient, or its loss was computed on another rank of the pipeline
                loss_at(place, scores)
        return sum((losses[place][0] for place in places), 0.0), [losses[place][1] for place in places]

    def _is_sound(self, norm: float) -> bool:
        """Return whether a gradient of this norm may be learnt from."""
        bound = self._settings.skip_norm
        return math.isfinite(norm) and (bound is None or norm <= bound)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.zero_grad()

    def _step(self, learning_rate: float) -> None:
        if not self._only_critic_learns:
            step_at(self.optimizer, learning_rate)
            self.steps += 1
            if self._following is not None:
                self._following.follow(self.steps)
        if self.critic is not None:
            self.critic.step()

    @property
    def _only_critic_learns(self) -> bool:
        """Whether the critic has seen too little for the policy to learn from its values."""
        return self.critic is not None and self.critic.learns_alone

    def _outcome(
        self,
        results: Sequence[_Result],
        threshold: float | None,
        failures: list[str],
        shifts: Sequence[Shift],
    ) -> Outcome:
        """Combine the results of all ranks. A collective."""
        mean = sum(each.loss for each in results) / max(1, len(results))
        value_mean = sum(each.value_loss for each in results) / max(1, len(results))
        records = TokenRecord.concatenate([record for each in results for record in each.records])
        gathered = self._ranks.gather((mean, value_mean, records, failures, hindsight_figures(shifts)))
        norms = [each.norm for each in results]
        sound = [norm for norm in norms if self._is_sound(norm)]
        value_loss = value_norm = None
        if self.critic is not None:
            value_loss = sum(part for _, part, *_ in gathered)
            value_norm = max((each.value_norm for each in results if math.isfinite(each.value_norm)), default=0.0)
        return Outcome(
            stepped=bool(sound),
            skipped=len(norms) - len(sound),
            loss=sum(part for part, *_ in gathered),
            gradient_norm=max(sound or norms),
            learning_rate=results[-1].learning_rate,
            tokens=TokenRecord.concatenate([tokens for _, _, tokens, *_ in gathered]) if gathered else None,
            value_loss=value_loss,
            value_gradient_norm=value_norm,
            entropy_threshold=threshold,
            failure=next((failure for *_, found, _ in gathered for failure in found), None),
            hindsight=joined_figures([figures for *_, figures in gathered]),
        )

    def capture(self, published: torch.dtype | None = None) -> dict[str, Any]:
        """Return the optimiser's state and its place in the schedule, the critic, and a reference that follows the
        policy, as this rank has them, without copies. The weights are added if they are `published` in another dtype
        than they are trained in, because steps smaller than the rounding would be lost at a restart."""
        optimizer = capture_optimizer(self.model.named_weights(), self.optimizer)
        trained = capture_trained(self.model.named_weights(), published)
        critic = {} if self.critic is None else {"critic": self.critic.capture()}
        reference = {} if self._following is None else {"reference": self._following.capture()}
        return {"steps": self.steps, "optimizer": optimizer, **trained, **critic, **reference}

    def divided(self) -> dict[str, Tensor | None]:
        """Return, for each captured tensor's place (or a place above it), a tensor that is sharded alike; None if the
        captured one belongs to another rank or is not wanted."""
        critic = {} if self.critic is None else below("critic", self.critic.divided())
        weights = {**dict.fromkeys(self.model.elsewhere), **dict(self.model.named_weights())}
        # A captured reference is not read if the policy now has a fixed one.
        reference = weights if self._following is not None else dict.fromkeys(weights)
        trained = below(TRAINED, weights)
        return {**below("optimizer", weights), **trained, **below("reference", reference), **critic}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take over a captured state, after the policy's weights. Without a state the optimiser, the critic and the
        reference begin anew; so does a critic or a reference that the state lacks.

        Raises WeightsUnusable."""
        if state is not None:
            restore_trained(self.model.named_weights(), state)
        if self.critic is not None:
            self.critic.restore(None if state is None else state.get("critic"))
        if self._following is not None:
            self._following.restore(None if state is None else state.get("reference"))
        self.steps = 0 if state is None else int(state["steps"])
        optimizer = {} if state is None else state["optimizer"]
        here = {name: values for name, values in optimizer.items() if name not in self.model.elsewhere}
        restore_optimizer(self.model.named_weights(), self.optimizer, here)
