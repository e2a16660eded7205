"""A policy whose layers are pipeline stages on different ranks (`parallel/pipeline.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.models.archon.model import EMBEDDING, ArchonModel, CausalModel
from trainer.models.huggingface import PolicyModel
from trainer.models.passes import Loss, Rows, Scores
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.tensor import total_norm


class PipelinedModel(PolicyModel):
    """This rank's stages of a model. Every rank of a pipeline gets the same rows and returns the same scores.

    A tied weight belongs to the first stage and to the last. If these are on different ranks, each has a copy; both
    get the sum of their gradients, so the copies stay equal.
    """

    def __init__(self, whole: ArchonModel, pipeline: Pipeline) -> None:
        layers = pipeline.layers(whole.config.layers)
        stages = {stage: whole.causal.stage(layers[stage]) for stage in pipeline.mine}
        super().__init__(nn.ModuleList(stages.values()), whole.precision, whole.causal.token_logprobs)
        self.config = whole.config
        self._pipeline = pipeline
        self._stages: Mapping[int, CausalModel] = stages
        self._elsewhere = frozenset(name for name, _ in whole.named_weights()) - {
            name for name, _ in self.named_weights()
        }

    @property
    def stages(self) -> list[CausalModel]:
        return list(self._stages.values())

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of this rank's stages."""
        return nn.ModuleList(layer for stage in self.stages for layer in stage.model.layers.values())

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages under their names in the whole model."""
        yield from {name: weight for stage in self.stages for name, weight in stage.named_weights()}.items()

    def own_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.named_weights()

    @property
    def elsewhere(self) -> frozenset[str]:
        return self._elsewhere

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        if not rows:
            return []
        with torch.no_grad():
            found = self._pipeline.forward(self._computing(rows), self._shapes(rows))
            return self._everywhere([found.get(number) for number in range(len(rows))], rows)

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]:
        """Accumulate gradients as in `Passes.learn`. The gradients of a tied weight are exchanged at the end, so one
        optimiser step must be one call."""
        if not rows:
            return []
        idle = _idle(rows[0].input_ids_BT.device)
        taken = [*rows, *[idle] * (self._pipeline.taken(len(rows)) - len(rows))]
        found: list[Scores | None] = [None] * len(taken)

        def loss_of(number: int, output: tuple[Tensor, Tensor]) -> Tensor:
            scores = Scores(*output)
            found[number] = Scores(scores.logprobs_N.detach().clone(), scores.entropies_N.detach().clone())
            return loss(number, scores) if number < len(rows) else scores.logprobs_N.sum()

        self._pipeline.backward(
            self._computing(taken), self._shapes(taken), loss_of, cast("Mapping[int, nn.Module]", self._stages)
        )
        self._share_tied_gradient()
        return self._everywhere(found[: len(rows)], rows)

    def gradient_norm(self) -> float:
        copy = self._tied_copy if self._pipeline.axis.rank > 0 else None
        mine = [weight.grad for weight in self.parameters() if weight is not copy and weight.grad is not None]
        return math.sqrt(self._pipeline.sum(total_norm(mine) ** 2))

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        predictor_N: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        reach_BT: Tensor | None = None,
        balance: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Score rows without a gradient. `balance` has no effect: only `learn` computes gradients."""
        return self.score([Rows(input_ids_BT, position_ids_BT, predictor_N, targets_N, temperature_N, reach_BT)])[0]

    def _computing(self, rows: Sequence[Rows]) -> Any:
        def compute(stage: int, number: int, hidden_BTD: Tensor | None) -> Tensor | Scores:
            output: Tensor | Scores = self._stages[stage](rows[number], hidden_BTD)
            return output

        return compute

    def _shapes(self, rows: Sequence[Rows]) -> list[tuple[int, int, int]]:
        part = self.stages[0]
        return [(len(each.input_ids_BT), part.tokens_here(each), self.config.hidden) for each in rows]

    def _everywhere(self, found: Sequence[Scores | None], rows: Sequence[Rows]) -> list[Scores]:
        """Broadcast the last stage's scores to every rank of the pipeline."""
        values = [value for scores in found if scores is not None for value in scores]
        here = self._pipeline.axis.rank == self._pipeline.last
        counts = [count for each in rows for count in [len(each.targets_N)] * 2]
        vectors = iter(self._pipeline.from_last(values if here else None, counts))
        return [Scores(logprobs_N, entropies_N) for logprobs_N, entropies_N in zip(vectors, vectors, strict=True)]

    @property
    def _tied_copy(self) -> nn.Parameter | None:
        """The tied weight if this rank has one of its two copies, else None."""
        pipeline = self._pipeline
        if not self.config.tied or pipeline.last == 0 or pipeline.axis.rank not in (0, pipeline.last):
            return None
        return dict(self.named_weights())[EMBEDDING]

    def _share_tied_gradient(self) -> None:
        weight = self._tied_copy
        if weight is None or weight.grad is None:
            return
        with torch.no_grad():
            mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            mine.copy_(self._pipeline.share_ends(mine))


def _idle(device: torch.device) -> Rows:
    """Return rows with one token and without targets, which fill up the schedule's number of micro-batches."""
    one_BT = torch.zeros(1, 1, dtype=torch.long, device=device)
    return Rows(one_BT, one_BT, one_BT[0, :0], one_BT[0, :0], torch.zeros(0, device=device))
