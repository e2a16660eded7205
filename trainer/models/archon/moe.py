"""A mixture of experts: a router sends each token to a few of them.

Axes: M tokens, S tokens sent (each once per expert it goes to), E experts, D hidden, I width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.models.archon.config import ExpertsConfig
from trainer.parallel.axes import Axes, exchange, local


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


class MixtureOfExperts(nn.Module):
    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.axes = Axes()
        self.per_token = config.per_token
        self.normalised = config.normalised
        self.count = config.count
        self.gate = nn.Linear(hidden, config.count, bias=False)
        self.experts = Experts(hidden, config)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Not compiled: each number of tokens that an expert gets would be a graph of its own."""
        hidden_MD = hidden_BTD.flatten(0, 1)
        odds_ME = functional.linear(hidden_MD, local(self.gate.weight)).softmax(-1, dtype=torch.float32)
        weights, chosen = odds_ME.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
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
