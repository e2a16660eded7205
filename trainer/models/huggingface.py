"""Any causal language model of Hugging Face's transformers as a policy: token ids in, log-probabilities out.

Axes: B rows, T tokens, N trained tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.config import Precision
from trainer.errors import UnsupportedModel
from trainer.models.state_dict import stored_names

_CHECK_TOLERANCE = 1e-3
_WEIGHT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


TokenLogprobs = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(head, hidden_ND, targets_N, temperature_N, vocabulary) → (log-probabilities, entropies): `algorithm.logprobs`."""


class PolicyModel(nn.Module):
    """A transformers model that computes log-probabilities of chosen tokens and never all logits at once.

    Everything goes through `forward`, so that a sharded model gathers its output head as well.
    """

    def __init__(self, inner: nn.Module, precision: Precision, token_logprobs: TokenLogprobs) -> None:
        super().__init__()
        self.inner = inner
        self.precision = precision
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
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the N targets, float32.

        Sequences packed into a row are told apart by their positions alone: a cache or an attention mask beside them
        would let them see each other, silently.
        """
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            hidden_BTD = self._transformer.get_decoder()(
                input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False
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
    _check(model)
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


def _check(model: PolicyModel) -> None:
    """Two facts that training rests on and that some architectures break: log-probabilities follow from the last
    hidden state by the output head alone, and sequences in one row do not see each other."""
    transformer = model.inner.eval()
    vocabulary = model.vocabulary
    first_T, second_T = torch.arange(1, 8) % vocabulary, torch.arange(3, 9) % vocabulary
    with torch.no_grad():
        wanted_NV = torch.cat(
            [
                cast("Any", transformer)(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
                for ids_T in (first_T, second_T)
            ]
        ).log_softmax(-1)
        ids_T = torch.cat([first_T, second_T])
        positions_T = torch.cat([torch.arange(len(first_T)), torch.arange(len(second_T))])
        predictor_N = torch.tensor([index for index in range(len(ids_T) - 1) if index != len(first_T) - 1])
        targets_N = ids_T[predictor_N + 1]
        found_N, _ = model(ids_T[None], positions_T[None], predictor_N, targets_N, torch.ones(len(targets_N)))
    gap = (found_N - wanted_NV.gather(-1, targets_N[:, None])[:, 0]).abs().max().item()
    if not gap <= _CHECK_TOLERANCE:
        raise UnsupportedModel(
            f"{type(transformer).__name__}: packed sequences have other log-probabilities than single ones (by"
            f" {gap:.3g}), so training on them would be wrong"
        )
