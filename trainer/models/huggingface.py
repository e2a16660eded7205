"""Any causal language model of Hugging Face's transformers as a policy: token ids in, log-probabilities out.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.config import Packing, Precision
from trainer.errors import UnsupportedModel
from trainer.models.layouts import packings_of
from trainer.models.state_dict import stored_names

_WEIGHT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


TokenLogprobs = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(head, hidden_ND, targets_N, temperature_N, vocabulary) → (log-probabilities, entropies): `algorithm.logprobs`."""


class PolicyModel(nn.Module):
    """A transformers model that computes log-probabilities of chosen tokens and never all logits at once.

    Everything goes through `forward`, so that a sharded model gathers its output head as well. `packings` are those
    that it computes rightly.
    """

    def __init__(self, inner: nn.Module, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        super().__init__()
        self.inner = inner
        self.precision = precision
        self.packings: frozenset[Packing] = frozenset(Packing)
        self._token_logprobs = token_logprobs

    @property
    def _transformer(self) -> Any:
        return self.inner

    @property
    def vocabulary(self) -> int:
        return int(self._transformer.get_output_embeddings().weight.shape[0])

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. Raises UnsupportedModel where there is no one list of them."""
        return decoder_layers(self._transformer.get_decoder(), self._transformer.config.num_hidden_layers)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; tied ones once."""
        yield from self.inner.named_parameters()

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        predictor_N: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        reach_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the N targets, float32.

        Sequences packed into a row are told apart by their positions alone: a cache, or an attention mask beside them
        that is not the whole one, would let them see each other, silently. With `reach_BT` rows are trees, and it is
        the whole mask.
        """
        halved = self.precision is Precision.BFLOAT16
        mask_B1TT = None
        if reach_BT is not None:
            mask_B1TT = tree_mask(reach_BT, torch.bfloat16 if halved else next(self.parameters()).dtype)
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=halved):
            hidden_BTD = self._transformer.get_decoder()(
                input_ids=input_ids_BT, attention_mask=mask_B1TT, position_ids=position_ids_BT, use_cache=False
            ).last_hidden_state
            head = self._transformer.get_output_embeddings()
            hidden_ND = hidden_BTD.flatten(0, 1)[predictor_N]
            return self._token_logprobs(
                head, hidden_ND, targets_N, temperature_N, self._transformer.config.vocab_size
            )


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """Raises UnsupportedModel."""
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(lists) != 1:
        raise UnsupportedModel(f"{type(decoder).__name__}: found {len(lists)} lists of decoder layers, not one")
    return lists[0]


def tree_mask(reach_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """`tree_sight` as an additive mask, shape (B, 1, T, T): 0 or −∞.

    In the type of the queries: of booleans, attention would make and keep such a tensor in every layer.
    """
    seen_BTT = tree_sight(reach_BT)
    mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=reach_BT.device)
    return mask_BTT.masked_fill_(~seen_BTT, -math.inf)[:, None]


def tree_sight(reach_BT: Tensor) -> Tensor:
    """Whether token i sees token j, at [row, i, j]: where j ≤ i < reach[j], and itself."""
    place_T = torch.arange(reach_BT.shape[1], device=reach_BT.device)
    ahead_TT = place_T[:, None] - place_T
    return ((ahead_TT >= 0) & (place_T[:, None] < reach_BT[:, None, :])) | (ahead_TT == 0)


def resolve_directory(model: str) -> Path:
    """The local directory of a model: itself, or the snapshot of a Hugging Face id (from the cache where offline).

    Raises UnsupportedModel if there is neither.
    """
    directory = Path(model)
    if (directory / "config.json").is_file():
        return directory
    if directory.exists():
        raise UnsupportedModel(f"{model}: the directory has no config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_WEIGHT_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UnsupportedModel(
            f"{model}: neither a directory here nor a model that can be fetched: {error}"
        ) from error


def load_policy(
    directory: Path, precision: Precision, token_logprobs: TokenLogprobs, *, activation_checkpointing: bool
) -> PolicyModel:
    """The model of a directory with float32 weights on the CPU, checked to be one that is trained rightly here.

    Raises UnsupportedModel.
    """
    inner = load_transformer(directory, activation_checkpointing=activation_checkpointing)
    model = PolicyModel(inner, Precision.FLOAT32, token_logprobs)
    names = {name for name, _ in model.named_weights()}
    unknown = sorted(names - stored_names(directory))
    if unknown:
        raise UnsupportedModel(
            f"{directory}: the model's weights have other names in memory than on disk, for example {unknown[0]}"
        )
    model.packings = packings_of(model)
    model.precision = precision
    return model.train()


def load_transformer(directory: Path, *, activation_checkpointing: bool) -> Any:
    """transformers' own model of a directory, float32 on the CPU. Raises UnsupportedModel."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    cast("Any", logging).disable_progress_bar()
    try:
        inner: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        if activation_checkpointing:
            inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    return inner
