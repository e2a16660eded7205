"""The axes along which ranks divide a forward pass, and the exchanges between their ranks, with gradients.

Every rank of an axis calls the same exchanges in the same order, forward and backward. The loss of a rank counts what
depends on its own tokens; what other ranks derive from these reaches it in the backward pass.
Axes of tensors: B rows, T tokens, H heads, K width of a head, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Ranks that divide something among them, and this one's place; alone without a group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = Axis()


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """`tokens` are the ranks of `context` and `tensor` together, `tensor` innermost: all that see the same rows."""

    tensor: Axis = ALONE
    context: Axis = ALONE
    expert: Axis = ALONE
    tokens: Axis = ALONE


def local(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter that may be divided. Of one that is not divided, each rank's gradient is a
    part of the sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    gradient: list[Placement] = [Partial() if isinstance(each, Replicate) else each for each in parameter.placements]
    return parameter.to_local(grad_placements=gradient)


def gather_tokens(tensor_BTD: Tensor, axis: Axis) -> Tensor:
    """The tokens of all ranks of the axis, in their order. Gradients are summed over the ranks."""
    return tensor_BTD if axis.size == 1 else _apply(_GatherTokens, tensor_BTD, axis)


def scatter_tokens(tensor_BTD: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks of the axis, of which each rank keeps its tokens."""
    return tensor_BTD if axis.size == 1 else _apply(_ScatterTokens, tensor_BTD, axis)


def exchange(
    tensor: Tensor, axis: Axis, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
) -> Tensor:
    """All-to-all along the first dimension: `send[i]` rows go to rank i and `receive[i]` come from it; without them
    as many to each."""
    if axis.size == 1:
        return tensor
    return _apply(_Exchange, tensor, axis, receive, send)


def tokens_to_heads(tensor_BTHK: Tensor, axis: Axis) -> Tensor:
    """From some tokens with all heads to all tokens with some heads."""
    if axis.size == 1:
        return tensor_BTHK
    parts = torch.stack(tensor_BTHK.chunk(axis.size, dim=2))
    return torch.cat(exchange(parts, axis).unbind(0), dim=1)


def heads_to_tokens(tensor_BTHK: Tensor, axis: Axis) -> Tensor:
    """The way back."""
    if axis.size == 1:
        return tensor_BTHK
    parts = torch.stack(tensor_BTHK.chunk(axis.size, dim=1))
    return torch.cat(exchange(parts, axis).unbind(0), dim=2)


def assemble(mine: Tensor, places: Tensor, count: int, axis: Axis) -> Tensor:
    """Of `count` values each is at one rank of the axis: at `places` those that are here. All of them, everywhere.

    The loss of all of them may be computed at each rank: the gradient goes to the rank where a value came from.
    """
    if axis.size == 1:
        return mine
    return _apply(_Sum, mine.new_zeros(count).index_copy(0, places, mine), axis)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast("Tensor", _uncompiled(function, *arguments))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.axis), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(tensor, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: Axis, receive: Sequence[int] | None, send: Sequence[int] | None
    ) -> Tensor:
        ctx.axis, ctx.receive, ctx.send = axis, receive, send
        return _exchanged(tensor, axis, receive, send)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.axis, ctx.send, ctx.receive), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _gathered(tensor: Tensor, axis: Axis) -> Tensor:
    parts = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_single(parts, tensor.contiguous(), group=axis.group)
    return torch.cat(parts.chunk(axis.size), dim=1)


def _scattered(tensor: Tensor, axis: Axis) -> Tensor:
    parts = torch.cat(tensor.chunk(axis.size, dim=1))
    result = parts.new_empty((tensor.shape[0], *parts.shape[1:]))
    dist.reduce_scatter_single(result, parts, group=axis.group)
    return result


def _exchanged(tensor: Tensor, axis: Axis, receive: Sequence[int] | None, send: Sequence[int] | None) -> Tensor:
    rows = tensor.shape[0] if receive is None else sum(receive)
    result = tensor.new_empty((rows, *tensor.shape[1:]))
    dist.all_to_all_single(
        result,
        tensor.contiguous(),
        None if receive is None else list(receive),
        None if send is None else list(send),
        group=axis.group,
    )
    return result
