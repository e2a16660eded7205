"""A Hugging Face causal language model over a slot cache: prefill, decode step and scoring."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxy.engines.common.grammar_compiler import GrammarCompiler
from proxy.engines.embedded.cache import SlotCache
from proxy.engines.embedded.lora import AdaptedLayers, Adapter, Rows
from proxy.engines.embedded.stopping import Decode
from proxy.engines.embedded.weights import NewWeights, prepare

log = logging.getLogger("base_rl.embedded")

# Most logits that scoring computes at once: 256 MiB in float32.
_SCORED_LOGITS = 1 << 26

_FULL_ATTENTION = {"full_attention", "sliding_attention"}


class ModelUnsupported(Exception):
    """This engine cannot serve the model; the message says why."""


class ServedModel:
    """Loaded weights, the cache of the running requests, and the limits of a request.

    `context` counts tokens, prompt and output together. `eos_ids` end a request unless it has `ignore_eos`. `decode`
    is None if the model directory has no tokenizer; stop strings are then refused. `grammars` is None if it has no
    tokenizer that llguidance can read; constraints are then refused. `layers` are those that adapters can change.
    """

    def __init__(self, path: str, *, device: str, dtype: str, seed: int, max_total_tokens: int) -> None:
        self.path = path
        self.device = torch.device(device)
        network: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True
        )
        self.network: Any = network.to(self.device).eval().requires_grad_(requires_grad=False)
        config = self.network.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.context = min(_context_of(config), max_total_tokens)
        self.layers = AdaptedLayers(self.network)
        self.cache = SlotCache(config.num_hidden_layers)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        tokenizer = _tokenizer_of(path)
        self.decode = _decode_of(tokenizer) if tokenizer is not None else None
        self.eos_ids = (
            _ids(config.eos_token_id)
            | _ids(self.network.generation_config.eos_token_id)
            | _ids(getattr(tokenizer, "eos_token_id", None))
        )
        self.grammars = _grammars_of(tokenizer, self.vocabulary, self.eos_ids)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.network.forward).parameters

    def prefill(self, contexts: Sequence[Sequence[int]], first_row: int, adapters: Rows = ()) -> torch.Tensor:
        """Run new requests into the slots from `first_row`; return the logits `[N, V]` after each one's last
        token."""
        lengths = [len(ids) for ids in contexts]
        longest = max(lengths)
        # Padding is on the right: causal attention hides it from every real position, and its cache entries lie
        # beyond the slot's length, where decode steps do not read.
        ids_nt = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in contexts], device=self.device)
        steps_t = torch.arange(longest, device=self.device)
        self.layers.use(adapters)
        self.cache.plan_prefill(first_row, longest)
        # Logits only at the positions where some prompt ends; all positions would take V times the memory of the ids.
        ends, column = torch.unique(torch.tensor(lengths, device=self.device) - 1, return_inverse=True)
        logits = self._forward(
            ids_nt,
            mask=(steps_t[None, :] <= steps_t[:, None])[None, None],
            positions=steps_t.expand(len(contexts), longest),
            keep=ends,
        )
        return logits[torch.arange(len(contexts), device=self.device), column]

    def step(self, last_tokens: Sequence[int], positions: Sequence[int], adapters: Rows = ()) -> torch.Tensor:
        """Feed one token to each slot at the given positions; return the next tokens' logits `[B, V]`."""
        positions_b = torch.tensor(positions, device=self.device)
        length = max(positions) + 1
        self.layers.use(adapters)
        self.cache.plan_decode(positions_b, length)
        mask_bl = torch.arange(length, device=self.device) <= positions_b[:, None]
        tokens_b1 = torch.tensor(last_tokens, device=self.device)[:, None]
        return self._forward(tokens_b1, mask=mask_bl[:, None, None], positions=positions_b[:, None], keep=None)[:, -1]

    def score(self, ids: Sequence[int], start: int, adapter: Adapter | None = None) -> list[float]:
        """Return the log-probabilities of `ids[start:]`, each given all ids before it, at temperature 1. `start` is 1
        or more. The cache is not used, and many tokens take several passes, because each pass bounds its logits."""
        given = torch.tensor([ids[:-1]], device=self.device)
        self.layers.use([adapter])
        places_t = torch.arange(start - 1, len(ids) - 1, device=self.device)
        found: list[float] = []
        for part_t in torch.split(places_t, max(1, _SCORED_LOGITS // self.vocabulary)):
            if self._keeps_logits:
                logits_tv = self.network(input_ids=given, use_cache=False, logits_to_keep=part_t).logits[0]
            else:
                logits_tv = self.network(input_ids=given, use_cache=False).logits[0, part_t]
            targets_t = torch.tensor(ids, device=self.device)[part_t + 1]
            found += logits_tv.float().log_softmax(-1).gather(-1, targets_t[:, None])[:, 0].tolist()
        return found

    def prepare(self, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> NewWeights:
        """Return weights that `NewWeights.put` makes this model's. Any thread may call this while the model computes.
        Raises WeightsRefused if they do not fit."""
        return prepare(self.network, tensors, complete=complete)

    def _forward(
        self, ids: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        options: dict[str, Any] = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        logits: torch.Tensor = self.network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        ).logits
        return logits if keep is None or self._keeps_logits else logits[:, keep]


def _context_of(config: Any) -> int:
    """Return the model's context in tokens. A sliding window bounds it: within the window, attention is full."""
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds <= _FULL_ATTENTION:
        raise ModelUnsupported(
            f"the embedded engine serves attention layers only, and this model has {', '.join(sorted(kinds))}: "
            "use SGLang for it"
        )
    context: int = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    return min(context, window) if window and getattr(config, "use_sliding_window", True) else context


def _tokenizer_of(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _decode_of(tokenizer: Any) -> Decode:
    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode


def _grammars_of(tokenizer: Any, vocabulary: int, eos_ids: frozenset[int]) -> GrammarCompiler | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ends = [token for token in eos_ids if token < vocabulary]
    if backend is None or not ends:
        log.warning("constraints are refused: the model has no fast tokenizer or no end token")
        return None
    try:
        return GrammarCompiler(backend.to_str(), vocabulary=vocabulary, eos_ids=ends)
    except ValueError as error:
        log.warning("constraints are refused: llguidance cannot read the tokenizer: %s", error)
        return None


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
