"""Directories of versions are complete or absent, and are removed only when nobody can need them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from tests.trainer.tiny import ALONE, load_tiny
from trainer.config import DiskWeights
from trainer.errors import WeightsUnusable
from trainer.models.state_dict import gather_weights
from trainer.parallel.checkpoint import load_state
from trainer.publish.disk import DiskPublisher
from trainer.publish.publisher import Staged
from trainer.publish.restoring import has_state


def state_of(head: Head) -> dict[str, Any]:
    moments = {
        "model.norm.weight": {
            "step": torch.tensor(2.0),
            "exp_avg": torch.arange(6.0).reshape(2, 3) / 7 + head.version,
        }
    }
    return {"format": 2, "steps": head.version, "means": {"turn": None, "session": 1 / 3}, "optimizer": moments}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], each) for key, each in wanted.items())
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else bool(found == wanted)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


class World:
    """A run's weights directory with a publisher on it."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.directory, self.base = directory, base
        self.run = directory / "run_test"
        self.head = Head(run_id=RunId("run_test"), run_name="policy", version=0, base_model=str(base), weights=None)
        self.model = load_tiny(base)
        self.publisher = self.new_publisher()

    def new_publisher(self, keep: int = 2, **settings: Any) -> DiskPublisher:
        chosen = DiskWeights(directory=self.directory, keep_optimizer_states=keep, **settings)
        return DiskPublisher(chosen, self.base)

    def stage(self, publisher: DiskPublisher | None = None) -> Staged:
        tensors = gather_weights(self.model.named_weights(), keep=True)
        return (publisher or self.publisher).stage(self.head, tensors, state_of(self.head))

    def commit(self, staged: Staged) -> None:
        self.head = msgspec.structs.replace(self.head, version=self.head.version + 1, weights=staged.weights)

    def committed(self) -> Any:
        """Publish a version and return the resulting head."""
        staged = self.stage()
        self.publisher.settle(staged)
        self.commit(staged)
        return self.head

    def names(self) -> list[str]:
        return sorted(path.name for path in self.run.iterdir())


@pytest.fixture
def world(tiny_model: Path, tmp_path: Path) -> World:
    return World(tmp_path / "weights", tiny_model)


def test_a_version_is_complete_and_its_digest_covers_its_safetensors(world: World) -> None:
    staged = world.stage()
    world.publisher.settle(staged)
    directory = Path(staged.weights.uri)
    assert directory.name.startswith("v000001-")
    content = b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))
    assert staged.weights.sha256 == hashlib.sha256(content).hexdigest()
    assert staged.weights.bytes == len(content)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((world.base / "config.json").read_text())["dtype"] == "bfloat16"
    assert (directory / "generation_config.json").is_file()


def test_the_state_is_restored(world: World) -> None:
    staged, before = world.stage(), state_of(world.head)
    world.publisher.settle(staged)
    world.commit(staged)
    other = load_tiny(world.base)
    with torch.no_grad():
        for _, parameter in other.named_weights():
            parameter.zero_()
    assert same(world.new_publisher().restore(world.head, other), before)
    for (_, wanted), (_, found) in zip(world.model.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(wanted, found)


def test_an_uncommitted_version_of_a_dead_trainer_is_removed(world: World) -> None:
    dead = world.new_publisher()
    world.stage(dead)
    dead.close()
    assert [name[:8] for name in world.publisher.collect(world.head)] == ["v000001-"]
    assert world.names() == []


def test_an_uncommitted_version_of_a_living_trainer_is_kept(world: World) -> None:
    living = world.new_publisher()
    staged = world.stage(living)
    assert world.publisher.collect(world.head) == []
    assert Path(staged.weights.uri).is_dir()
    living.close()


def test_a_version_whose_commit_was_never_answered_is_kept(world: World) -> None:
    dead = world.new_publisher()
    staged = world.stage(dead)
    world.commit(staged)
    dead.close()
    assert world.publisher.collect(world.head) == []
    successor = world.stage()
    world.publisher.settle(successor)
    world.commit(successor)
    assert world.new_publisher().collect(world.head) == []
    assert Path(staged.weights.uri).is_dir()


def test_a_rival_of_the_head_is_removed_and_its_ancestors_are_not(world: World) -> None:
    for _ in range(2):
        staged = world.stage()
        world.publisher.settle(staged)
        world.commit(staged)
    dead = world.new_publisher()
    before = msgspec.structs.replace(world.head, version=1)
    rival = dead.stage(before, gather_weights(world.model.named_weights(), keep=True), {})
    dead.close()
    assert world.publisher.collect(world.head) == [Path(rival.weights.uri).name]
    assert [name[:7] for name in world.names()] == ["v000001", "v000002"]


def test_a_discarded_version_leaves_nothing(world: World) -> None:
    world.publisher.discard(world.stage())
    assert world.names() == []


def test_a_kill_while_writing_leaves_only_removable_files(world: World) -> None:
    script = f"""
import os
from pathlib import Path
import torch
import trainer.publish.disk as disk
from proxy.contract.policy import Head
from trainer.config import DiskWeights
disk.checksums = lambda directory, known: os.kill(os.getpid(), 9)
head = Head(run_id="run_test", run_name="policy", version=0, base_model="", weights=None)
publisher = disk.DiskPublisher(DiskWeights(directory={str(world.directory)!r}), Path({str(world.base)!r}))
publisher.stage(head, {{"weight": torch.zeros(3)}}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -9
    (left,) = world.names()
    assert left.startswith(".v000001-")
    assert world.publisher.collect(world.head) == [left]
    assert world.names() == []


def test_a_full_disk_is_reported_and_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsUnusable, match="No space left on device"):
        world.stage()
    assert world.names() == []


def test_only_the_newest_optimiser_states_are_kept(world: World) -> None:
    staged = []
    for _ in range(4):
        staged.append(world.stage())
        world.publisher.settle(staged[-1])
        world.commit(staged[-1])
    kept = [(Path(each.weights.uri) / "trainer_state").exists() for each in staged]
    assert kept == [False, False, True, True] == [has_state(each.weights) for each in staged]
    assert all((Path(each.weights.uri) / "model.safetensors").exists() for each in staged)


@pytest.mark.parametrize("kind", ["index", "whole"])
def test_a_state_that_is_a_pickle_is_refused_unread_and_later_removed(
    world: World, kind: str, tmp_path: Path
) -> None:
    """A pickle runs its author's code as soon as it is read."""
    ran = tmp_path / "ran"
    made = []
    for version in range(4):
        made.append(world.stage())
        if version < 2:
            state = Path(made[-1].weights.uri) / "trainer_state"
            if kind == "whole":
                (state / "state.json").unlink()
            (state / {"index": ".metadata", "whole": "state.pt"}[kind]).write_bytes(pickle.dumps(Touch(ran)))
        world.publisher.settle(made[-1])
        world.commit(made[-1])
        if version == 1:
            with pytest.raises(WeightsUnusable, match="remove that directory and start the trainer again"):
                world.publisher.restore(world.head, world.model)
            assert not ran.exists()
    assert [has_state(each.weights) for each in made] == [False, False, True, True]
    assert not (Path(made[0].weights.uri) / "trainer_state").exists()


def test_a_state_that_claims_more_than_its_files_hold_is_refused(world: World) -> None:
    head = world.committed()
    index = Path(head.weights.uri) / "trainer_state" / "state.json"
    fields = json.loads(index.read_text())
    for tensor in fields["tensors"].values():
        tensor["shape"] = [1 << 40]
        tensor["parts"] = [{**part, "offsets": [0], "shape": [1 << 40]} for part in tensor["parts"]]
    index.write_text(json.dumps(fields))
    with pytest.raises(WeightsUnusable, match="too small for what it should hold"):
        load_state(index.parent, ALONE, {})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "trainer_state/state.json"])
def test_every_file_has_a_checksum(world: World, name: str) -> None:
    head = world.committed()
    file = Path(head.weights.uri) / name
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(WeightsUnusable, match=f"{name} is not that of version 1"):
        world.publisher.restore(head, world.model)


def test_a_file_that_was_not_published_is_refused(world: World) -> None:
    head = world.committed()
    (Path(head.weights.uri) / "zzz.safetensors").write_bytes(b"")
    with pytest.raises(WeightsUnusable, match=r"zzz.safetensors is not a file of version 1"):
        world.publisher.restore(head, world.model)


def test_a_version_outside_the_storage_is_never_read(world: World, tmp_path: Path) -> None:
    """Nor is it read through a link inside the storage."""
    head = world.committed()
    inside = Path(head.weights.uri)
    outside = tmp_path / "outside"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    for uri in (inside, outside, world.directory, world.run / ".." / ".." / "outside"):
        moved = msgspec.structs.replace(head, weights=msgspec.structs.replace(head.weights, uri=str(uri)))
        with pytest.raises(WeightsUnusable, match=r"set trainer\.weights\.directory"):
            world.publisher.restore(moved, world.model)


def test_an_old_version_is_verified_by_the_digest_of_its_weights(world: World) -> None:
    head = world.committed()
    shutil.rmtree(Path(head.weights.uri) / "trainer_state")
    before = msgspec.structs.replace(head, weights=msgspec.structs.replace(head.weights, files={}))
    assert world.publisher.restore(before, world.model) is None
    (Path(head.weights.uri) / "model.safetensors").write_bytes(b"other")
    with pytest.raises(WeightsUnusable, match="SHA-256 differs"):
        world.publisher.restore(before, world.model)


def test_a_half_removed_state_of_a_dead_trainer_is_removed(world: World) -> None:
    staged = world.stage()
    world.publisher.settle(staged)
    world.commit(staged)
    (Path(staged.weights.uri) / "trainer_state" / "state.json").unlink()
    assert not has_state(staged.weights)
    assert world.publisher.restore(world.head, world.model) is None
    successor = world.stage()
    world.publisher.settle(successor)
    assert not (Path(staged.weights.uri) / "trainer_state").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "state.json", "rank-00000.safetensors"])
def test_damaged_weights_are_refused(world: World, damage: str) -> None:
    staged = world.stage()
    world.publisher.settle(staged)
    world.commit(staged)
    file = Path(staged.weights.uri) / "model.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        (Path(staged.weights.uri) / "trainer_state" / damage).write_bytes(b"not a state")
    with pytest.raises(WeightsUnusable):
        world.publisher.restore(world.head, world.model)


def test_removable_versions_have_no_state_no_mark_and_are_not_the_head(world: World) -> None:
    made = []
    for _ in range(4):
        staged = world.stage()
        world.commit(staged)
        world.publisher.settle(staged)
        made.append(staged.weights.uri)
    uncommitted = world.stage()
    assert world.publisher.removable(world.head) == tuple(made[:2])
    (Path(made[3]) / "trainer_state" / "state.json").unlink()
    assert world.publisher.removable(world.head) == tuple(made[:2])
    world.publisher.discard(uncommitted)


def test_removing_twice_is_not_an_error_and_affects_nothing_else(world: World, tmp_path: Path) -> None:
    staged = world.stage()
    world.publisher.settle(staged)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for _ in range(2):
        world.publisher.remove([staged.weights.uri, str(elsewhere)])
    assert world.names() == []
    assert elsewhere.is_dir()
