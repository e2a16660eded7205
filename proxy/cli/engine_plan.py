"""How the configured engine is started on this machine."""

from __future__ import annotations

import shutil
import subprocess

from proxy.engines.launch import HOST as LOOPBACK
from proxy.engines.launch import (
    AdapterBounds,
    LaunchPlan,
    embedded_plan,
    scripted_plan,
    sglang_cpu_plan,
    sglang_gpu_plan,
)
from proxy.settings import ConfigurationError, EngineKind, Settings


def engine_plan(settings: Settings, *, port: int, seed: int | None, host: str = LOOPBACK) -> LaunchPlan:
    """Return how the configured engine is started on this machine, to listen on `host`. Raises ConfigurationError if
    SGLang is absent, or if the engine cannot be divided among as many GPUs as configured."""
    engine, model = settings.engine, settings.run.model
    if engine.kind == EngineKind.SCRIPTED:
        return scripted_plan(model=model, port=port, host=host, script=engine.script and engine.script.resolve())
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and _has_gpu())
    adapters = AdapterBounds(loaded=engine.max_loras, rank=engine.max_lora_rank)
    if engine.kind == EngineKind.EMBEDDED:
        device = "cuda" if on_gpu else "cpu"
        return embedded_plan(
            model=model, port=port, host=host, device=device, threads=engine.threads, seed=seed, adapters=adapters
        )
    # SGLang reserves memory for adapters, and a model with layers that it cannot adapt does not start with them.
    wanted = adapters if any(run.weights == "adapter" for run in settings.declared_runs) else None
    if on_gpu:
        python = engine.sglang_venv / "bin" / "python"
        if not python.exists():
            raise ConfigurationError(f"no environment with SGLang in {engine.sglang_venv}: set engine.sglang_venv")
        return sglang_gpu_plan(
            model=model,
            port=port,
            host=host,
            python=str(python),
            tensor_parallel=engine.tensor_parallel,
            adapters=wanted,
        )
    if engine.tensor_parallel > 1:
        raise ConfigurationError(
            f"engine.tensor_parallel is {engine.tensor_parallel}, and this machine has no GPU: remove it, or start"
            " the engine on a machine with as many GPUs"
        )
    return sglang_cpu_plan(
        model=model,
        port=port,
        host=host,
        venv=engine.sglang_venv,
        threads=engine.threads,
        adapters=wanted,
        flags=() if seed is None else (f"--random-seed={seed}",),
    )


def _has_gpu() -> bool:
    """Return whether the driver lists a GPU. torch is not asked, because the proxy never imports it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    listing = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, check=False, timeout=30)
    return listing.returncode == 0 and "GPU" in listing.stdout
