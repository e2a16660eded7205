"""Log-probabilities of chosen tokens, in chunks: the logits of all tokens never exist at once.

Axes: N predicted tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.compiling import compiled, why_not

OfLogits = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits_NV, targets_N, temperature_N) → (log-probabilities, entropies)."""

LOGITS_PER_CHUNK = 1 << 24
"""64 MiB of float32."""
LOGITS_PER_CHUNK_ON_CUDA = 1 << 28
"""512 MiB of bfloat16: each chunk reads the head's weights and adds to their gradient, so it must have many tokens.
Measured by `make bench-gpu`: beyond it memory grows faster than time is saved."""

_log = structlog.get_logger("trainer")


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    vocabulary: int,
    logits_per_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log softmax(head(h) / temperature)[target], entropy in nats of the same distribution), shape N, float32.

    The entropy carries no gradient. More tokens than fit a chunk are computed chunk by chunk, and once more in the
    backward pass, so that no more than one chunk's logits are alive.
    """
    if logits_per_chunk is None:
        logits_per_chunk = LOGITS_PER_CHUNK_ON_CUDA if hidden_ND.is_cuda else LOGITS_PER_CHUNK
    chunk = max(1, logits_per_chunk // vocabulary)
    scored = fused(hidden_ND.device) if hidden_ND.is_cuda else of_logits
    if hidden_ND.shape[0] <= chunk:
        return _chunk(scored, head, hidden_ND, targets_N, temperature_N)
    parts = [
        checkpoint(
            _chunk,
            scored,
            head,
            hidden_ND[start : start + chunk],
            targets_N[start : start + chunk],
            temperature_N[start : start + chunk],
            use_reentrant=False,
        )
        for start in range(0, hidden_ND.shape[0], chunk)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    scored: OfLogits, head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    return scored(head(hidden_ND), targets_N, temperature_N)


def of_logits(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return -functional.nll_loss(logprobs_NV, targets_N, reduction="none"), entropy_N


@cache
def fused(device: torch.device) -> OfLogits:
    """`of_logits` in a few passes over the logits as the head gives them, instead of a dozen over float32 copies. As
    it is, with a warning, where a trial finds that it cannot be compiled for the device."""
    found = compiled(of_logits, dynamic=True)
    logits_NV = torch.zeros(4, 8, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            logprobs_N, _ = found(logits_NV, torch.arange(4, device=device), torch.ones(4, device=device))
            torch.autograd.backward(logprobs_N.sum())
    except Exception as error:  # noqa: BLE001 - of compilers and drivers
        _log.warning(
            "log-probabilities are computed without torch.compile, slower and with more memory", reason=why_not(error)
        )
        return of_logits
    return found
