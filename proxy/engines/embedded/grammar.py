"""Constrained decoding: masks of the tokens that may come next.

The model thread asks for a mask before each draw, and advances the grammar by the drawn token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from proxy.engines.common.grammar_compiler import GrammarState


def allowed_next(states: Sequence[GrammarState], vocabulary: int) -> torch.Tensor:
    """Return `[C, V]`, true for the tokens that each state allows next. A state with a `failure` allows all
    tokens."""
    # Bit masks as llguidance writes them, 32 tokens in an integer.
    masks = np.full((len(states), -(-vocabulary // 32)), -1, dtype=np.int32)
    for row, state in zip(masks, states, strict=True):
        if not state.matcher.is_error():
            state.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
    for row, state in zip(allowed, states, strict=True):
        if state.matcher.is_error():
            row[:] = True
        elif state.stop_ids and row[state.eos_ids].any():
            row[state.stop_ids] = True
    return torch.from_numpy(allowed)
