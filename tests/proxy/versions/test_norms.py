"""Versions whose tensors are of another size than their parent's are refused; healthy steps are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.errors import WeightsRejected
from proxy.versions.inspector import WeightsInspector
from proxy.versions.norms import FIT_FLOOR, STEP_FLOOR, read_sizes
from tests.proxy.versions.test_weights import ADAPTER, LAYER, Arrays, Place, base_tensors

A, B = f"{ADAPTER}A.weight", f"{ADAPTER}B.weight"
SMALL: Arrays = {A: np.full((2, 4), 0.28, np.float32), B: np.full((4, 2), 0.002, np.float32)}


class Line(Place):
    """A base model, and versions that are made from one another."""

    def restart(self) -> None:
        self.inspector = WeightsInspector(self.root)

    async def commit(
        self, tensors: Arrays, parent: WeightsReference | None, *, adapter: bool = False, floor: float = STEP_FLOOR
    ) -> WeightsReference:
        weights = self.adapter(tensors) if adapter else self.publish(tensors)
        await self.check(weights)
        await self.inspector.compare(weights, parent, str(self.base), floor=floor)
        return weights

    async def refused(self, tensors: Arrays, parent: WeightsReference | None, *, adapter: bool = False) -> str:
        with pytest.raises(WeightsRejected) as rejected:
            await self.commit(tensors, parent, adapter=adapter)
        return rejected.value.message


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def moved(tensors: Arrays, by: float) -> Arrays:
    """Return tensors of which each number has moved by `by` in a direction of its own."""
    numbers = np.random.default_rng(0)
    return {
        name: tensor + by * numbers.choice([-1, 1], tensor.shape).astype(np.float32)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("factor", [1000, 0.001])
async def test_a_tensor_of_another_size_is_refused_against_base_and_parent(line: Line, factor: float) -> None:
    tensors = {**base_tensors(), "model.norm.weight": np.ones(4, np.float32)}
    line.configure(tensors)
    first = moved(tensors, 0.01)
    parent = await line.commit(first, None)
    bad = {**moved(first, 0.01), "model.norm.weight": first["model.norm.weight"] * np.float32(factor)}
    for before in (None, parent):
        reason = await line.refused(bad, before)
        assert "the root mean square of model.norm.weight went from 1" in reason
        assert "server.max_norm_change" in reason


async def test_a_proxy_that_restarted_and_a_parent_that_is_gone(line: Line) -> None:
    tensors = base_tensors()
    line.configure(tensors)
    parent = await line.commit(tensors, None)
    bad = {**tensors, LAYER: tensors[LAYER] * 1000}
    line.restart()
    assert LAYER in await line.refused(bad, parent)
    line.restart()
    for file in Path(parent.uri).iterdir():
        file.unlink()
    await line.commit(bad, parent)


async def test_tensors_that_begin_at_zero_may_move(line: Line) -> None:
    tensors = {**base_tensors(), "model.norm.weight": np.zeros(4, np.float32)}
    line.configure(tensors)
    await line.commit(moved(tensors, 0.05), None)
    assert "model.norm.weight" in await line.refused(moved(tensors, 0.5), None)
    await line.commit(moved(tensors, 0.5), None, floor=FIT_FLOOR)


async def test_adapters_are_compared_with_their_beginning_and_with_their_parent(line: Line) -> None:
    parent = await line.commit(SMALL, None, adapter=True)
    second = moved(SMALL, 0.002)
    await line.commit(second, parent, adapter=True)
    for name, before in ((A, None), (B, None), (A, parent), (B, parent)):
        assert name in await line.refused({**second, name: second[name] * 1000}, before, adapter=True)


async def test_the_kinds_of_parent_and_version_may_differ(line: Line) -> None:
    tensors = base_tensors()
    line.configure(tensors)
    adapter = await line.commit(SMALL, None, adapter=True)
    whole = await line.commit(tensors, adapter)
    assert (adapter.format, whole.format) == (WeightsFormat.ADAPTER, WeightsFormat.HUGGINGFACE)
    assert LAYER in await line.refused({**tensors, LAYER: tensors[LAYER] * 1000}, adapter)
    await line.commit(SMALL, whole, adapter=True)


def test_sizes_are_those_of_torch_in_every_dtype(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors = {str(each): torch.randn(1500, 1000, generator=generator).to(each) for each in dtypes}
    others = {"counts": torch.arange(3), "small": torch.ones(3).to(torch.float8_e4m3fn), "empty": torch.ones(1, 0)}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    sizes = read_sizes(tmp_path, lambda: False)
    expected = {name: each.double().pow(2).mean().sqrt().item() for name, each in tensors.items()}
    assert sizes == pytest.approx(expected, rel=1e-5)
