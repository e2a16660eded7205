"""A pipeline: the layers of a model as stages on different ranks, through which micro-batches pass one after another.

Passes with gradient follow one of torch's schedules:

| schedule | stages of a rank | the order |
| --- | --- | --- |
| `1f1b` | one | forward and backward passes alternate |
| `interleaved` | two, `p` apart | the same over both stages: a smaller bubble, twice the messages |
| `zbv` | two, the second ones in the opposite direction | gradients of weights fill the bubble |

Torch's stages exchange tensors of one shape, and micro-batches differ in shape: stages send their tokens flat, padded
to the largest micro-batch. A stage computes without the padding. Passes without gradient need no schedule, and their
exchanges are not padded.

Axes: B rows, T tokens of a row that are here, M = B × T of the largest micro-batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from trainer.config import PipelineSchedule
from trainer.parallel.axes import Axis

Compute = Callable[[int, int, Tensor | None], Any]
"""(stage, micro-batch, hidden_BTD of the stage before or None) → hidden_BTD; the last stage returns two tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The ranks of a pipeline and the assignment of stages to them."""

    axis: Axis
    schedule: PipelineSchedule
    device: torch.device

    @property
    def stages_per_rank(self) -> int:
        return stages_per_rank(self.schedule)

    @property
    def stages(self) -> int:
        return self.axis.size * self.stages_per_rank

    @property
    def mine(self) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if self.place(stage) == self.axis.rank)

    @property
    def last(self) -> int:
        """The rank in the pipeline that has the last stage."""
        return self.place(self.stages - 1)

    def place(self, stage: int) -> int:
        """Return the rank in the pipeline that has a stage."""
        lap, place = divmod(stage, self.axis.size)
        back = self.schedule is PipelineSchedule.ZBV and lap % 2
        return self.axis.size - 1 - place if back else place

    def layers(self, count: int) -> list[range]:
        """Return each stage's layers, divided as evenly as possible. The first stages get the remainder, because the
        last one computes the head as well."""
        size, more = divmod(count, self.stages)
        ends = [(stage + 1) * size + min(stage + 1, more) for stage in range(self.stages)]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def taken(self, count: int) -> int:
        """Return the smallest number of micro-batches, from `count` on, that the schedule accepts."""
        count = max(1, count)
        if self.schedule is PipelineSchedule.ONE_F_ONE_B:
            return max(count, self.stages)
        while self.schedule is PipelineSchedule.INTERLEAVED and count % max(1, count // self.axis.size):
            count += 1
        return count

    def forward(self, compute: Compute, shapes: Sequence[tuple[int, int, int]]) -> dict[int, Any]:
        """Run all micro-batches, without gradient, and return the last stage's outputs by number of the micro-batch;
        ranks without the last stage return {}. `shapes` are (B, T, D).

        In every beat a stage computes the micro-batch that the stage before it computed one beat earlier.
        """
        arrived: dict[tuple[int, int], Tensor] = {}
        found: dict[int, Any] = {}
        for beat in range(len(shapes) + self.stages - 1):
            ops: list[dist.P2POp] = []
            next_beat: dict[tuple[int, int], Tensor] = {}
            for stage in self.mine:
                number = beat - stage
                if not 0 <= number < len(shapes):
                    continue
                output = compute(stage, number, arrived.pop((stage, number), None))
                if stage == self.stages - 1:
                    found[number] = output
                elif self.place(stage + 1) == self.axis.rank:
                    next_beat[stage + 1, number] = output
                else:
                    ops.append(self._op(dist.isend, output.contiguous(), stage + 1))
            for stage in self.mine:
                number = beat + 1 - stage
                if stage > 0 and 0 <= number < len(shapes) and self.place(stage - 1) != self.axis.rank:
                    next_beat[stage, number] = torch.empty(shapes[number], device=self.device)
                    ops.append(self._op(dist.irecv, next_beat[stage, number], stage - 1))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            arrived = next_beat
        return found

    def backward(
        self,
        compute: Compute,
        shapes: Sequence[tuple[int, int, int]],
        loss: Callable[[int, Any], Tensor],
        parts: Mapping[int, nn.Module],
    ) -> None:
        """Accumulate the gradient of every micro-batch's loss. `loss` gets the number of a micro-batch and the last
        stage's output. Their number must be one that `taken` returns. `parts` are the modules of this rank's stages,
        by stage."""
        most, width = max(rows * tokens for rows, tokens, _ in shapes), shapes[0][2]
        flat_MD = torch.empty(most, width, device="meta", requires_grad=True)
        numbers = torch.arange(len(shapes))
        stages = [
            PipelineStage(
                _Step(self, compute, stage, shapes, most, parts[stage]),
                stage,
                self.stages,
                self.device,
                input_args=numbers[:1] if stage == 0 else flat_MD,
                # The last stage sends its two outputs nowhere: only their number matters.
                output_args=flat_MD if stage < self.stages - 1 else (flat_MD, flat_MD),
                group=self.axis.group,
            )
            for stage in self.mine
        ]
        options: Any = {
            "n_microbatches": len(shapes),
            "loss_fn": lambda output, number: loss(int(number), output),
            "scale_grads": False,
        }
        schedule: Any
        if self.schedule is PipelineSchedule.ONE_F_ONE_B:
            schedule = Schedule1F1B(stages[0], **options)
        elif self.schedule is PipelineSchedule.INTERLEAVED:
            schedule = ScheduleInterleaved1F1B(cast("Any", stages), **options)
        else:
            schedule = ScheduleZBVZeroBubble(cast("Any", stages), **options)
        first = (numbers,) if 0 in self.mine else ()
        try:
            schedule.step(*first, number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch's stages raise it for any exception inside them
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise

    def from_last(self, values: Sequence[Tensor] | None, counts: Sequence[int]) -> list[Tensor]:
        """Broadcast float32 vectors from the last stage's rank; `counts` are their lengths. Other ranks pass None."""
        joined = torch.empty(sum(counts), device=self.device) if values is None else torch.cat(list(values))
        if joined.numel():
            dist.broadcast(joined, group=self.axis.group, group_src=self.last)
        return list(torch.split(joined, list(counts)))

    def share_ends(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over the ranks of the first and the last stage. Only these two call it, and they differ."""
        other = self.last if self.axis.rank == 0 else 0
        theirs = torch.empty_like(gradient)
        ops = [
            dist.P2POp(dist.isend, gradient, group=self.axis.group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self.axis.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return gradient + theirs

    def sum(self, value: float) -> float:
        """Sum a number over the ranks of the pipeline."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.axis.group)
        return total.item()

    def _op(self, action: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(action, tensor, group=self.axis.group, group_peer=self.place(stage))


class _Step(nn.Module):
    """A stage as torch's schedules call it: flat, padded tokens in and out, the micro-batch's own shape inside."""

    def __init__(
        self,
        pipeline: Pipeline,
        compute: Compute,
        stage: int,
        shapes: Sequence[tuple[int, int, int]],
        most: int,
        part: nn.Module,
    ) -> None:
        super().__init__()
        self._compute = compute
        self._stage = stage
        self._last = stage == pipeline.stages - 1
        self._shapes = shapes
        self._most = most
        # ZBV needs the module to find the weights whose gradients it postpones. The other schedules must not see it:
        # they would gather sharded parameters and clear gradients themselves, which FSDP does already.
        self.part = part if pipeline.schedule is PipelineSchedule.ZBV else None

    def forward(self, received: Tensor, *, number: Tensor) -> Any:
        place = int(number)
        rows, tokens, width = self._shapes[place]
        hidden_BTD = None if self._stage == 0 else received[: rows * tokens].view(rows, tokens, width)
        output = self._compute(self._stage, place, hidden_BTD)
        if self._last:
            return tuple(output)
        return functional.pad(output.flatten(0, 1), (0, 0, 0, self._most - rows * tokens))


def stages_per_rank(schedule: PipelineSchedule) -> int:
    return 1 if schedule is PipelineSchedule.ONE_F_ONE_B else 2
