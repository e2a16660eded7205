"""A mixture of experts: a router sends each token to a few of them.

Axes: M tokens, S tokens sent (each once per expert it goes to), E experts, D hidden, I width of an expert.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainer.models.archon.config import ExpertsConfig
from trainer.parallel.axes import Axes, Axis, exchange, local


class Experts(nn.Module):
    """The experts' weights, stacked. Under `expert` each rank has some of them."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(config.count, config.intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(config.count, config.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.count, hidden, config.intermediate))

    def forward(self, sent_SD: Tensor, counts: list[int]) -> Tensor:
        """`counts[i]` tokens go to the i-th expert here, in order."""
        gate, up, down = local(self.gate_proj), local(self.up_proj), local(self.down_proj)
        outputs = []
        for expert, part_SD in enumerate(torch.split(sent_SD, counts)):
            inner = functional.silu(functional.linear(part_SD, gate[expert]))
            inner = inner * functional.linear(part_SD, up[expert])
            outputs.append(functional.linear(inner, down[expert]))
        return torch.cat(outputs)


class _WithLoss(torch.autograd.Function):
    """Pass a tensor on, with a loss beside it that reaches the backward pass wherever the tensor's own gradient does.

    So a loss within a layer needs no way to the model's output, through checkpoints and stages of a pipeline.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


def balance_loss(odds_ME: Tensor, chosen: Tensor, balance_M: Tensor, axis: Axis) -> Tensor:
    """Return Σ_m b_m · E · Σ_e f_e p_me, the load-balancing loss of a router over the tokens that are here, each with
    its weight b (Switch Transformer, https://arxiv.org/abs/2101.03961, equations 4 to 6).

    p are the router's odds; f_e is the share of an expert e among all choices of the tokens of the rows, by weight,
    and has no gradient. It is counted over the ranks that have tokens of the same rows. An even load costs Σ b,
    however many experts a token goes to.
    """
    with torch.no_grad():
        per_token, count = chosen.shape[1], odds_ME.shape[1]
        load_E = torch.zeros(count, device=odds_ME.device).index_add(
            0, chosen.flatten(), balance_M.repeat_interleave(per_token)
        )
        if axis.size > 1:
            dist.all_reduce(load_E, group=axis.group)
        shares_E = load_E / load_E.sum().clamp_min(torch.finfo(load_E.dtype).tiny)
    return count * (balance_M[:, None] * odds_ME * shares_E).sum()


class MixtureOfExperts(nn.Module):
    """A router and its experts, one of `layers` such layers of a model."""

    def __init__(self, hidden: int, config: ExpertsConfig, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        self.axes = Axes()
        self.per_token = config.per_token
        self.normalised = config.normalised
        self.count = config.count
        self.gate = nn.Linear(hidden, config.count, bias=False)
        self.experts = Experts(hidden, config)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_BTD: Tensor, balance_M: Tensor | None = None) -> Tensor:
        """Send each token through its experts; with `balance_M` the gradient has that of `balance_loss`, as a mean
        over the layers of this kind.

        Not compiled: each number of tokens that an expert gets would be a graph of its own.
        """
        hidden_MD = hidden_BTD.flatten(0, 1)
        odds_ME = functional.linear(hidden_MD, local(self.gate.weight)).softmax(-1, dtype=torch.float32)
        weights, chosen = odds_ME.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if balance_M is not None:
            loss = balance_loss(odds_ME, chosen, balance_M, self.axes.tokens) / self.layers
            weights = cast("Tensor", cast("Any", _WithLoss).apply(weights, loss))
        order_S = chosen.flatten().argsort(stable=True)
        token_S = order_S // self.per_token
        counts_E = torch.bincount(chosen.flatten(), minlength=self.count)
        output_SD = self._exchanged(hidden_MD[token_S], counts_E)
        output_SD = (output_SD * weights.flatten()[order_S, None]).to(hidden_MD.dtype)
        return torch.zeros_like(hidden_MD).index_add(0, token_S, output_SD).view_as(hidden_BTD)

    def _exchanged(self, sent_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Through the experts, wherever they are; `sent_SD` is in the order of the experts and so is the result."""
        axis = self.axes.expert
        if axis.size == 1:
            found: Tensor = self.experts(sent_SD, counts_E.tolist())
            return found
        here = self.count // axis.size
        counts_by_source = exchange(counts_E, axis).view(axis.size, here)
        send, receive = counts_E.view(axis.size, here).sum(-1).tolist(), counts_by_source.sum(-1).tolist()
        expert_S = torch.arange(here, device=counts_E.device).repeat(axis.size)
        order_S = expert_S.repeat_interleave(counts_by_source.flatten()).argsort(stable=True)
        arrived_SD = exchange(sent_SD, axis, receive, send)[order_S]
        output_SD = self.experts(arrived_SD, counts_by_source.sum(0).tolist())
        back_SD = torch.zeros_like(output_SD).index_copy(0, order_S, output_SD)
        return exchange(back_SD, axis, send, receive)
