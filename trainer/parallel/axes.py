"""The axes along which ranks divide a forward pass, and the exchanges between their ranks, with gradients.

Every rank of an axis calls the same exchanges in the same order, forward and backward. The loss of a rank covers its
own tokens only; the gradients that other ranks derive from these tokens arrive in the backward pass.
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
    """The ranks that divide one dimension, and this rank's place among them. `group` is None for a single rank."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = Axis()


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The axes of a layout. `tokens` joins `context` and `tensor` (innermost): all ranks that see the same rows."""

    tensor: Axis = ALONE
    context: Axis = ALONE
    expert: Axis = ALONE
    tokens: Axis = ALONE


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter that may be sharded.

    The gradient of a replicated parameter is declared partial: the ranks' gradients are summed.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    gradient: list[Placement] = [Partial() if isinstance(each, Replicate) else each for each in parameter.placements]
    return parameter.to_local(grad_placements=gradient)


def gather_tokens(tensor_BTD: Tensor, axis: Axis) -> Tensor:
    """Concatenate the tokens of all ranks of the axis, in rank order. Gradients are summed over the ranks."""
    return tensor_BTD if axis.size == 1 else _apply(_GatherTokens, tensor_BTD, axis)


def scatter_tokens(tensor_BTD: Tensor, axis: Axis) -> Tensor:
    """Sum the tensor over the ranks of the axis and return this rank's share of the tokens."""
    return tensor_BTD if axis.size == 1 else _apply(_ScatterTokens, tensor_BTD, axis)


def exchange(
    tensor: Tensor, axis: Axis, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
) -> Tensor:
    """All-to-all along the first dimension: `send[i]` rows go to rank i and `receive[i]` rows come from it. Without
    `send` and `receive` the rows are divided evenly."""
    if axis.size == 1:
        return tensor
    return _apply(_Exchange, tensor, axis, receive, send)


def tokens_to_heads(tensor_BTHK: Tensor, axis: Axis) -> Tensor:
    """Exchange a share of the tokens with all heads for all tokens with a share of the heads."""
    if axis.size == 1:
        return tensor_BTHK
    parts = torch.stack(tensor_BTHK.chunk(axis.size, dim=2))
    return torch.cat(exchange(parts, axis).unbind(0), dim=1)


def heads_to_tokens(tensor_BTHK: Tensor, axis: Axis) -> Tensor:
    """Exchange all tokens with a share of the heads for a share of the tokens with all heads."""
    if axis.size == 1:
        return tensor_BTHK
    parts = torch.stack(tensor_BTHK.chunk(axis.size, dim=1))
    return torch.cat(exchange(parts, axis).unbind(0), dim=2)


def assemble(mine: Tensor, places: Tensor, count: int, axis: Axis) -> Tensor:
    """Return all `count` values on every rank; each value is on one rank before, this rank's at `places`.

    Every rank may compute the loss of all values: a value's gradient goes to the rank that gave it.
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
