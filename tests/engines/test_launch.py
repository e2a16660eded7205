from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engines.launch import (
    SGLANG_CPU_FLAGS,
    SGLANG_FLAGS,
    SGLANG_READY_MARKER,
    SGLANG_SHIM,
    AdapterBounds,
    embedded_plan,
    scripted_plan,
    sglang_cpu_plan,
    sglang_gpu_plan,
    wait_until_ready,
)
from proxy.errors import EngineTimeout, EngineUnavailable
from proxy.settings import ConfigurationError
from tests.engines.conftest import NOBODY

SCRIPTS = SGLANG_SHIM.parent


def test_without_sglang_there_is_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="make sglang-cpu"):
        sglang_cpu_plan(model="m", port=1, venv=tmp_path)


def test_the_script_and_the_plan_have_the_same_flags(tmp_path: Path) -> None:
    (tmp_path / SGLANG_READY_MARKER).touch()
    plan = sglang_cpu_plan(model="m", port=1, venv=tmp_path, flags=("--enable-lora",))
    assert set(SGLANG_CPU_FLAGS + SGLANG_FLAGS) < set(plan.argv)
    assert plan.argv[-1] == "--enable-lora"
    script = (SCRIPTS / "serve.sh").read_text()
    flags = dict(re.findall(r"(--[a-z-]+)(?:[= ]([a-z0-9_]+))?", script[script.index("exec ") :]))
    for flag in SGLANG_CPU_FLAGS + SGLANG_FLAGS:
        name, _, value = flag.partition("=")
        assert flags[name] == value
    assert all(f"{name}=" in script for name in plan.env)
    assert SGLANG_READY_MARKER in script
    assert SGLANG_READY_MARKER in (SCRIPTS / "install.sh").read_text()
    assert (SGLANG_SHIM / "sgl_kernel" / "__init__.py").is_file()


def test_plans_name_the_model_the_port_and_the_label() -> None:
    gpu = sglang_gpu_plan(model="m", port=31, python="py", weight_label="run:0")
    assert gpu.argv[:3] == ("py", "-m", "sglang.launch_server")
    assert gpu.url == "http://127.0.0.1:31"
    embedded = embedded_plan(model="m", port=31, weight_label="run:0", device="cuda", threads=2, seed=5)
    for argv, words in ((gpu.argv, ("--model-path", "m")), (embedded.argv, ("--model", "m"))):
        text = " ".join(argv)
        assert " ".join(words) in text
        assert "--port 31" in text
        assert "--weight-version run:0" in text
    assert "--seed 5" in " ".join(embedded.argv)
    assert "--dtype bfloat16" in " ".join(embedded.argv)
    assert embedded.env == {"OMP_NUM_THREADS": "2"}


def test_adapters_are_allowed_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / SGLANG_READY_MARKER).touch()
    for bounds, per_batch in ((AdapterBounds(loaded=3, rank=5), 3), (AdapterBounds(loaded=20, rank=5), 8)):
        cpu = sglang_cpu_plan(model="m", port=1, venv=tmp_path, adapters=bounds).argv
        gpu = sglang_gpu_plan(model="m", port=1, python="py", adapters=bounds).argv
        for argv in (cpu, gpu):
            assert "--enable-lora" in argv
            assert f"--max-loaded-loras={bounds.loaded}" in argv
            assert f"--max-loras-per-batch={per_batch}" in argv
            assert "--max-lora-rank=5" in argv
        assert "--lora-backend=torch_native" in cpu
        assert not any(flag.startswith("--lora-backend") for flag in gpu)
        embedded = " ".join(embedded_plan(model="m", port=1, adapters=bounds).argv)
        assert f"--max-loaded-loras {bounds.loaded} --max-lora-rank 5" in embedded
    assert "--enable-lora" not in sglang_cpu_plan(model="m", port=1, venv=tmp_path).argv
    assert "--ignore-adapters" in scripted_plan(model="m", port=1, ignore_adapters=True).argv


async def test_waiting_ends_when_the_process_does() -> None:
    with pytest.raises(EngineUnavailable, match="ended"):
        await wait_until_ready(NOBODY, timeout=30, process_alive=lambda: False)


async def test_waiting_ends_after_its_time() -> None:
    with pytest.raises(EngineTimeout, match="not ready"):
        await wait_until_ready(NOBODY, timeout=0.3, process_alive=lambda: True)


async def test_help_and_wrong_models_say_what_to_do(tmp_path: Path) -> None:
    async def run(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy.engines.embedded", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    (helped, text), (wrong, words), (bad, usage) = await asyncio.gather(
        run("--help"), run("--model", str(tmp_path)), run("--model", "m", "--threads", "0")
    )
    assert helped == 0
    assert "curl" in text
    assert wrong == 1
    assert f"cannot serve {tmp_path}" in words
    assert bad == 2
    assert "--threads must be 1 or more" in usage
