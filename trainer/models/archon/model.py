"""The decoder and its output head as a policy. Modules are called as Hugging Face calls them, so weights are too.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.config import Precision
from trainer.models.archon.attention import Attention, Positions, positions_of
from trainer.models.archon.config import ModelConfig
from trainer.models.archon.mlp import MLP
from trainer.models.archon.moe import Experts, MixtureOfExperts
from trainer.models.archon.norm import RMSNorm
from trainer.models.huggingface import PolicyModel, TokenLogprobs
from trainer.parallel.axes import Axes, assemble


class Block(nn.Module):
    """Attention and an MLP, each normed before and added to what came in. It computes on the tokens that are here."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        if config.experts is not None and config.is_sparse(layer):
            self.mlp: MLP | MixtureOfExperts = MixtureOfExperts(config.hidden, config.experts)
        else:
            self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.checkpointed = False

    def forward(self, hidden_BTD: Tensor, positions: Positions) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return cast("Tensor", checkpoint(self._compute, hidden_BTD, positions, use_reentrant=False))
        return self._compute(hidden_BTD, positions)

    def _compute(self, hidden_BTD: Tensor, positions: Positions) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), positions)
        output: Tensor = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return output


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, input_ids_BT: Tensor, positions: Positions) -> Tensor:
        hidden_BTD = self.embed_tokens(input_ids_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, positions)
        normed: Tensor = self.norm(hidden_BTD)
        return normed


class CausalModel(nn.Module):
    """`model` and `lm_head`, which may be the embedding's own weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class ArchonModel(PolicyModel):
    """A policy whose rows may be divided among ranks: each has some tokens of every row, embeds them, and scores what
    they predict. Embedding and head are never divided by vocabulary, so a tied one is no special case."""

    def __init__(self, config: ModelConfig, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        inner = CausalModel(config)
        super().__init__(inner, precision, token_logprobs)
        self.config = config
        self.axes = Axes()

    @property
    def causal(self) -> CausalModel:
        return cast("CausalModel", self.inner)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def layers(self) -> nn.ModuleList:
        return self.causal.model.layers

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names, tied ones once. Stacked experts, which are one tensor each on
        the disk, have `*` in the place of their number."""
        stacked = {
            f"{name}.{part}": f"{name}.*.{part}.weight"
            for name, module in self.inner.named_modules()
            if isinstance(module, Experts)
            for part, _ in module.named_parameters()
        }
        for name, parameter in self.inner.named_parameters():
            yield stacked.get(name, name), parameter

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        predictor_N: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        reach_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the N targets, float32, on every rank that sees these rows."""
        tokens, width = self.axes.tokens, input_ids_BT.shape[1]
        here = -(-width // tokens.size)
        # Padding is a sequence of its own at each token, so nothing sees it.
        padding = (0, here * tokens.size - width)
        ids_BT, position_ids_BT = functional.pad(input_ids_BT, padding), functional.pad(position_ids_BT, padding)
        reach_BT = None if reach_BT is None else functional.pad(reach_BT, padding)
        first = here * tokens.rank
        row_N, column_N = predictor_N // width, predictor_N % width
        places_M = torch.nonzero(column_N // here == tokens.rank)[:, 0]
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            positions = positions_of(position_ids_BT, self.config, reach_BT)
            hidden_BTD = self.causal.model(ids_BT[:, first : first + here], positions)
            hidden_MD = hidden_BTD.flatten(0, 1)[(row_N * here + column_N - first)[places_M]]
            logprobs_M, entropies_M = self._token_logprobs(
                self.causal.lm_head, hidden_MD, targets_N[places_M], temperature_N[places_M], self.config.vocabulary
            )
        count = len(predictor_N)
        return assemble(logprobs_M, places_M, count, tokens), assemble(entropies_M, places_M, count, tokens)
