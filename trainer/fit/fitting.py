"""Optimiser steps over examples or pairs, in rows packed as the loop packs them.

Axes: N learnt tokens of a micro-batch, S sides of a batch of pairs (chosen and rejected in turn), P = S / 2 pairs.

The loss of a pair depends on each side only through one number: a sum of log-probabilities, or a score. So a batch
takes two passes: the first, without gradients, computes those numbers, from which the gradient of each side's number
follows; the second computes the gradient, micro-batch by micro-batch. Neither a pair nor a side has to fit into one
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from proxy.contract.trajectory import Trajectory
from trainer.algorithm.imitation import negative_log_likelihood
from trainer.algorithm.preferences import PairLoss, PreferenceInputs, accuracy, bradley_terry, preference_loss
from trainer.algorithm.presets import resolve
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, pack
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing, PreferenceForm
from trainer.errors import NothingToFit
from trainer.fit.records import Example, Labelled, Pair
from trainer.models.policy import Policy
from trainer.optimizer import adamw, learning_rate_at, step_at

_Item = TypeVar("_Item", Example, Labelled, Pair)
_Learnt_contra = TypeVar("_Learnt_contra", Example, Labelled, Pair, contravariant=True)
# Bounds the memory of an evaluation, which has no batch size of its own.
_EVALUATED_AT_ONCE = 64
# The algorithm that packing asks which sequences have a gradient; with an advantage of 1, all have.
_PACKING = resolve(AlgorithmSettings())

Figures = dict[str, float]


class Objective(Protocol[_Learnt_contra]):
    """A loss over a batch of items. `accumulate` adds its gradient and returns its value; `evaluate` returns the
    figures of held-out items."""

    def accumulate(self, items: Sequence[_Learnt_contra]) -> float: ...

    def evaluate(self, items: Sequence[_Learnt_contra]) -> Figures: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    epoch: int
    step: int
    of: int
    loss: float
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The course of a fit: `steps` were taken, and `skipped` more had a gradient that was not finite. `loss` is the
    mean of the last epoch, `gradient_norm` the largest."""

    steps: int
    skipped: int
    loss: float
    gradient_norm: float
    learning_rate: float


def train(
    model: Policy | nn.Module,
    objective: Objective[_Item],
    items: Sequence[_Item],
    settings: OptimizerSettings,
    *,
    epochs: int,
    batch: int,
    seed: int,
    report: Callable[[Progress], None],
) -> Course:
    """Train with a new AdamW on the items, in another order each epoch. Raises NothingToFit if no gradient was
    finite."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(model, settings)
    generator = torch.Generator().manual_seed(seed)
    number, steps, skipped, largest, rate = 0, 0, 0, 0.0, 0.0
    total = epochs * math.ceil(len(items) / batch)
    if settings.total_steps is None:
        settings = settings.model_copy(update={"total_steps": total})
    losses: list[float] = []
    for epoch in range(epochs):
        losses = []
        order = torch.randperm(len(items), generator=generator).tolist()
        for start in range(0, len(order), batch):
            number += 1
            optimizer.zero_grad(set_to_none=True)
            losses.append(objective.accumulate([items[index] for index in order[start : start + batch]]))
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm))
            if math.isfinite(norm):
                rate = learning_rate_at(steps, settings)
                step_at(optimizer, rate)
                steps, largest = steps + 1, max(largest, norm)
            else:
                skipped += 1
            report(
                Progress(
                    epoch=epoch + 1,
                    step=number,
                    of=total,
                    loss=losses[-1],
                    gradient_norm=norm,
                    learning_rate=rate,
                )
            )
    optimizer.zero_grad(set_to_none=True)
    if not steps:
        raise NothingToFit("no gradient was finite, so the weights are as before; try a smaller --learning-rate")
    return Course(
        steps=steps,
        skipped=skipped,
        loss=sum(losses) / len(losses),
        gradient_norm=largest,
        learning_rate=rate,
    )


class Imitation:
    """The negative log-likelihood of the examples' outputs, a mean over the tokens of a batch."""

    def __init__(self, model: Policy, settings: BatchSettings, device: torch.device) -> None:
        self._model = model
        self._settings = settings.taken_by(model.packings)
        self._device = device

    def accumulate(self, items: Sequence[Example]) -> float:
        return self._go_through(items, learns=True)

    def evaluate(self, items: Sequence[Example]) -> Figures:
        return {"loss": self._go_through(items, learns=False)}

    def _go_through(self, items: Sequence[Example], *, learns: bool) -> float:
        micro_batches = packed([each.trajectory for each in items], self._settings)
        tokens = sum(each.targets_N.numel() for each in micro_batches)
        total = 0.0
        for each in micro_batches:
            with torch.set_grad_enabled(learns):
                logprobs_N = logprobs_of(self._model, each.to(self._device))
                loss = negative_log_likelihood(logprobs_N, torch.full_like(logprobs_N, 1 / tokens))
            if learns:
                torch.autograd.backward(loss)
            total += loss.item()
        return total


class Preferences:
    """DPO and its variants. The reference is the model when `remember` was called, so no second model is needed."""

    def __init__(
        self,
        model: Policy,
        settings: BatchSettings,
        device: torch.device,
        form: PreferenceForm,
        beta: float,
        label_smoothing: float,
    ) -> None:
        self._model = model
        self._settings = settings.taken_by(model.packings)
        self._device = device
        self._form = form
        self._beta = beta
        self._label_smoothing = label_smoothing
        self._reference: dict[str, tuple[float, float]] = {}

    def remember(self, pairs: Sequence[Pair]) -> None:
        """Store the model's current log-probabilities of the sides of every pair that will be learnt from or
        evaluated."""
        for part in _parts(pairs, _EVALUATED_AT_ONCE):
            values_S, _ = measured(_sides(part), self._settings, self._measure)
            for pair, chosen, rejected in zip(part, values_S[::2].tolist(), values_S[1::2].tolist(), strict=True):
                self._reference[pair.id] = (chosen, rejected)

    def accumulate(self, items: Sequence[Pair]) -> float:
        return _learn_pairs(items, self._settings, self._measure, self._loss)

    def evaluate(self, items: Sequence[Pair]) -> Figures:
        return _evaluate_pairs(items, self._settings, self._measure, self._loss)

    def _measure(self, batch: MicroBatch, sides: int) -> Tensor:
        """Return the log-probability of each side's answers, as far as the micro-batch contains them, as S values."""
        batch = batch.to(self._device)
        logprobs_N = logprobs_of(self._model, batch)
        return torch.zeros(sides, device=self._device).index_add(0, batch.trajectory_N, logprobs_N)

    def _loss(self, items: Sequence[Pair], values_S: Tensor, tokens_S: Tensor, count: int) -> PairLoss:
        reference = torch.tensor([self._reference[pair.id] for pair in items], dtype=values_S.dtype)
        inputs = PreferenceInputs(
            chosen_P=values_S[::2],
            rejected_P=values_S[1::2],
            reference_chosen_P=reference[:, 0],
            reference_rejected_P=reference[:, 1],
            chosen_tokens_P=tokens_S[::2],
            rejected_tokens_P=tokens_S[1::2],
            share_P=torch.full((len(items),), 1 / count, dtype=values_S.dtype),
        )
        return preference_loss(inputs, self._form, self._beta, self._label_smoothing)


class Ranking:
    """The loss of a reward model. `score` returns the score of each last learnt token, by its place in the flattened
    rows."""

    def __init__(
        self, score: Callable[[Tensor, Tensor, Tensor], Tensor], settings: BatchSettings, device: torch.device
    ) -> None:
        self._score = score
        self._settings = settings.taken_by({Packing.PADDED, Packing.PACKED})
        self._device = device

    def accumulate(self, items: Sequence[Pair]) -> float:
        return _learn_pairs(items, self._settings, self._measure, self._loss)

    def evaluate(self, items: Sequence[Pair]) -> Figures:
        return _evaluate_pairs(items, self._settings, self._measure, self._loss)

    def _measure(self, batch: MicroBatch, sides: int) -> Tensor:
        batch = batch.to(self._device)
        last_N = batch.trajectory_N != torch.cat([batch.trajectory_N[1:], batch.trajectory_N.new_full((1,), -1)])
        places = batch.predictor_N[last_N] + 1
        scores = self._score(batch.input_ids_BT, batch.position_ids_BT, places)
        return torch.zeros(sides, device=self._device).index_add(0, batch.trajectory_N[last_N], scores)

    @staticmethod
    def _loss(items: Sequence[Pair], values_S: Tensor, tokens_S: Tensor, count: int) -> PairLoss:
        share_P = torch.full((len(items),), 1 / count, dtype=values_S.dtype)
        return bradley_terry(values_S[::2], values_S[1::2], share_P)


Measure = Callable[[MicroBatch, int], Tensor]
_PairLosses = Callable[[Sequence[Pair], Tensor, Tensor, int], PairLoss]


def _learn_pairs(items: Sequence[Pair], settings: BatchSettings, measure: Measure, losses: _PairLosses) -> float:
    values_S, tokens_S = measured(_sides(items), settings, measure)
    values_S.requires_grad_()
    loss = losses(items, values_S, tokens_S, len(items)).loss
    (slopes_S,) = torch.autograd.grad(loss, values_S)
    for each in packed(_sides(items), settings):
        own_S = measure(each, len(slopes_S))
        torch.autograd.backward((own_S * slopes_S.to(own_S)).sum())
    return loss.item()


def _evaluate_pairs(items: Sequence[Pair], settings: BatchSettings, measure: Measure, losses: _PairLosses) -> Figures:
    margins, loss = [], 0.0
    for part in _parts(items, _EVALUATED_AT_ONCE):
        values_S, tokens_S = measured(_sides(part), settings, measure)
        found = losses(part, values_S, tokens_S, len(items))
        loss += found.loss.item()
        margins.append(found.margin_P)
    margin_P = torch.cat(margins)
    return {"loss": loss, "accuracy": accuracy(margin_P), "margin": margin_P.mean().item()}


def measured(sides: Sequence[Trajectory], settings: BatchSettings, measure: Measure) -> tuple[Tensor, Tensor]:
    """Return (values, learnt tokens) of the sides, without gradient, as float64 on the CPU."""
    values_S = torch.zeros(len(sides), dtype=torch.float64)
    tokens_S = torch.zeros(len(sides), dtype=torch.float64)
    with torch.no_grad():
        for each in packed(sides, settings):
            values_S += measure(each, len(sides)).double().cpu()
            tokens_S += torch.bincount(each.trajectory_N, minlength=len(sides))
    return values_S, tokens_S


def _sides(items: Sequence[Pair]) -> list[Trajectory]:
    return [side for pair in items for side in (pair.chosen, pair.rejected)]


def _parts(items: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def packed(trajectories: Sequence[Trajectory], settings: BatchSettings) -> list[MicroBatch]:
    """Return the trajectories as micro-batches, whose `trajectory_N` indexes `trajectories`."""
    batch = Batch(trajectories=tuple(trajectories), groups=tuple(range(len(trajectories))), base_version=0)
    advantages = [[1.0] * len(each.turns) for each in trajectories]
    return pack(batch, advantages, linearise(trajectories), settings, _PACKING)


def logprobs_of(model: Policy, batch: MicroBatch) -> Tensor:
    """Return the N log-probabilities, each at its token's temperature."""
    logprobs_N: Tensor = model(
        batch.input_ids_BT,
        batch.position_ids_BT,
        batch.predictor_N,
        batch.targets_N,
        batch.temperature_N,
        batch.reach_BT,
    )[0]
    return logprobs_N
