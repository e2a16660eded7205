"""Measurements of a device for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(device: torch.device, act: Callable[[], object]) -> int | None:
    """Return the peak growth of memory while `act` ran, or None on a CPU, where torch does not measure it."""
    if device.type != "cuda":
        act()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    act()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the distance relative to the norm of the expected value, in float64 on the CPU."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return float((found - wanted).norm() / wanted.norm())
