from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from trainer.models.archon.config import ModelConfig
from trainer.parallel.axes import Axes, gather_tokens, local, scatter_tokens


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)). With the axis `tensor` each rank has a part of the inner width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.axes = Axes()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = gather_tokens(hidden_BTD, self.axes.tensor)
        gate = functional.silu(functional.linear(hidden_BTD, local(self.gate_proj.weight)))
        inner = gate * functional.linear(hidden_BTD, local(self.up_proj.weight))
        return scatter_tokens(functional.linear(inner, local(self.down_proj.weight)), self.axes.tensor)
