"""Versions that kill an engine or that it would serve in silence: none reaches it, and what it held goes on serving.

Seen on SGLang 0.5.23 without the checks: a truncated file and renamed tensors kill it; a missing layer and a wrong
shape are served mixed with the version before, and so are NaN and flipped bits; an adapter of a wrong shape kills it
at its first request.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlalchemy import update

from proxy.contract.identifiers import SessionId
from proxy.contract.policy import WeightsFormat, WeightsReference, weight_label
from proxy.database import migrate
from proxy.database.tables import PolicyVersionRow, RunRow
from proxy.engines.protocol import LabelSpan
from proxy.engines.sglang import SglangEngine
from proxy.errors import WeightsRejected
from proxy.serving import checks
from proxy.serving.controller import ControllerSetup
from proxy.serving.reconciler import SwapController
from proxy.versions.inspector import WeightsInspector
from proxy.versions.service import VersionService
from tests.engines.conftest import Models, Reference
from tests.engines.generating import PROMPT, ask, collect
from tests.fakes.load import new_load
from tests.proxy.turns.world import World, open_world
from tests.proxy.versions.publishing import fit_request, reference

LAYER = "model.layers.1.self_attn.q_proj.weight"
ADAPTER = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
Tensors = dict[str, torch.Tensor]


class Unchecked(WeightsInspector):
    """A check that accepts everything, as the proxy did before versions were checked."""

    async def check(self, weights: WeightsReference, base_model: str) -> None:
        pass


class Deployment:
    """A run over model `a` on a real engine, without the proxy's HTTP."""

    def __init__(self, world: World, engine: SglangEngine, models: Models, storage: Path) -> None:
        parts: dict[str, Any] = {"database": world.database, "clock": world.clock, "signals": world.signals}
        self.world = world
        self.engine = engine
        self.models = models
        self.storage = storage
        inspector = WeightsInspector(storage)
        self.versions = VersionService(**parts, inspector=inspector)
        self.careless = VersionService(**parts, inspector=Unchecked(storage))
        setup = ControllerSetup(
            **parts,
            engine=engine,
            load=new_load(),
            run_id=world.run.id,
            inspector=inspector,
            health_interval_seconds=0.1,
        )
        self.swaps = SwapController(setup)

    def copy(self, name: str) -> Path:
        """Return a version's directory with the weights of model `b`."""
        return Path(shutil.copytree(self.models.b, self.storage / name))

    async def commit(self, weights: WeightsReference, versions: VersionService | None = None) -> None:
        head = await self.versions.head(self.world.run)
        request = fit_request([SessionId("ses_1")], head.version, weights)
        await (versions or self.versions).commit(self.world.run, request)

    async def reconcile(self) -> None:
        for _ in range(3):
            await self.swaps.reconcile()

    async def newest(self) -> Any:
        return max(await self.world.rows(PolicyVersionRow), key=lambda row: int(row.version))


@pytest.fixture
async def deployment(
    engine: SglangEngine, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deployment]:
    """A deployment that serves version 1, the weights of model `b`."""
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 60.0)
    async with run_over(models.a, tmp_path) as world:
        found = Deployment(world, engine, models, tmp_path / "weights")
        await found.reconcile()
        await found.commit(reference(found.copy("good")))
        await found.reconcile()
        assert found.swaps.version == 1
        yield found


@asynccontextmanager
async def run_over(model: Path, directory: Path) -> AsyncIterator[World]:
    url = f"sqlite:///{directory / 'store.sqlite3'}"
    migrate.upgrade(url)
    async with open_world(url) as world:
        await world.database.commit(
            lambda connection: connection.execute(update(RunRow).values(base_model=str(model)))
        )
        world.run = await world.current_run()
        yield world


def rewritten(change: Callable[[Tensors], Tensors]) -> Callable[[Path], WeightsReference]:
    """Write bad tensors with correct checksums, as a trainer with a bug would publish them."""

    def spoil(directory: Path) -> WeightsReference:
        file = directory / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})
        return reference(directory)

    return spoil


def overwritten(change: Callable[[bytes], bytes]) -> Callable[[Path], WeightsReference]:
    """Overwrite a file after its commit."""

    def spoil(directory: Path) -> WeightsReference:
        before, file = reference(directory), directory / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        return before

    return spoil


def adapter_of_a_wrong_shape(directory: Path) -> WeightsReference:
    for file in directory.iterdir():
        file.unlink()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{ADAPTER}A.weight": torch.ones(2, 64), f"{ADAPTER}B.weight": torch.ones(127, 2)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return reference(directory, WeightsFormat.ADAPTER)


def nan(tensors: Tensors) -> Tensors:
    tensors[LAYER][3, 5] = torch.nan
    return tensors


BAD: dict[str, tuple[Callable[[Path], WeightsReference], str]] = {
    "truncated": (overwritten(lambda content: content[:-1000]), "bytes, not"),
    "flipped bits": (overwritten(lambda content: content[:-1] + bytes([content[-1] ^ 1])), "SHA-256 differs"),
    "renamed": (rewritten(lambda made: {f"x.{name}": each for name, each in made.items()}), "has no tensors called"),
    "a missing layer": (
        rewritten(lambda made: {name: each for name, each in made.items() if ".layers.1." not in name}),
        "are missing",
    ),
    "a wrong shape": (rewritten(lambda made: {**made, LAYER: torch.ones(64, 64)}), "has the shape [64, 64]"),
    "NaN": (rewritten(nan), "not finite"),
    "an adapter of a wrong shape": (
        adapter_of_a_wrong_shape,
        "the adapter of model.layers.1",
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_weights_never_reach_an_engine(deployment: Deployment, reference_b: Reference, kind: str) -> None:
    spoil, reason = BAD[kind]
    bad = spoil(deployment.copy("bad"))
    with pytest.raises(WeightsRejected) as refused:
        await deployment.commit(bad)
    assert reason in refused.value.message
    assert (await deployment.versions.head(deployment.world.run)).version == 1

    await deployment.commit(bad, deployment.careless)
    await deployment.reconcile()
    newest = await deployment.newest()
    assert (newest.version, newest.state) == (2, "rejected")
    assert reason in str(newest.rejected_because)
    assert deployment.swaps.version == 1
    assert (await deployment.versions.head(deployment.world.run)).version == 1
    answer = await collect(deployment.engine, ask())
    assert answer.ids == reference_b.greedy(PROMPT, 16)
    assert answer.spans == (LabelSpan(label=weight_label(deployment.world.run_id, 1), start=0, end=16),)

    await deployment.commit(reference(deployment.copy("next")))
    await deployment.reconcile()
    assert deployment.swaps.version == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_good_weights_of_another_dtype_are_served(deployment: Deployment, dtype: torch.dtype) -> None:
    narrow = rewritten(lambda made: {name: each.to(dtype) for name, each in made.items()})
    await deployment.commit(narrow(deployment.copy("narrow")))
    await deployment.reconcile()
    assert deployment.swaps.version == 2
    assert len((await collect(deployment.engine, ask())).ids) == 16
