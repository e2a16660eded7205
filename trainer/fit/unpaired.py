"""Learning from answers that are desirable or not (KTO), over micro-batches.

Axes: E examples of a batch, M mismatched pairs.

As with pairs (`fitting.py`), the loss depends on an example through one number, the summed log-probability of its
answer. So a batch takes two passes: without gradients for these numbers, then for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan
from trainer.algorithm.kto import KtoInputs, KtoLoss, kto_loss
from trainer.algorithm.preferences import accuracy
from trainer.batching.packing import MicroBatch
from trainer.batching.sequences import TrainingSequence, training_sequences
from trainer.config import BatchSettings
from trainer.fit.fitting import Figures, logprobs_of, measured, packed
from trainer.fit.records import Labelled
from trainer.models.policy import Policy


class Unpaired:
    """KTO. The reference is the model when `remember` was called, so no second model is needed.

    For the reference point, every example's prompt is paired with the answer to another example, once for the whole
    fit, so that the reference scores each pair once. A batch estimates the point from the pairs of its own examples.
    `context` bounds the length of such a pair; None: unknown.
    """

    def __init__(
        self,
        model: Policy,
        settings: BatchSettings,
        device: torch.device,
        *,
        beta: float,
        desirable_weight: float,
        undesirable_weight: float,
        context: int | None = None,
    ) -> None:
        self._model = model
        self._settings = settings.taken_by(model.packings)
        self._device = device
        self._beta = beta
        self._desirable_weight = desirable_weight
        self._undesirable_weight = undesirable_weight
        self._context = context
        self._reference: dict[str, float] = {}
        self._mismatched: dict[str, tuple[Trajectory, float]] = {}

    def remember(self, items: Sequence[Labelled]) -> None:
        """Store the model's current log-probabilities of every example that will be learnt from or evaluated, and of
        its mismatched pair."""
        values_E, _ = measured([each.trajectory for each in items], self._settings, self._measure)
        self._reference = dict(zip((each.id for each in items), values_E.tolist(), strict=True))
        pairs: dict[str, Trajectory] = {}
        for item, other in zip(items, [*items[-1:], *items[:-1]], strict=True):
            pair = mismatched(item.trajectory, other.trajectory, self._context) if len(items) > 1 else None
            if pair is not None:
                pairs[item.id] = pair
        values_M, _ = measured(list(pairs.values()), self._settings, self._measure)
        self._mismatched = {
            name: (pair, value) for (name, pair), value in zip(pairs.items(), values_M.tolist(), strict=True)
        }

    def accumulate(self, items: Sequence[Labelled]) -> float:
        values_E, _ = measured([each.trajectory for each in items], self._settings, self._measure)
        values_E.requires_grad_()
        loss = self._loss(items, values_E).loss
        (slopes_E,) = torch.autograd.grad(loss, values_E)
        for each in packed([item.trajectory for item in items], self._settings):
            own_E = self._measure(each, len(slopes_E))
            torch.autograd.backward((own_E * slopes_E.to(own_E)).sum())
        return loss.item()

    def evaluate(self, items: Sequence[Labelled]) -> Figures:
        """Return the loss, the share of examples on the right side of the reference point (an example at the point
        counts half), and the mean reward of desirable examples above that of the others, if there are both."""
        values_E, _ = measured([each.trajectory for each in items], self._settings, self._measure)
        found = self._loss(items, values_E)
        desirable_E = torch.tensor([item.desirable for item in items])
        ahead_E = torch.where(desirable_E, 1, -1) * (found.rewards_E - found.point)
        good_E, bad_E = found.rewards_E[desirable_E], found.rewards_E[~desirable_E]
        figures = {
            "loss": found.loss.item(),
            "accuracy": accuracy(ahead_E),
            "reference_point": found.point,
        }
        if good_E.numel() and bad_E.numel():
            figures["margin"] = (good_E.mean() - bad_E.mean()).item()
        return figures

    def _loss(self, items: Sequence[Labelled], values_E: Tensor) -> KtoLoss:
        pairs = [self._mismatched[item.id] for item in items if item.id in self._mismatched]
        values_M, _ = measured([pair for pair, _ in pairs], self._settings, self._measure)
        inputs = KtoInputs(
            logprobs_E=values_E,
            reference_E=torch.tensor([self._reference[item.id] for item in items], dtype=values_E.dtype),
            mismatched_M=values_M,
            mismatched_reference_M=torch.tensor([value for _, value in pairs], dtype=values_E.dtype),
            desirable_E=torch.tensor([item.desirable for item in items]),
            share_E=torch.full((len(items),), 1 / len(items), dtype=values_E.dtype),
        )
        return kto_loss(inputs, self._beta, self._desirable_weight, self._undesirable_weight)

    def _measure(self, batch: MicroBatch, examples: int) -> Tensor:
        """Return the log-probability of each example's answer, as far as the micro-batch contains it, as E values."""
        batch = batch.to(self._device)
        logprobs_N = logprobs_of(self._model, batch)
        return torch.zeros(examples, device=self._device).index_add(0, batch.trajectory_N, logprobs_N)


def mismatched(prompt_of: Trajectory, answer_of: Trajectory, context: int | None) -> Trajectory | None:
    """Return the prompt of one trajectory before the answer of another, with the turns that follow it, cut to the
    `context`. The prompt is everything before the first trained token. Return None if the context leaves no room."""
    head, tail = training_sequences(prompt_of, 0)[0], training_sequences(answer_of, 0)[0]
    prompt = head.ids[: head.spans[0].start]
    turns: list[TrajectoryTurn] = []
    length = 0
    for span, before in zip(tail.spans, _before(prompt, tail), strict=True):
        room = None if context is None else context - length - len(before)
        original = answer_of.turns[span.turn]
        output = original.output_ids if room is None else original.output_ids[: max(0, room)]
        turn = TrajectoryTurn(
            id=original.id,
            parent=len(turns) - 1 if turns else None,
            prefix_tokens=length,
            packed_prompt_ids=pack_ids(before),
            packed_output_ids=pack_ids(output),
            packed_logprobs=pack_logprobs([0.0] * len(output)),
            spans=(VersionSpan(version=0, start=0, end=len(output)),) if output else (),
            temperature=1.0,
            convention=LogprobConvention.SAMPLED,
            trainable=True,
            masked=_moved(original, len(before), len(output)),
        )
        if not turn.learnt:
            break
        turns.append(turn)
        length += len(before) + len(output)
    if not turns:
        return None
    return Trajectory(session_id=answer_of.session_id, group_id=None, task=None, reward=None, turns=tuple(turns))


def _moved(turn: TrajectoryTurn, before: int, kept: int) -> tuple[tuple[int, int], ...]:
    """Return the redacted places among the first `kept` tokens of the turn's output, shifted by `before` tokens of
    prompt."""
    first = len(turn.prompt_ids)
    spans = ((max(start - first, 0), min(end - first, kept)) for start, end in turn.masked)
    return tuple((before + start, before + end) for start, end in spans if start < end)


def _before(prompt: Sequence[int], tail: TrainingSequence) -> list[Sequence[int]]:
    """Return the tokens before each trained span: the other prompt, then the tokens between the spans."""
    ends = [span.start + span.length for span in tail.spans]
    between = [tail.ids[end : span.start] for end, span in zip(ends, tail.spans[1:], strict=False)]
    return [prompt, *between]
