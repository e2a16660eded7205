"""A critic's model: the transformer of a causal language model with a head of one output, which starts at zero.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import Packing, Precision
from trainer.models.dropout import Repeatable
from trainer.models.huggingface import (
    PolicyModel,
    accept_block_masks,
    decoder_layers,
    hidden_states,
    load_transformer,
)
from trainer.models.layouts import packings_of, plain_logprobs
from trainer.models.state_dict import load_weights

_HEAD = "value_head"


class ValueModel(Repeatable):
    """A model of the reward that is expected after each trained token. All weights are float32."""

    def __init__(self, transformer: Any, precision: Precision, directory: Path, packings: frozenset[Packing]) -> None:
        super().__init__()
        known = {id(parameter): name for name, parameter in transformer.named_parameters()}
        self.decoder: nn.Module = transformer.get_decoder()
        self.value_head = nn.Linear(transformer.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.precision = precision
        self.packings = packings
        self.by_blocks = False
        self._directory = directory
        self._names = [known[id(parameter)] for parameter in self.decoder.parameters()]
        self._layers = transformer.config.num_hidden_layers

    @property
    def vocabulary(self) -> int:
        return int(cast("Any", self.decoder).get_input_embeddings().weight.shape[0])

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. Raises UnsupportedModel."""
        return decoder_layers(self.decoder, self._layers)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._transformer_weights()
        for name, parameter in self.value_head.named_parameters():
            yield f"{_HEAD}.{name}", parameter

    def _transformer_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from zip(self._names, self.decoder.parameters(), strict=True)

    def begin_anew(self) -> None:
        """Restore the weights that the model was loaded with. Raises WeightsUnusable."""
        load_weights(self._transformer_weights(), self._directory)
        with torch.no_grad():
            for parameter in self.value_head.parameters():
                parameter.zero_()

    def forward(
        self, input_ids_BT: Tensor, position_ids_BT: Tensor, predictor_N: Tensor, reach_BT: Tensor | None = None
    ) -> Tensor:
        """Return V_N, float32: the value before each trained token is chosen, at the index that predicts it.

        The mask is that of `PolicyModel.forward`.
        """
        hidden_ND = self.hidden(input_ids_BT, position_ids_BT, reach_BT).flatten(0, 1)[predictor_N].float()
        return functional.linear(hidden_ND, self.value_head.weight, self.value_head.bias)[:, 0]

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, reach_BT: Tensor | None = None) -> Tensor:
        """Return the last hidden state of every token, BTD."""
        return hidden_states(
            self.decoder, input_ids_BT, position_ids_BT, reach_BT, self.precision, by_blocks=self.by_blocks
        )

    def accept_block_masks(self) -> None:
        """Let attention accept block masks in addition to tensor masks."""
        accept_block_masks(self.decoder)


def load_value(directory: Path, precision: Precision, *, activation_checkpointing: bool) -> ValueModel:
    """Load a critic that starts from the transformer in a directory, on the CPU. Raises UnsupportedModel."""
    transformer = load_transformer(directory, activation_checkpointing=activation_checkpointing)
    packings = packings_of(PolicyModel(transformer, Precision.FLOAT32, plain_logprobs))
    return ValueModel(transformer, precision, directory, packings).train()
