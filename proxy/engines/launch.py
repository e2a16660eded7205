"""Command lines of local engines, and the wait until one answers. Nothing here starts a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from proxy.errors import EngineTimeout, EngineUnavailable
from proxy.settings import ConfigurationError

HOST = "127.0.0.1"
SGLANG_READY_MARKER = ".sglang-cpu-ready"
SGLANG_SHIM = Path(__file__).parents[2] / "scripts" / "sglang_cpu" / "shim"
# Pause between two health checks of a starting engine.
_POLL_SECONDS = 0.1

SGLANG_FLAGS = ("--incremental-streaming-output",)
"""For every SGLang: chunks then hold only new tokens. Cumulative chunks cost quadratic time to parse."""

SGLANG_CPU_FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--grammar-backend=llguidance",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--max-total-tokens=32768",
    "--max-running-requests=32",
)


SGLANG_ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that SGLang reserves room for; an adapter of any other layer is refused."""

# SGLang's own default for adapters in one batch: requests of further ones wait for the next batch.
_SGLANG_ADAPTERS_PER_BATCH = 8


class AdapterBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The most LoRA adapters that an engine has in memory, and the highest rank of one."""

    loaded: int
    rank: int


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start, which will answer at `url`. `env` is added to the environment of the starting process."""

    argv: tuple[str, ...]
    env: dict[str, str]
    url: str


def embedded_plan(
    *,
    model: str,
    port: int,
    host: str = HOST,
    weight_label: str = "default",
    device: str = "cpu",
    threads: int = 1,
    seed: int | None = None,
    adapters: AdapterBounds | None = None,
    python: str = sys.executable,
) -> LaunchPlan:
    """Return the plan for the embedded engine, in the proxy's own environment. Without `adapters` it has its own
    bounds for them."""
    argv = [python, "-m", "proxy.engines.embedded", "--model", model, "--host", host, "--port", str(port)]
    argv += ["--device", device, "--threads", str(threads), "--weight-version", weight_label]
    if device == "cuda":
        argv += ["--dtype", "bfloat16"]
    if seed is not None:
        argv += ["--seed", str(seed)]
    if adapters is not None:
        argv += ["--max-loaded-loras", str(adapters.loaded), "--max-lora-rank", str(adapters.rank)]
    return LaunchPlan(argv=tuple(argv), env={"OMP_NUM_THREADS": str(threads)}, url=_url(host, port))


def scripted_plan(
    *,
    model: str,
    port: int,
    host: str = HOST,
    script: Path | None = None,
    weight_label: str = "default",
    ignore_adapters: bool = False,
    python: str = sys.executable,
) -> LaunchPlan:
    """Return the plan for the scripted engine, in the proxy's own environment. Without a `script` it echoes
    messages. With `ignore_adapters` it serves the base model for every adapter."""
    argv = [python, "-m", "proxy.engines.scripted", "--model", model, "--host", host, "--port", str(port)]
    argv += ["--weight-version", weight_label]
    if script is not None:
        argv += ["--script", str(script)]
    if ignore_adapters:
        argv.append("--ignore-adapters")
    return LaunchPlan(argv=tuple(argv), env={}, url=_url(host, port))


def sglang_cpu_plan(
    *,
    model: str,
    port: int,
    venv: Path,
    host: str = HOST,
    weight_label: str = "default",
    threads: int = 1,
    adapters: AdapterBounds | None = None,
    flags: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan for the real SGLang on a CPU, from the environment that `make sglang-cpu` installs. Without
    `adapters` it takes none.

    Raises ConfigurationError if that environment does not exist.
    """
    if not (venv / SGLANG_READY_MARKER).is_file():
        raise ConfigurationError(
            f"there is no SGLang for CPU in {venv}: run `make sglang-cpu` (about 3.3 GB), "
            "or set engine.sglang_venv to where it is"
        )
    argv = _sglang_argv(str(venv / "bin" / "python"), model, host, port, weight_label)
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(SGLANG_SHIM),
        "PYTHONWARNINGS": "ignore",
        # Otherwise the first constrained request waits a minute for a C++ compiler, which may not be installed.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    if adapters is not None:
        # The other back ends for adapters are kernels for GPUs.
        argv = (*argv, *_adapter_flags(adapters), "--lora-backend=torch_native")
    return LaunchPlan(argv=(*argv, *SGLANG_CPU_FLAGS, *flags), env=env, url=_url(host, port))


def sglang_gpu_plan(
    *,
    model: str,
    port: int,
    python: str,
    host: str = HOST,
    weight_label: str = "default",
    tensor_parallel: int = 1,
    adapters: AdapterBounds | None = None,
    flags: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan for SGLang on a GPU; `python` is the interpreter of an environment with SGLang, and
    `tensor_parallel` the number of GPUs that divide the model. Without `adapters`, SGLang refuses adapters."""
    argv = _sglang_argv(python, model, host, port, weight_label)
    if tensor_parallel > 1:
        argv = (*argv, f"--tp-size={tensor_parallel}")
    if adapters is not None:
        argv = (*argv, *_adapter_flags(adapters))
    return LaunchPlan(argv=(*argv, *flags), env={}, url=_url(host, port))


def _sglang_argv(python: str, model: str, host: str, port: int, weight_label: str) -> tuple[str, ...]:
    return (
        *(python, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port)),
        *("--weight-version", weight_label),
        *SGLANG_FLAGS,
    )


def _adapter_flags(bounds: AdapterBounds) -> tuple[str, ...]:
    return (
        "--enable-lora",
        f"--max-lora-rank={bounds.rank}",
        f"--max-loras-per-batch={min(bounds.loaded, _SGLANG_ADAPTERS_PER_BATCH)}",
        f"--max-loaded-loras={bounds.loaded}",
        *("--lora-target-modules", *SGLANG_ADAPTED_MODULES),
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def wait_until_ready(url: str, *, timeout: float, process_alive: Callable[[], bool]) -> None:
    """Return once the engine would generate.

    Raises EngineUnavailable when the process ends, EngineTimeout after `timeout` seconds.
    """
    # Only health checks are sent before that, because weight updates crash a starting SGLang.
    try:
        # Without the environment's proxies, which would be asked for an address on loopback.
        async with asyncio.timeout(timeout), httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            while not await _answers(client):
                if not process_alive():
                    raise EngineUnavailable("the engine's process ended while it was starting; its log says why")
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise EngineTimeout(f"the engine was not ready after {timeout:.0f} seconds") from error


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health_generate")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
