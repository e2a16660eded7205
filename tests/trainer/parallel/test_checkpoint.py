"""A state written by several ranks is read by the same number, fewer or more (`make test-ranks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import settings_of
from tests.trainer.models.archon.together import together
from tests.trainer.parallel.divided import (
    die_while_writing,
    go_on,
    refused_by_a_disk,
    sent_to_engines,
    through_memory,
)
from tests.trainer.tiny import ALONE
from trainer.config import DiskWeights, TrainerSettings
from trainer.models.state_dict import read_weights
from trainer.parallel.checkpoint import load_state
from trainer.publish.disk import DiskPublisher

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

SIZES = (1, 2, 4)


@dataclass(frozen=True)
class World:
    """A model, how a number of processes trains it, and the directory of its versions."""

    base: Path
    directory: Path
    settings: Callable[[int], TrainerSettings]

    @property
    def head(self) -> Head:
        return Head(run_id=RunId("run_test"), run_name="policy", version=0, base_model=str(self.base), weights=None)

    def in_gang(self, size: int, heads: list[Head], updates: int) -> list[list[Head]]:
        arguments = (self.base, self.settings(size), self.directory, heads, updates)
        made: list[list[Head]] = go_on(ALONE, *arguments) if size == 1 else together(size, go_on, *arguments)
        return made


def sharded(_size: int) -> TrainerSettings:
    """FSDP2 with a critic, which is part of the state."""
    return settings_of(backend="fsdp", algorithm={"preset": "ppo", "mini_batches": 2})


def experts(size: int) -> TrainerSettings:
    """archon with tensors sharded twice along one dimension, stacks of experts, and layers that only one rank has."""
    layout = {1: None, 2: "p2", 4: "d2t2e2"}[size]
    return settings_of(layout=layout, algorithm={"mini_batches": 2})


@pytest.fixture(scope="module", params=[("qwen3", sharded), ("qwen3_moe", experts)], ids=["fsdp", "archon"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, settings = request.param
    base = tmp_path_factory.mktemp("base")
    save_random(base, name)
    return World(base=base, directory=tmp_path_factory.mktemp("weights"), settings=settings)


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Callable[[int], list[Head]]:
    """Return two consecutive versions made by this many processes."""
    return cache(lambda size: world.in_gang(size, [world.head], 2)[0])


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, dict):
        return {name: leaf for key, each in tree.items() for name, leaf in flat(each, f"{path}/{key}").items()}
    return {path: torch.as_tensor(tree if tree is not None else torch.nan)}


def contents(head: Head) -> dict[str, torch.Tensor]:
    """Return weights and trainer state."""
    assert head.weights is not None
    directory = Path(head.weights.uri)
    return {**read_weights(directory), **flat(load_state(directory / "trainer_state", ALONE, {}))}


@pytest.mark.parametrize("size", SIZES)
def test_a_run_continues_on_any_number_of_ranks(
    world: World, undisturbed: Callable[[int], list[Head]], size: int
) -> None:
    wanted = contents(undisturbed(1)[1])
    found = world.in_gang(size, [undisturbed(written)[0] for written in SIZES], 1)
    for written, (made,) in zip(SIZES, found, strict=True):
        tensors = contents(made)
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            gap = (tensor - wanted[name]).abs().max()
            assert not gap > 1e-5, (written, name, gap)  # a mean without any value yet is not a number
        if written == size:
            same = contents(undisturbed(size)[1])
            assert all(torch.equal(tensor.nan_to_num(), same[name].nan_to_num()) for name, tensor in tensors.items())


def test_a_version_through_memory_is_the_same(
    world: World, undisturbed: Callable[[int], list[Head]], tmp_path: Path
) -> None:
    made = together(2, through_memory, world.base, world.settings(2), tmp_path / "weights", world.head)
    found, wanted = contents(made), contents(undisturbed(2)[0])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor.nan_to_num(), wanted[name].nan_to_num()) for name, tensor in found.items())
    assert list((tmp_path / "memory").glob("run_test/*")) == []


def test_a_version_that_is_sent_to_engines_is_the_same(
    world: World, undisturbed: Callable[[int], list[Head]], tmp_path: Path
) -> None:
    made, is_received = together(2, sent_to_engines, world.base, world.settings(2), tmp_path / "weights", world.head)
    found, wanted = contents(made), contents(undisturbed(2)[0])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor.nan_to_num(), wanted[name].nan_to_num()) for name, tensor in found.items())
    assert is_received


def test_every_rank_writes_its_own_part(world: World, undisturbed: Callable[[int], list[Head]]) -> None:
    sizes = {}
    for size in SIZES:
        weights = undisturbed(size)[0].weights
        assert weights is not None
        files = sorted((Path(weights.uri) / "trainer_state").glob("*.safetensors"))
        assert [file.name for file in files] == [f"rank-{rank:05d}.safetensors" for rank in range(size)]
        sizes[size] = [file.stat().st_size for file in files]
    assert max(sizes[4]) < sizes[1][0] / 2


def test_ranks_that_die_while_writing_leave_only_removable_files(world: World, tmp_path: Path) -> None:
    arguments = (world.base, world.settings(2), tmp_path, world.head)
    with pytest.raises(AssertionError, match="rank"):
        together(2, die_while_writing, *arguments)
    (left,) = (tmp_path / "run_test").iterdir()
    assert left.name.startswith(".v000001-")
    assert list((left / "trainer_state").glob("rank-*.safetensors"))
    assert DiskPublisher(DiskWeights(directory=tmp_path), world.base).collect(world.head) == [left.name]
    assert list((tmp_path / "run_test").iterdir()) == []


def test_a_full_disk_of_one_rank_is_reported_by_all_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    said = together(2, refused_by_a_disk, world.base, world.settings(2), tmp_path, world.head)
    assert "at rank 1: [Errno 28] No space left on device" in said
    assert list((tmp_path / "run_test").iterdir()) == []
