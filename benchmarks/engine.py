"""Tokens per second of the embedded engine over HTTP: `python -m benchmarks.engine [MODEL] [--seconds 5]`.

Each client sends one request after another, 20 prompt tokens and 40 new ones, and reads the whole answer. The engine
has one thread; the clients share the machine with it, so on one core the figure includes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import describe
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import SamplingParameters
from proxy.engines.launch import LaunchPlan, embedded_plan, wait_until_ready
from proxy.engines.protocol import GenerateRequest
from proxy.engines.sglang import SglangEngine
from proxy.settings import EngineSettings

RESULT = Path(__file__).parent / "results" / "engine.json"
MODEL = Path("agents_examples/calculator/checkpoint")
CONCURRENCY = (1, 32, 64, 128)
PROMPT = tuple(range(20))
NEW_TOKENS = 40


async def client(engine: SglangEngine, number: int, until: float, *, stream: bool) -> int:
    """Return the number of output tokens that one client received before `until` (perf_counter seconds)."""
    tokens = count = 0
    while time.perf_counter() < until:
        request = GenerateRequest(
            request_id=f"{number}-{stream}-{until}-{count}",
            input_ids=TokenIds.of(PROMPT),
            sampling=SamplingParameters(max_new_tokens=NEW_TOKENS),
            stream=stream,
        )
        async for chunk in engine.generate(request):
            tokens += len(chunk.output_ids)
        count += 1
    return tokens


async def measure(url: str, concurrency: int, seconds: float, *, stream: bool) -> int:
    """Return whole tokens per second over all clients, after a warm-up of one second."""
    engine = SglangEngine(url, EngineSettings(url=url))
    for duration in (1.0, seconds):
        start = time.perf_counter()
        counts = await asyncio.gather(
            *(client(engine, number, start + duration, stream=stream) for number in range(concurrency))
        )
        elapsed = time.perf_counter() - start
    await engine.aclose()
    return int(sum(counts) / elapsed)


async def measure_all(
    plan: LaunchPlan, process: subprocess.Popen[bytes], seconds: float
) -> dict[str, dict[str, int]]:
    await wait_until_ready(plan.url, timeout=60, process_alive=lambda: process.poll() is None)
    return {
        name: {
            str(concurrency): await measure(plan.url, concurrency, seconds, stream=stream)
            for concurrency in CONCURRENCY
        }
        for name, stream in (("whole", False), ("streamed", True))
    }


def run(model: str, seconds: float) -> dict[str, dict[str, int]]:
    """Start the engine, measure it and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan = embedded_plan(model=model, port=port)
    process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env})
    try:
        return asyncio.run(measure_all(plan, process, seconds))
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=str(MODEL), help="directory of a Hugging Face model (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is measured")
    options = parser.parse_args()
    figures = run(options.model, options.seconds)
    result = {
        "machine": describe(),
        "model": options.model,
        "parameters": parameters(Path(options.model)),
        "prompt_tokens": len(PROMPT),
        "new_tokens": NEW_TOKENS,
        "seconds": options.seconds,
        "tokens_per_second_by_concurrency": figures,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def parameters(model: Path) -> int:
    """Count the parameters in the model's safetensors files."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the handle is no mapping
                size = 1
                for axis in tensors.get_slice(name).get_shape():
                    size *= axis
                total += size
    return total


if __name__ == "__main__":
    main()
