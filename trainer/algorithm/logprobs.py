"""Log-probabilities of chosen tokens, computed in chunks: the logits of all tokens never exist at once.

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

OfLogits = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""(logits_NV, targets_N, temperature_N, entropy_gradient) → (log-probabilities, entropies)."""

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
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log softmax(head(h) / temperature)[target], entropy in nats of the same distribution), N, float32.

    The entropy carries a gradient only with `entropy_gradient`, because its backward pass takes more memory and time.
    If there are several chunks, each is computed again in the backward pass, so that only the logits of one chunk are
    in memory.
    """
    if logits_per_chunk is None:
        logits_per_chunk = LOGITS_PER_CHUNK_ON_CUDA if hidden_ND.is_cuda else LOGITS_PER_CHUNK
    chunk = max(1, logits_per_chunk // vocabulary)
    scored = fused(hidden_ND.device, entropy_gradient) if hidden_ND.is_cuda else of_logits
    if hidden_ND.shape[0] <= chunk:
        return _chunk(scored, head, hidden_ND, targets_N, temperature_N, entropy_gradient)
    parts = [
        checkpoint(
            _chunk,
            scored,
            head,
            hidden_ND[start : start + chunk],
            targets_N[start : start + chunk],
            temperature_N[start : start + chunk],
            entropy_gradient,
            use_reentrant=False,
        )
        for start in range(0, hidden_ND.shape[0], chunk)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def exact_token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    vocabulary: int,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` with a head that multiplies in float32, within a model that computes in bfloat16.

    A logit of 20 in bfloat16 is off by up to 0.06, and so is the log-probability
    (MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.2).
    """
    # Half the logits per chunk: float32 takes twice the bytes of bfloat16.
    logits_per_chunk = LOGITS_PER_CHUNK_ON_CUDA // 2 if hidden_ND.is_cuda else None
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return token_logprobs(
            head,
            hidden_ND.float(),
            targets_N,
            temperature_N,
            vocabulary,
            logits_per_chunk,
            entropy_gradient=entropy_gradient,
        )


def _chunk(
    scored: OfLogits,
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return scored(head(hidden_ND), targets_N, temperature_N, entropy_gradient)


def of_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of `token_logprobs` for the logits of one chunk."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return -functional.nll_loss(logprobs_NV, targets_N, reduction="none"), entropy_N


@cache
def fused(device: torch.device, entropy_gradient: bool = False) -> OfLogits:
    """Return `of_logits` compiled: a few passes over the head's own logits instead of a dozen over float32 copies.

    If a trial shows that it cannot be compiled for the device, warn and return it uncompiled.
    """
    found = compiled(of_logits, dynamic=True)
    logits_NV = torch.zeros(4, 8, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            logprobs_N, entropy_N = found(
                logits_NV, torch.arange(4, device=device), torch.ones(4, device=device), entropy_gradient
            )
            torch.autograd.backward(logprobs_N.sum() + entropy_N.sum())
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise errors of any kind
        _log.warning(
            "log-probabilities are computed without torch.compile, slower and with more memory", reason=why_not(error)
        )
        return of_logits
    return found
