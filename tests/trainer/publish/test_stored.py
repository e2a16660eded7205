"""Versions in an object store: engines and trainers need nothing of the disk on which they were written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.contract.delta import is_delta
from proxy.contract.object_store import ObjectStore
from proxy.contract.policy import UNCOMMITTED_MARK
from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.versions.inspector import WeightsInspector
from tests.object_store import DENIED, SLOW_DOWN, URL, ObjectServer, object_server
from tests.trainer.publish.test_delta import Chain, is_same
from tests.trainer.publish.test_disk import World, same, state_of
from tests.trainer.real_proxy import real_proxy, write_real_model
from tests.trainer.tiny import ALONE, load_tiny
from trainer.config import DiskWeights
from trainer.errors import WeightsUnusable
from trainer.publish.disk import DiskPublisher
from trainer.publish.stored import Mirror, StoredPublisher
from trainer.publish.transports import publisher_of


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as started:
        yield started


class StoredWorld(World):
    def new_publisher(self, keep: int = 2, **settings: Any) -> Any:
        chosen = DiskWeights(directory=self.directory, keep_optimizer_states=keep, url=URL, **settings)
        inner = DiskPublisher(chosen, self.base)
        return StoredPublisher(inner, Mirror(URL, self.directory, 0.5), chosen, ALONE)


class StoredChain(Chain):
    def new_publisher(self, keep: int = 2, **settings: Any) -> Any:
        return publisher_of(self.settings.model_copy(update={"url": URL}), self.base)


@pytest.fixture
def world(server: ObjectServer, tiny_model: Path, tmp_path: Path) -> StoredWorld:
    return StoredWorld(tmp_path / "weights", tiny_model)


def keys() -> dict[str, set[str]]:
    """Return the files in the store by the first letters of their version's name."""
    found: dict[str, set[str]] = {}
    for key in ObjectStore(URL, 5.0).keys(""):
        _, name, file = key.split("/", 2)
        found.setdefault(name[:7], set()).add(file)
    return found


def inspector_of(tmp_path: Path, name: str = "proxy") -> WeightsInspector:
    return WeightsInspector(tmp_path / name / "weights", tmp_path / name / "cache", 10**9, url=URL)


async def test_engines_elsewhere_get_the_bits_of_differences(
    server: ObjectServer, tiny_model: Path, tmp_path: Path
) -> None:
    chain = StoredChain(tmp_path / "weights", tiny_model, full_every=4, shard_megabytes=1)
    chain.publish(3)
    assert [is_delta(weights) for weights, _ in chain.published] == [False, True, True]
    shutil.rmtree(chain.directory)
    inspector = inspector_of(tmp_path)
    for weights, tensors in reversed(chain.published):
        await inspector.check(weights, str(chain.base))
        assert is_same(inspector.path_of(weights), tensors)
    # A fetched file that is damaged later is fetched again.
    whole, tensors = chain.published[0]
    damaged = next(Path(inspector.path_of(whole)).glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    await inspector.check(whole, str(chain.base))
    assert is_same(inspector.path_of(whole), tensors)
    await inspector.aclose()


def test_a_trainer_elsewhere_goes_on_from_the_head(server: ObjectServer, tiny_model: Path, tmp_path: Path) -> None:
    chain = StoredChain(tmp_path / "weights", tiny_model, full_every=4, optimizer_every=3)
    head = chain.head
    staged = chain.publisher.stage(head, chain.moved(), state_of(head))
    chain.publisher.settle(staged)
    chain.commit(staged)
    plain = {"format": 2, "steps": 9, "means": {"turn": None, "session": 0.5}}
    staged = chain.publisher.stage(chain.head, chain.moved(), plain, with_tensors=False)
    chain.publisher.settle(staged)
    chain.commit(staged)
    assert is_delta(staged.weights)
    shutil.rmtree(chain.directory)
    other = load_tiny(chain.base)
    restored = chain.new_publisher().restore(chain.head, other)
    assert restored is not None
    assert restored["steps"] == 9
    assert same(restored["optimizer"], state_of(head)["optimizer"])
    wanted = {name: weight.to(torch.bfloat16) for name, weight in chain.model.named_weights()}
    assert all(torch.equal(wanted[name], weight.to(torch.bfloat16)) for name, weight in other.named_weights())


def test_half_an_upload_is_no_version_and_is_collected(
    server: ObjectServer, world: StoredWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = world.committed()
    server.fault = lambda method, path, _: (
        ("403 Forbidden", DENIED) if "model.safetensors" in path or method == "POST" else None
    )
    with pytest.raises(WeightsUnusable, match=r"cannot upload version 2: .*AccessDenied"):
        world.stage()
    server.fault = None
    assert UNCOMMITTED_MARK in keys()["v000002"]
    assert "model.safetensors" not in keys()["v000002"]
    assert world.names() == [Path(committed.weights.uri).name]
    next_trainer = world.new_publisher()
    next_trainer.collect(world.head)
    # The mark is young, and the trainer of another machine may be uploading: only much later is it garbage.
    assert set(keys()) == {"v000001", "v000002"}
    monkeypatch.setattr("trainer.publish.stored.ABANDONED_SECONDS", -60.0)
    assert [name[:7] for name in next_trainer.collect(world.head)] == ["v000002"]
    assert set(keys()) == {"v000001"}


def test_a_dead_trainers_version_is_collected_and_the_head_settled(server: ObjectServer, world: StoredWorld) -> None:
    dead = world.new_publisher()
    staged = world.stage(dead)
    dead.close()
    other = world.stage(world.publisher)
    world.commit(other)
    assert UNCOMMITTED_MARK in keys()["v000001"]
    world.publisher.close()
    removed = world.new_publisher().collect(world.head)
    assert removed == [Path(staged.weights.uri).name]
    assert {key.split("/")[1] for key in ObjectStore(URL, 5.0).keys("")} == {Path(other.weights.uri).name}
    assert UNCOMMITTED_MARK not in keys()["v000001"]


def test_states_and_versions_are_removed_as_on_the_disk(server: ObjectServer, world: StoredWorld) -> None:
    for _ in range(3):
        world.committed()
    has_state = {name: "trainer_state/state.json" in files for name, files in keys().items()}
    assert has_state == {"v000001": False, "v000002": True, "v000003": True}
    removable = world.publisher.removable(world.head)
    assert [Path(uri).name[:7] for uri in removable] == ["v000001"]
    # While the store is away the directory stays as well, so that the next attempt finds it.
    server.stop()
    world.publisher.remove(removable)
    assert Path(removable[0]).is_dir()
    server.start()
    # A trainer whose directory is new removes versions that only the store has.
    shutil.rmtree(world.directory)
    fresh = world.new_publisher()
    fresh.collect(world.head)
    assert fresh.removable(world.head) == removable
    fresh.remove(removable)
    assert set(keys()) == {"v000002", "v000003"}


async def test_a_store_that_is_away_lies_or_lacks_an_object_gives_no_version(
    server: ObjectServer, world: StoredWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.versions.inspector.STORE_PATIENCE_SECONDS", 0.3)
    weights = world.committed().weights
    shutil.rmtree(world.directory)
    inspector = inspector_of(tmp_path)
    server.stop()
    with pytest.raises(StorageUnavailable, match="s3://weights/site"):
        await inspector.check(weights, str(world.base))
    server.start()
    wrong = msgspec.structs.replace(weights, files={**weights.files, "config.json": "0" * 64})
    with pytest.raises(WeightsRejected, match=r"config\.json in s3://weights/site is not the file"):
        await inspector.check(wrong, str(world.base))
    outside = msgspec.structs.replace(weights, files={**weights.files, "../../x": "0" * 64})
    with pytest.raises(WeightsRejected, match="is not the name of a file"):
        await inspector.check(outside, str(world.base))
    await inspector.check(weights, str(world.base))
    assert Path(inspector.path_of(weights)).is_relative_to(tmp_path / "proxy" / "cache")
    inspector.remove_stored("run_test")
    assert keys() == {}
    other = inspector_of(tmp_path, "other")
    with pytest.raises(WeightsMissing, match="lacks an object of the version"):
        await other.check(weights, str(world.base))
    await inspector.aclose()
    await other.aclose()


def test_a_run_is_trained_across_sites_and_an_outage(server: ObjectServer, tmp_path: Path) -> None:
    base = write_real_model(tmp_path / "base")
    weights = {"url": URL, "type": "delta", "directory": tmp_path / "elsewhere", "behind": False}
    with real_proxy(tmp_path / "proxy", base, weights_url=URL) as proxy:
        for rewards in ([1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0]) * 2:
            proxy.group(rewards)
        with proxy.trainer(weights=weights) as trainer:
            trainer.loop.step()
            away = iter(range(4))
            server.fault = lambda *_: None if next(away, None) is None else ("503 Slow Down", SLOW_DOWN)
            trainer.loop.step()
            assert next(away, None) is None
            head = trainer.loop.head
        assert head.version == 2
        assert head.weights is not None
        assert is_delta(head.weights)
        # The proxy has made the whole files of what it fetched: nothing else of the trainer's site is in its reach.
        assert (tmp_path / "proxy" / "data" / "weights-cache" / head.weights.sha256).is_dir()
        assert not proxy.weights.exists()
