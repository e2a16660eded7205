"""A mixture of experts: a router sends each token to a few experts.

Axes: M tokens, S sent tokens (each once per chosen expert), E experts, D hidden, I width of an expert.
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
    """The stacked weights of experts. With the axis `expert` each rank has some of the experts."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(config.count, config.intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(config.count, config.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.count, hidden, config.intermediate))

    def forward(self, sent_SD: Tensor, counts: list[int]) -> Tensor:
        """Apply the experts, SD. The first `counts[0]` tokens go to this rank's first expert, and so on."""
        gate, up, down = local(self.gate_proj), local(self.up_proj), local(self.down_proj)
        outputs = []
        for expert, part_SD in enumerate(torch.split(sent_SD, counts)):
            inner = functional.silu(functional.linear(part_SD, gate[expert]))
            inner = inner * functional.linear(part_SD, up[expert])
            outputs.append(functional.linear(inner, down[expert]))
        return torch.cat(outputs)


class _WithLoss(torch.autograd.Function):
    """Return a tensor unchanged, and add the gradient of a loss in the backward pass of that tensor.

    This way a loss inside a layer need not be carried to the model's output, through checkpoints and pipeline stages.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


def balance_loss(odds_ME: Tensor, chosen: Tensor, balance_M: Tensor, axis: Axis) -> Tensor:
    """Return Σ_m b_m · E · Σ_e f_e p_me, the load-balancing loss of a router over this rank's tokens with weights b
    (Switch Transformer, https://arxiv.org/abs/2101.03961, equations 4 to 6).

    p_me are the router's probabilities, `odds_ME`. f_e is the weighted share of expert e among all choices, counted
    over all ranks with tokens of the same rows, without a gradient. An even load costs Σ b, however many experts a
    token goes to.
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
    """A router and its experts. `layers` is the number of such layers in the model."""

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
        """Send each token through its experts, BTD. With `balance_M`, the backward pass adds the gradient of
        `balance_loss`, averaged over the sparse layers.

        Never compiled: every number of tokens per expert would need a graph of its own.
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
        """Apply the experts on whichever ranks they are. `sent_SD` and the result are in the order of the experts."""
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
