"""Stands in for SGLang's native CPU kernels, which have no wheel: the one that a dense model needs, in torch.

Every other kernel can be imported and raises NotImplementedError when it is called, so that a missing one is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+torch.shim"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes each request's new cache locations, end to end in `out_cache_loc`, into its row of the pool."""
    lengths = (end - start).tolist()
    pieces = torch.split(out_cache_loc[: sum(lengths)].to(req_to_token.dtype), lengths)
    for row, first, piece in zip(req_pool_indices.tolist(), start.tolist(), pieces, strict=True):
        req_to_token[row, first : first + len(piece)] = piece


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a native kernel that the CPU shim does not have")

    missing.__name__ = name
    return missing


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return factory(*arguments, **options)

    return make


def _never_pin_memory() -> None:
    """SGLang's LoRA code pins host memory unconditionally, and a CPU torch has no pinned allocator."""
    for name in ("empty", "zeros", "tensor", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_arguments, **_options: self  # type: ignore[method-assign]


if not torch.cuda.is_available():
    _never_pin_memory()
