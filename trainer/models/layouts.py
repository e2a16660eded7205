"""Find the layouts of rows that a model computes correctly, with a few tokens.

Axes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from trainer.config import Packing
from trainer.errors import UnsupportedModel

_TOLERANCE = 1e-3
_SEQUENCES = ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 5, 8), (3, 4, 5, 6, 7, 8))


class TriedModel(Protocol):
    """A transformers model, `inner`, and its scores of the tokens of `Rows`."""

    inner: nn.Module

    @property
    def vocabulary(self) -> int: ...

    def __call__(self, *inputs: Any) -> Any: ...


def packings_of(model: TriedModel) -> frozenset[Packing]:
    """Return the layouts in which sequences have the same log-probabilities as alone. Sets the model to evaluation
    mode.

    Raises UnsupportedModel if even padded rows differ: some architectures do more after the last hidden state than
    apply the output head.
    """
    transformer = model.inner.eval()
    sequences = [[token % model.vocabulary for token in sequence] for sequence in _SEQUENCES]
    alone_N = _alone(cast("Any", transformer), sequences)
    gaps = {packing: _gap(model, packing, sequences, alone_N) for packing in Packing}
    if not gaps[Packing.PADDED] <= _TOLERANCE:
        raise UnsupportedModel(
            f"{type(transformer).__name__}: log-probabilities of padded sequences differ from those of single ones by"
            f" {gaps[Packing.PADDED]:.3g}, so training on them would be wrong"
        )
    correct = {packing for packing, gap in gaps.items() if gap <= _TOLERANCE}
    if not _has_full_attention(cast("Any", transformer).config):
        correct.discard(Packing.TREE)
    return frozenset(correct)


def plain_logprobs(
    head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor, temperature_N: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, NaN in place of entropies) of a few tokens: a `TokenLogprobs` for trials."""
    logprobs_NV = (head(hidden_ND).float() / temperature_N[:, None]).log_softmax(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], torch.full_like(temperature_N, math.nan)


def _has_full_attention(config: Any) -> bool:
    """Whether every layer attends to all tokens before a token.

    The trial's sequences are shorter than any sliding window, so it cannot notice that a tree's mask replaces one.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    bounds = ("sliding_window", "attention_chunk_size")
    return all(getattr(config, bound, None) is None for bound in bounds)


@torch.no_grad()
def _alone(transformer: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities of each sequence's tokens from the second on, one sequence after another (N)."""
    found = []
    for sequence in sequences:
        ids_T = torch.tensor(sequence)
        logprobs_TV = transformer(input_ids=ids_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(logprobs_TV.gather(-1, ids_T[1:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def _gap(model: TriedModel, packing: Packing, sequences: Sequence[Sequence[int]], alone_N: Tensor) -> float:
    """Return the largest difference between log-probabilities in this layout and those of each sequence alone, over
    three sequences of which two share a prefix."""
    ids_BT, positions_BT, reach_BT, places = _laid_out(sequences, packing)
    found = []
    for sequence, place in zip(sequences, places, strict=True):
        ids_N, ones_N = torch.tensor(sequence[1:]), torch.ones(len(sequence) - 1)
        found.append(model(ids_BT, positions_BT, torch.tensor(place[:-1]), ids_N, ones_N, reach_BT)[0])
    return (torch.cat(found) - alone_N).abs().max().item()


def _laid_out(
    sequences: Sequence[Sequence[int]], packing: Packing
) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]]]:
    """Return ids, positions and reach of three sequences in a layout, and the indices of each one's tokens in the
    flattened ids."""
    first, second, third = sequences
    if packing is Packing.PADDED:
        width = max(map(len, sequences))
        ids_BT = torch.tensor([[*each, *[0] * (width - len(each))] for each in sequences])
        positions_BT = torch.arange(width).expand(3, -1)
        places = [list(range(row * width, row * width + len(each))) for row, each in enumerate(sequences)]
        return ids_BT, positions_BT, None, places
    if packing is Packing.PACKED:
        ids_BT = torch.tensor([[*first, *second, *third]])
        positions_BT = torch.tensor([[position for each in sequences for position in range(len(each))]])
        ends = [len(first), len(first) + len(second), ids_BT.numel()]
        places = [list(range(end - len(each), end)) for end, each in zip(ends, sequences, strict=True)]
        return ids_BT, positions_BT, None, places
    # 1 2 3 occur once, followed by 4 5 6 7 and by 5 8; the third sequence is a tree of its own.
    ids_BT = torch.tensor([[*first, *second[3:], *third]])
    positions_BT = torch.tensor([[*range(7), 3, 4, *range(6)]])
    reach_BT = torch.tensor([[9] * 3 + [7] * 4 + [9] * 2 + [15] * 6])
    return ids_BT, positions_BT, reach_BT, [list(range(7)), [0, 1, 2, 7, 8], list(range(9, 15))]
