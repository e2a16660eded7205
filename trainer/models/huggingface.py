"""Any causal language model of Hugging Face's transformers as a policy: token ids in, log-probabilities out.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from trainer.config import Packing, Precision
from trainer.errors import UnsupportedModel, WeightsUnusable
from trainer.models.attention import attend_by_blocks, block_mask, of_packed_rows, sequence_reach, tree_mask
from trainer.models.dropout import Repeatable, remove_dropout
from trainer.models.layouts import packings_of
from trainer.models.passes import Passes
from trainer.models.skeleton import stand_in, transformer_skeleton
from trainer.models.state_dict import adapter_in, load_weights
from trainer.models.stored import StoredTensors

_BLOCKS_OR_SDPA = "blocks_or_sdpa"
_WEIGHT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


TokenLogprobs = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(head, hidden_ND, targets_N, temperature_N, vocabulary) → (log-probabilities, entropies): `algorithm.logprobs`."""


class PolicyModel(Passes, Repeatable):
    """A transformers model that computes log-probabilities of chosen tokens without materialising all logits.

    Everything goes through `forward`, so that a sharded model gathers its output head as well. `packings` are the
    layouts of rows that it computes correctly. `by_blocks` makes attention use block masks: for trees, and on CUDA
    for all rows.
    """

    def __init__(self, inner: nn.Module, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        super().__init__()
        self.inner = inner
        self.precision = precision
        self.packings: frozenset[Packing] = frozenset(Packing)
        self.by_blocks = False
        self._token_logprobs = token_logprobs

    @property
    def _transformer(self) -> Any:
        return self.inner

    @property
    def vocabulary(self) -> int:
        return int(self._transformer.get_output_embeddings().weight.shape[0])

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers. Raises UnsupportedModel if the model has no single list of them."""
        return decoder_layers(self._transformer.get_decoder(), self._transformer.config.num_hidden_layers)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under their Hugging Face names, tied ones once."""
        yield from self.inner.named_parameters()

    def own_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter that has memory of its own on this rank, even if two have one name."""
        yield from self.named_weights()

    def load_base(self, directory: Path) -> None:
        """Copy the weights of the base model into this one. Raises WeightsUnusable."""
        load_weights(self.named_weights(), directory)

    def load_version(self, directory: Path) -> None:
        """Copy the weights of a version into this model. Raises WeightsUnusable."""
        if (adapter := adapter_in(directory)) is not None:
            raise WeightsUnusable(
                f"{directory} has an adapter of rank {adapter.get('r')} over the base model, and no whole weights:"
                " train with [trainer.adapter] as it was, or publish a version with trainer.adapter.publish = merged"
                " first"
            )
        load_weights(self.named_weights(), directory)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute passes inside the block in float32: the weights are float32 in any case, and the precision only
        chooses what they are cast to."""
        parts: list[Any] = [
            each for each in self.modules() if isinstance(getattr(each, "precision", None), Precision)
        ]
        before = [part.precision for part in parts]
        for part in parts:
            part.precision = Precision.FLOAT32
        try:
            yield
        finally:
            for part, precision in zip(parts, before, strict=True):
                part.precision = precision

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
        """Return (log-probabilities, entropies) of the N targets, float32.

        Sequences packed into one row are distinguished by their positions alone: a key-value cache, or an attention
        mask in addition to the positions, would silently let them see each other. With `reach_BT` rows are trees, and
        it defines the whole mask.
        """
        if balance:
            raise UnsupportedModel("only the archon backend has a load-balancing loss of routers")
        halved = self.precision is Precision.BFLOAT16
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=halved):
            hidden_BTD = self.hidden(input_ids_BT, position_ids_BT, reach_BT)
            head = self._transformer.get_output_embeddings()
            hidden_ND = hidden_BTD.flatten(0, 1)[predictor_N]
            return self._token_logprobs(
                head, hidden_ND, targets_N, temperature_N, self._transformer.config.vocab_size
            )

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, reach_BT: Tensor | None = None) -> Tensor:
        """Return the last hidden state of every token, BTD."""
        decoder = self._transformer.get_decoder()
        return hidden_states(
            decoder, input_ids_BT, position_ids_BT, reach_BT, self.precision, by_blocks=self.by_blocks
        )

    def accept_block_masks(self) -> None:
        """Let attention accept block masks in addition to tensor masks."""
        accept_block_masks(self._transformer)


def hidden_states(
    decoder: Any,
    input_ids_BT: Tensor,
    position_ids_BT: Tensor,
    reach_BT: Tensor | None,
    precision: Precision,
    *,
    by_blocks: bool,
) -> Tensor:
    """Return the last hidden states of a transformers decoder, BTD.

    Without `reach_BT`, rows of one sequence each get no mask, and packed rows one that follows from the positions.
    """
    halved = precision is Precision.BFLOAT16
    mask: Tensor | BlockMask | None = None
    if by_blocks and reach_BT is None and of_packed_rows(input_ids_BT.device):
        reach_BT = sequence_reach(position_ids_BT)
        if int(reach_BT.amin()) < reach_BT.shape[1]:
            mask = block_mask(reach_BT)
    elif by_blocks and reach_BT is not None:
        mask = block_mask(reach_BT)
    elif reach_BT is not None:
        mask = tree_mask(reach_BT, torch.bfloat16 if halved else next(decoder.parameters()).dtype)
    with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=halved):
        found: Tensor = decoder(
            input_ids=input_ids_BT, attention_mask=mask, position_ids=position_ids_BT, use_cache=False
        ).last_hidden_state
    return found


def accept_block_masks(transformer: Any) -> None:
    """Let a transformers model use block masks.

    The flex_attention of transformers itself would make masks of T × T, and compile its kernel again for each mode.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_BLOCKS_OR_SDPA, _blocks_or_sdpa)
    AttentionMaskInterface.register(_BLOCKS_OR_SDPA, sdpa_mask)
    transformer.set_attn_implementation(_BLOCKS_OR_SDPA)


def _blocks_or_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it, by blocks under a block mask. Raises UnsupportedModel."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, BlockMask):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    if dropout or any(others.get(part) is not None for part in ("softcap", "s_aux", "position_bias")):
        raise UnsupportedModel(
            "the model's attention has dropout, a softcap, sinks or a position bias, which block masks lack"
        )
    return attend_by_blocks(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """Return the decoder's list of `count` layers. Raises UnsupportedModel if it has none, or several."""
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(lists) != 1:
        raise UnsupportedModel(f"{type(decoder).__name__}: found {len(lists)} lists of decoder layers, not one")
    return lists[0]


def resolve_directory(model: str) -> Path:
    """Return the local directory of a model: itself, or the snapshot of a Hugging Face id, cached if offline.

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
            f"{model}: there is no such directory, and Hugging Face has no model that can be downloaded: {error}"
        ) from error


def load_policy(
    directory: Path, precision: Precision, token_logprobs: TokenLogprobs, *, activation_checkpointing: bool
) -> PolicyModel:
    """Load the model in a directory with float32 weights on the CPU, and find the layouts that it computes correctly.

    Raises UnsupportedModel.
    """
    inner = load_transformer(directory, activation_checkpointing=activation_checkpointing)
    model = PolicyModel(inner, Precision.FLOAT32, token_logprobs)
    _check_names(model, directory)
    model.packings = packings_of(model)
    model.precision = precision
    return model.train()


def policy_skeleton(
    directory: Path, precision: Precision, token_logprobs: TokenLogprobs, *, activation_checkpointing: bool
) -> PolicyModel:
    """Return the model in a directory without its weights, as a skeleton (`models/skeleton.py`). Its `packings` are
    those of `policy_stand_in`, which the caller sets. Raises UnsupportedModel."""
    inner = transformer_skeleton(directory, activation_checkpointing=activation_checkpointing)
    model = PolicyModel(inner, precision, token_logprobs)
    _check_names(model, directory)
    return model.train()


def policy_stand_in(
    directory: Path, precision: Precision, token_logprobs: TokenLogprobs, device: torch.device
) -> PolicyModel:
    """Return a small model of the architecture in a directory with random weights, and with the layouts that it
    computes correctly. Raises UnsupportedModel."""
    model = PolicyModel(stand_in(directory, torch.device("cpu")), Precision.FLOAT32, token_logprobs)
    model.packings = packings_of(model)
    model.precision = precision
    return model.to(device).train()


def _check_names(model: PolicyModel, directory: Path) -> None:
    try:
        stored = StoredTensors(directory).names
    except WeightsUnusable as error:
        raise UnsupportedModel(str(error)) from error
    unknown = sorted({name for name, _ in model.named_weights()} - stored)
    if unknown:
        raise UnsupportedModel(
            f"{directory}: the model's weights have other names in memory than on disk, for example {unknown[0]}"
        )


def load_transformer(directory: Path, *, activation_checkpointing: bool) -> Any:
    """Load the transformers model in a directory, float32 on the CPU, without dropout. Raises UnsupportedModel."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    cast("Any", logging).disable_progress_bar()
    try:
        # Without safetensors transformers would fall back to a pickle.
        inner: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
        )
        if activation_checkpointing:
            inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    remove_dropout(inner)
    return inner
