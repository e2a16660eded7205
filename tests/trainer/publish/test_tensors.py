"""Versions in shared memory: complete there before the commit, on the disk after it, removed when nobody reads."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.contract.memory import reading
from proxy.contract.policy import STATE_INDEX, UNCOMMITTED_MARK, WeightsFormat
from tests.trainer.publish import test_adapters
from tests.trainer.publish.test_disk import World, same, state_of
from tests.trainer.tiny import load_tiny
from trainer.config import TensorsWeights
from trainer.errors import ConfigurationError, WeightsUnusable
from trainer.models.state_dict import gather_weights
from trainer.publish import disk, tensors
from trainer.publish.publisher import Staged
from trainer.publish.tensors import TensorsPublisher


class MemoryWorld(World):
    """The memory is a directory like any other: nothing but its speed depends on the file system."""

    def new_publisher(self, keep: int = 2, **settings: Any) -> TensorsPublisher:
        chosen = TensorsWeights(
            directory=self.directory, memory_directory=self.memory, keep_optimizer_states=keep, **settings
        )
        return TensorsPublisher(chosen, self.base)

    @property
    def memory(self) -> Path:
        return self.directory.parent / "memory"

    def copies(self) -> list[str]:
        return sorted(path.name for path in self.memory.glob("run_test/*"))

    def committed(self) -> Any:
        staged = saved(self.stage())
        self.publisher.settle(staged)
        self.commit(staged)
        return self.head


def saved(staged: Staged) -> Staged:
    assert staged.save is not None
    return staged.save(0)


@pytest.fixture
def world(tiny_model: Path, tmp_path: Path) -> Iterator[MemoryWorld]:
    made = MemoryWorld(tmp_path / "weights", tiny_model)
    yield made
    made.publisher.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_version_is_in_memory_first_and_on_the_disk_when_it_is_saved(world: MemoryWorld) -> None:
    staged = world.stage()
    place = world.memory / "run_test" / Path(staged.weights.uri).name
    assert not Path(staged.weights.uri).exists()
    assert {*staged.weights.files, UNCOMMITTED_MARK} == contents(place).keys()
    assert not any(name.startswith("trainer_state") for name in staged.weights.files)
    durable = saved(staged)
    assert durable.weights == msgspec.structs.replace(staged.weights, files=durable.weights.files)
    assert durable.weights.files.keys() - staged.weights.files.keys() == {STATE_INDEX}
    assert staged.weights.files.items() <= durable.weights.files.items()
    world.publisher.settle(durable)
    on_disk = contents(Path(durable.weights.uri))
    assert UNCOMMITTED_MARK not in on_disk
    for name in staged.weights.files:
        assert on_disk[name] == contents(place)[name]
    world.commit(durable)
    restored = world.new_publisher().restore(world.head, load_tiny(world.base))
    assert same(restored, state_of(msgspec.structs.replace(world.head, version=0)))


def test_the_copies_of_older_versions_are_removed_unless_they_are_read(world: MemoryWorld) -> None:
    names = [Path(world.committed().weights.uri).name for _ in range(2)]
    assert world.copies() == names
    with reading(world.memory / "run_test" / names[0]):
        names.append(Path(world.committed().weights.uri).name)
        assert world.copies() == names
    names.append(Path(world.committed().weights.uri).name)
    assert world.copies() == names[2:]
    assert world.names() == names


def test_what_a_dead_trainer_left_is_removed_and_what_a_living_one_writes_is_not(world: MemoryWorld) -> None:
    head = world.committed()
    dead, living = world.new_publisher(), world.new_publisher()
    saved(world.stage(dead))
    half = world.memory / "run_test" / ".v000002-0badcafe"
    half.mkdir()
    (half / UNCOMMITTED_MARK).touch()
    written = Path(world.stage(living).weights.uri).name
    dead.close()
    world.publisher.collect(head)
    assert world.copies() == sorted([Path(head.weights.uri).name, written])
    living.close()
    assert world.names() == [Path(head.weights.uri).name]


def test_the_memory_is_free_after_the_end_except_for_versions_that_are_nowhere_else(world: MemoryWorld) -> None:
    world.committed()
    unsaved = Path(world.stage().weights.uri).name
    world.publisher.close()
    assert world.copies() == [unsaved]
    other = world.new_publisher()
    other.collect(world.head)
    other.settle(saved(world.stage(other)))
    other.close()
    assert list(world.memory.iterdir()) == []


def test_a_refused_version_is_removed_from_memory_and_disk(world: MemoryWorld) -> None:
    world.publisher.discard(world.stage())
    world.publisher.discard(saved(world.stage()))
    assert world.copies() == world.names() == []


def test_a_version_that_does_not_fit_into_the_memory_is_not_written(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.committed()
    monkeypatch.setattr(tensors, "room_in", lambda _: 1000)
    with pytest.raises(WeightsUnusable, match=r"version 2 of .* MB does not fit .*--shm-size.*type = \"disk\""):
        world.stage()
    assert world.copies() == world.names() == [Path(before.weights.uri).name]


def test_memory_that_others_fill_meanwhile_is_reported_alike(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_shards", full)
    with pytest.raises(WeightsUnusable, match=r"version 1 does not fit into the .*--shm-size"):
        world.stage()
    assert world.copies() == []


def test_a_disk_that_refuses_the_version_leaves_the_copy_in_memory(world: MemoryWorld) -> None:
    staged = world.stage()
    world.directory.write_text("a file where the directory should be")
    with pytest.raises(WeightsUnusable, match="cannot write version 1"):
        saved(staged)
    assert world.copies() == [Path(staged.weights.uri).name]


def test_counters_are_saved_between_two_states(world: MemoryWorld) -> None:
    head = world.committed()
    plain = {"format": 2, "steps": 9, "means": {"turn": None, "session": 0.5}}
    weights = gather_weights(world.model.named_weights(), keep=True)
    staged = saved(world.publisher.stage(head, weights, plain, with_tensors=False))
    world.publisher.settle(staged)
    world.commit(staged)
    restored = world.new_publisher().restore(world.head, load_tiny(world.base))
    assert restored is not None
    assert restored["steps"] == 9


def test_adapters_are_written_to_the_disk_at_once(tiny_model: Path, tmp_path: Path) -> None:
    world = test_adapters.World(tmp_path / "weights", tiny_model)
    chosen = TensorsWeights(directory=world.directory, memory_directory=tmp_path / "memory")
    publisher = TensorsPublisher(chosen, world.base, world.policy)
    staged = publisher.stage(world.head, gather_weights(world.policy.named_weights(), keep=True), None)
    assert staged.save is None
    assert staged.weights.format is WeightsFormat.ADAPTER
    assert Path(staged.weights.uri).is_dir()
    assert not (tmp_path / "memory").exists()
    publisher.close()


def test_merged_adapters_go_through_memory(tiny_model: Path, tmp_path: Path) -> None:
    world = test_adapters.World(tmp_path / "weights", tiny_model, publish="merged")
    chosen = TensorsWeights(directory=world.directory, memory_directory=tmp_path / "memory")
    publisher = TensorsPublisher(chosen, world.base, world.policy)
    staged = saved(publisher.stage(world.head, gather_weights(world.policy.named_weights(), keep=True), None))
    assert "adapter/adapter_config.json" in staged.weights.files
    assert staged.weights.files.keys() == contents(Path(staged.weights.uri)).keys() - {UNCOMMITTED_MARK}
    publisher.close()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(world: MemoryWorld) -> None:
    world.memory.rmdir()
    world.memory.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"weights\.memory_directory: .* cannot be made"):
        world.new_publisher()
