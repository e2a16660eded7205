"""Bad versions of every kind, committed while streams run, and a rollback: what callers see of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.pool.installation import Installation
from benchmarks.pool.whole_versions import Tensors, WholeVersions
from proxy.contract.claim import CommitRequest
from proxy.errors import BaseRlError
from trainer.errors import ProxyRefused
from trainer.proxy_client import ProxyClient

_FILE = "model.safetensors"
_LAYER = "model.layers.1.self_attn.q_proj.weight"
_ADAPTED = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
_SETTLED_S = 60.0


def _rewritten(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        save_file(change(load_file(directory / _FILE)), directory / _FILE, {"format": "pt"})

    return spoil


def _overwritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / _FILE).write_bytes(change((directory / _FILE).read_bytes()))

    return spoil


def _adapter(rank: int, rows: int, stated_rank: int) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        width = load_file(directory / _FILE)[_LAYER].shape[1]
        for file in directory.iterdir():
            file.unlink()
        config = {"peft_type": "LORA", "r": stated_rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        tensors = {f"{_ADAPTED}A.weight": torch.ones(rank, width), f"{_ADAPTED}B.weight": torch.ones(rows, rank)}
        save_file(tensors, directory / "adapter_model.safetensors")

    return spoil


def _with_nan(tensors: Tensors) -> Tensors:
    tensors[_LAYER][3, 5] = torch.nan
    return tensors


BEFORE_COMMIT: dict[str, Callable[[Path], None]] = {
    "renamed": _rewritten(lambda made: {f"x.{name}": each for name, each in made.items()}),
    "missing layer": _rewritten(lambda made: {name: each for name, each in made.items() if ".layers.1." not in name}),
    "wrong shape": _rewritten(lambda made: {**made, _LAYER: made[_LAYER][:-1].clone()}),
    "NaN": _rewritten(_with_nan),
    "another dtype": _rewritten(lambda made: {**made, _LAYER: made[_LAYER].to(torch.int32)}),
    "adapter of another rank": _adapter(2, 96, 3),
    "adapter of another shape": _adapter(2, 95, 2),
}
"""What a trainer with a bug publishes: the checksums of the bad files are right."""
AFTER_COMMIT: dict[str, Callable[[Path], None]] = {
    "truncated": _overwritten(lambda content: content[:-1000]),
    "flipped bytes": _overwritten(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
}
"""What a storage does to the files of a version."""


async def try_bad_versions(
    installation: Installation, client: ProxyClient, versions: WholeVersions, run: str
) -> dict[str, str]:
    """Commit a bad version of each kind, and return the reason that each was refused or rejected for.

    Raises AssertionError if one is accepted, or if there is not exactly one alert for one.
    """
    reasons = {}
    for kind, spoil in BEFORE_COMMIT.items():
        head = await asyncio.to_thread(client.head)
        request = versions.commit(head.version, weights=head.version + 1, spoil=spoil)
        try:
            await asyncio.to_thread(client.commit, request)
        except (ProxyRefused, BaseRlError) as error:
            reasons[kind] = str(error)
        else:
            raise AssertionError(f"a bad version was committed: {kind}")
    for kind, spoil in AFTER_COMMIT.items():
        reasons[kind] = await _rejection(installation, client, versions, run, spoil=spoil)
    reasons["wrong numbers"] = await _rejection(installation, client, versions, run, spoil=None)
    return reasons


async def _rejection(
    installation: Installation,
    client: ProxyClient,
    versions: WholeVersions,
    run: str,
    *,
    spoil: Callable[[Path], None] | None,
) -> str:
    """Return why a version was rejected that was good at its commit. `spoil` damages the files before the load; None:
    the engine computes other numbers with them than the trainer reported."""
    head = (await asyncio.to_thread(client.head)).version
    alerts = len(_rejections(installation))
    path = f"/api/v1/runs/{run}/versions"
    await _post(installation, f"{path}/{head}/pin", "the next version is damaged before it is loaded")
    probe_of = head + 3 if spoil is None else None
    request: CommitRequest = versions.commit(head, weights=head + 1, probe_of=probe_of, spoil=lambda _: None)
    bad = (await asyncio.to_thread(client.commit, request)).version
    versions.set_of[bad] = versions.set_number(head + 1)
    if spoil is not None:
        spoil(Path(request.weights.uri))
    await _post(installation, f"{path}/unpin", "it is damaged now")
    async with asyncio.timeout(_SETTLED_S):
        while len(found := _rejections(installation)) == alerts:  # noqa: ASYNC110  (of another process)
            await asyncio.sleep(0.05)
        await _until_served(installation, run, head)
    assert len(found) == alerts + 1, f"one alert and not {len(found) - alerts}"
    assert found[-1]["version"] == bad
    health = await installation.health()
    assert any(f"version {bad} " in problem for problem in health["problems"]), health["problems"]
    return str(found[-1]["reason"]).replace(f"{installation.weights}/", "")


async def roll_back(installation: Installation, run: str) -> tuple[float, int]:
    """Take the run back by one version. Return the time of the command (seconds since the epoch) and the version that
    it left."""
    before = int((await _run(installation, run))["serving_version"])
    at = time.time()
    answer = await _post(installation, f"/api/v1/runs/{run}/versions/rollback", "to see how long it takes")
    async with asyncio.timeout(_SETTLED_S):
        await _until_served(installation, run, answer["head"])
    return at, before


def seconds_to_the_last_call(installation: Installation, since: float, version: int) -> float:
    """Return how long after `since` the last call began that a version answered."""
    rows = installation.rows("SELECT started_at, spans FROM turns WHERE state <> 'failed'")
    first = [(began, spans_of(spans)[:1]) for began, spans in rows]
    late = [began - since for began, spans in first if began > since and spans and spans[0][0] == version]
    return max(late, default=0.0)


def spans_of(text: str | bytes) -> list[tuple[int, int, int]]:
    """Return (version, start, end) of every span of a recorded turn."""
    return [(version, start, end) for version, start, end in json.loads(text)]


def _rejections(installation: Installation) -> list[dict[str, Any]]:
    rows = installation.rows("SELECT data FROM events WHERE kind = 'version.rejected' ORDER BY id")
    return [json.loads(data) for (data,) in rows]


async def _until_served(installation: Installation, run: str, version: int) -> None:
    while (await _run(installation, run))["serving_version"] != version:  # noqa: ASYNC110  (by another process)
        await asyncio.sleep(0.05)


async def _run(installation: Installation, run: str) -> dict[str, Any]:
    answer = await installation.admin.get(f"/api/v1/runs/{run}")
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def _post(installation: Installation, path: str, reason: str) -> dict[str, Any]:
    answer: httpx.Response = await installation.admin.post(path, json={"reason": reason})
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
