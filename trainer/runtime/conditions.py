"""The conditions of a step that its bits depend on: versions, device, threads, ranks."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from proxy.contract.step import StepConditions
from trainer.parallel.mesh import Ranks


def conditions(ranks: Ranks) -> StepConditions:
    on_gpu = ranks.device.type == "cuda"
    return StepConditions(
        trainer=importlib.metadata.version("base-rl"),
        torch=str(torch.__version__),
        transformers=importlib.metadata.version("transformers"),
        python=platform.python_version(),
        machine=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        device=ranks.device.type,
        device_name=torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        threads=torch.get_num_threads(),
        ranks=ranks.size,
    )


def differences(then: StepConditions, now: StepConditions) -> list[tuple[str, str, str]]:
    """Return (name, value then, value now) of each condition that differs."""
    return [
        (name, str(getattr(then, name)), str(getattr(now, name)))
        for name in StepConditions.__struct_fields__
        if getattr(then, name) != getattr(now, name)
    ]
