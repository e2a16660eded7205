"""The decoder and its output head as a policy. Modules have Hugging Face's names, so weights have them too.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.compiling import compiled
from trainer.config import Precision
from trainer.models.archon.attention import Attention, Positions, attend, positions_of
from trainer.models.archon.config import ModelConfig
from trainer.models.archon.mlp import MLP
from trainer.models.archon.moe import Experts, MixtureOfExperts
from trainer.models.archon.norm import RMSNorm
from trainer.models.huggingface import PolicyModel, TokenLogprobs
from trainer.models.passes import Rows, Scores
from trainer.parallel.axes import Axes, assemble

EMBEDDING, TIED_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Block(nn.Module):
    """A decoder layer: attention and an MLP, each with a norm before it and a residual connection around it.

    It computes this rank's tokens. If `compiled`, the parts before and after attention are one graph each.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        if config.experts is not None and config.is_sparse(layer):
            sparse = sum(config.is_sparse(each) for each in range(config.layers))
            self.mlp: MLP | MixtureOfExperts = MixtureOfExperts(config.hidden, config.experts, sparse)
        else:
            self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.checkpointed = False
        self.compiled = False

    def forward(self, hidden_BTD: Tensor, positions: Positions) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return cast("Tensor", checkpoint(self._compute, hidden_BTD, positions, use_reentrant=False))
        return self._compute(hidden_BTD, positions)

    def _compute(self, hidden_BTD: Tensor, positions: Positions) -> Tensor:
        before, behind = compiled_parts() if self.compiled else (Block.before, Block.behind)
        q_BTHK, k_BTHK, v_BTHK = before(self, hidden_BTD, positions.cos_BTK, positions.sin_BTK)
        seen_BTHK = attend(q_BTHK, k_BTHK, v_BTHK, positions.mask_B1TT)
        return behind(self, hidden_BTD, seen_BTHK, positions.balance_M)

    def before(self, hidden_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.inputs(self.input_layernorm(hidden_BTD), cos_BTK, sin_BTK)

    def behind(self, hidden_BTD: Tensor, seen_BTHK: Tensor, balance_M: Tensor | None = None) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn.output(seen_BTHK)
        normed_BTD = self.post_attention_layernorm(hidden_BTD)
        sparse = isinstance(self.mlp, MixtureOfExperts)
        output: Tensor = hidden_BTD + (self.mlp(normed_BTD, balance_M) if sparse else self.mlp(normed_BTD))
        return output


@cache
def compiled_parts() -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    """Return `Block.before` and `Block.behind`, compiled once for all blocks of the process at their first call, for
    any sizes."""
    return compiled(Block.before, dynamic=True), compiled(Block.behind, dynamic=True)


class Decoder(nn.Module):
    """Decoder layers, with the embedding if they include the first and the norm if they include the last one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.layers)})
        self.norm: nn.Module = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, inputs: Tensor, positions: Positions) -> Tensor:
        """Return hidden_BTD. `inputs` are token ids, or the hidden_BTD of the previous stage."""
        hidden_BTD = self.embed_tokens(inputs)
        for layer in self.layers.values():
            hidden_BTD = layer(hidden_BTD, positions)
        normed: Tensor = self.norm(hidden_BTD)
        return normed


class CausalModel(nn.Module):
    """A decoder and its head, which may share the embedding's weight; or one pipeline stage of them.

    A stage has consecutive layers, the embedding only if it is the first, and norm and head only if it is the last.
    The tokens of a row may be divided among ranks: each embeds its own tokens and scores what these predict.
    Embedding and head are never divided by vocabulary, so a tied weight is no special case.
    """

    def __init__(self, config: ModelConfig, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        self.axes = Axes()
        self.by_blocks = False
        self.token_logprobs = token_logprobs
        self.model = Decoder(config)
        self.lm_head: nn.Module = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.tie()

    def tie(self) -> None:
        self.lm_head.register_parameter("weight", self.model.embed_tokens.get_parameter("weight"))

    def stage(self, layers: range) -> CausalModel:
        """Return a stage with these layers. It shares its modules with this model."""
        with torch.device("meta"):
            part = CausalModel(self.config, self.precision, self.token_logprobs)
        part.by_blocks = self.by_blocks
        part.model.layers = nn.ModuleDict({str(layer): self.model.layers[str(layer)] for layer in layers})
        ends = layers.stop == self.config.layers
        part.model.embed_tokens = self.model.embed_tokens if layers.start == 0 else nn.Identity()
        part.model.norm = self.model.norm if ends else nn.Identity()
        part.lm_head = self.lm_head if ends else nn.Identity()
        return part

    @property
    def is_first(self) -> bool:
        return not isinstance(self.model.embed_tokens, nn.Identity)

    @property
    def is_last(self) -> bool:
        return not isinstance(self.lm_head, nn.Identity)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under their Hugging Face names, tied ones once. Stacked experts, which are separate
        tensors on the disk, have `*` in place of their number."""
        known = {
            f"{name}.{part}": f"{name}.*.{part}.weight"
            for name, module in self.named_modules()
            if isinstance(module, Experts)
            for part, _ in module.named_parameters()
        }
        if self.config.tied:
            known[TIED_HEAD] = EMBEDDING
        for name, parameter in self.named_parameters():
            yield known.get(name, name), parameter

    def tokens_here(self, rows: Rows) -> int:
        """Return the number of tokens of each row, with padding, that this rank has."""
        return -(-rows.input_ids_BT.shape[1] // self.axes.tokens.size)

    def forward(self, rows: Rows, hidden_BTD: Tensor | None = None) -> Tensor | Scores:
        """Return the scores of the N targets on every rank of the last stage, and hidden_BTD of this rank's tokens on
        other stages. Every stage but the first takes the `hidden_BTD` of the one before it."""
        tokens, width = self.axes.tokens, rows.input_ids_BT.shape[1]
        here = self.tokens_here(rows)
        # Position 0 makes every padding token a sequence of its own, so no other token sees it.
        padding = (0, here * tokens.size - width)
        position_ids_BT = functional.pad(rows.position_ids_BT, padding)
        reach_BT = None if rows.reach_BT is None else functional.pad(rows.reach_BT, padding)
        first = here * tokens.rank
        device = rows.input_ids_BT.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            positions = positions_of(position_ids_BT, self.config, reach_BT, by_blocks=self.by_blocks)
            if hidden_BTD is None:
                hidden_BTD = functional.pad(rows.input_ids_BT, padding)[:, first : first + here]
            row_N, column_N = rows.predictor_N // width, rows.predictor_N % width
            places_M = torch.nonzero(column_N // here == tokens.rank)[:, 0]
            predictor_M = (row_N * here + column_N - first)[places_M]
            if rows.balance and torch.is_grad_enabled():
                # In trees several targets may follow one token. It counts once for each, as in separate rows.
                predicted = torch.bincount(predictor_M, minlength=len(rows.input_ids_BT) * here)
                positions = positions._replace(balance_M=rows.balance * predicted.float())
            hidden_BTD = self.model(hidden_BTD, positions)
            if not self.is_last:
                return hidden_BTD
            hidden_MD = hidden_BTD.flatten(0, 1)[predictor_M]
            logprobs_M, entropies_M = self.token_logprobs(
                self.lm_head,
                hidden_MD,
                rows.targets_N[places_M],
                rows.temperature_N[places_M],
                self.config.vocabulary,
            )
        count = len(rows.predictor_N)
        return Scores(assemble(logprobs_M, places_M, count, tokens), assemble(entropies_M, places_M, count, tokens))


class ArchonModel(PolicyModel):
    """A whole model, without pipeline stages, as a policy."""

    def __init__(self, config: ModelConfig, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        super().__init__(CausalModel(config, precision, token_logprobs), precision, token_logprobs)
        self.config = config

    @property
    def causal(self) -> CausalModel:
        return cast("CausalModel", self.inner)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def layers(self) -> nn.ModuleList:
        return nn.ModuleList(self.causal.model.layers.values())

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.causal.named_weights()

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
        """Return (log-probabilities, entropies) of the N targets, float32, on every rank that sees these rows."""
        rows = Rows(input_ids_BT, position_ids_BT, predictor_N, targets_N, temperature_N, reach_BT, balance)
        found: tuple[Tensor, Tensor] = self.causal(rows)
        return found

    @property
    def by_blocks(self) -> bool:
        return self.causal.by_blocks

    @by_blocks.setter
    def by_blocks(self, chosen: bool) -> None:
        self.causal.by_blocks = chosen

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, reach_BT: Tensor | None = None) -> Tensor:
        """Return the last hidden state of every token, BTD. The model must not be divided."""
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            positions = positions_of(position_ids_BT, self.config, reach_BT, by_blocks=self.by_blocks)
            found: Tensor = self.causal.model(input_ids_BT, positions)
        return found

    def accept_block_masks(self) -> None:
        """Do nothing: the definition accepts block masks already."""
