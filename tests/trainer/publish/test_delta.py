"""Versions stored as differences: the whole files are made again bit for bit, or the version is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.contract.delta import DELTA_INDEX, is_delta
from proxy.contract.policy import WeightsReference
from proxy.engines.embedded.weights import read_directory
from proxy.errors import WeightsMissing, WeightsRejected
from proxy.versions.inspector import WeightsInspector
from tests.trainer.publish.test_disk import World
from tests.trainer.tiny import load_tiny
from trainer.config import DeltaWeights
from trainer.errors import WeightsUnusable
from trainer.models.state_dict import gather_weights
from trainer.publish.delta import DeltaPublisher


class Chain(World):
    """Versions whose weights move a little from each to the next, with what was published of each."""

    def __init__(self, directory: Path, base: Path, **settings: Any) -> None:
        self.settings = DeltaWeights.model_validate({"directory": directory, "dtype": "bfloat16", **settings})
        super().__init__(directory, base)
        self.published: list[tuple[WeightsReference, dict[str, torch.Tensor]]] = []
        self.generator = torch.Generator().manual_seed(0)

    def new_publisher(self, keep: int = 2, **_settings: Any) -> DeltaPublisher:
        return DeltaPublisher(self.settings, self.base)

    def moved(self) -> dict[str, torch.Tensor]:
        """Move the weights a little and return what is published of them."""
        with torch.no_grad():
            for _name, weight in self.model.named_weights():
                weight.add_(torch.empty_like(weight).uniform_(-1, 1, generator=self.generator), alpha=1e-5)
        return gather_weights(self.model.named_weights(), keep=True, dtype=self.publisher.dtype)

    def publish(self, count: int) -> None:
        for _ in range(count):
            tensors = self.moved()
            staged = self.publisher.stage(self.head, tensors, None)
            self.publisher.settle(staged)
            self.commit(staged)
            self.published.append((staged.weights, tensors))


@pytest.fixture
def chain(tiny_model: Path, tmp_path: Path) -> Chain:
    return Chain(tmp_path / "weights", tiny_model, full_every=4, shard_megabytes=1)


def inspector_of(chain: Chain, cache: Path, most_bytes: int = 10**9) -> WeightsInspector:
    return WeightsInspector(chain.directory, cache, most_bytes)


def is_same(directory: str, tensors: dict[str, torch.Tensor]) -> bool:
    found = read_directory(directory)
    return found.keys() == tensors.keys() and all(
        torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in tensors.items()
    )


async def test_engines_get_the_published_bits_whichever_version_they_have(chain: Chain, tmp_path: Path) -> None:
    chain.publish(5)
    assert [is_delta(weights) for weights, _ in chain.published] == [False, True, True, True, False]
    every, last = inspector_of(chain, tmp_path / "every"), inspector_of(chain, tmp_path / "last")
    for weights, tensors in chain.published:
        await every.check(weights, str(chain.base))
        assert is_same(every.path_of(weights), tensors)
    # An engine that missed the versions between gets this one all the same.
    weights, tensors = chain.published[3]
    await last.check(weights, str(chain.base))
    assert is_same(last.path_of(weights), tensors)
    assert {path.name for path in Path(last.path_of(weights)).iterdir()} == {
        path.name for path in Path(chain.published[0][0].uri).iterdir()
    }
    whole, delta = Path(chain.published[0][0].uri), Path(chain.published[1][0].uri)
    size = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in delta.iterdir()) < 0.5 * size
    await every.aclose()
    await last.aclose()


async def test_a_missing_base_and_a_damaged_difference_are_refused(chain: Chain, tmp_path: Path) -> None:
    chain.publish(3)
    (first, _), (second, _), (third, _) = chain.published
    damaged = Path(third.uri) / "model.safetensors.delta"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    inspector = inspector_of(chain, tmp_path / "cache")
    with pytest.raises(WeightsRejected, match=r"damaged|SHA-256"):
        await inspector.check(third, str(chain.base))
    Path(first.uri).rename(tmp_path / "gone")
    fresh = inspector_of(chain, tmp_path / "other")
    with pytest.raises(WeightsMissing, match=Path(first.uri).name):
        await fresh.check(second, str(chain.base))
    with pytest.raises(WeightsUnusable, match="missing"):
        chain.publisher.restore(msgspec.structs.replace(chain.head, version=2, weights=second), load_tiny(chain.base))
    assert not list((tmp_path / "other").glob("*"))
    await inspector.aclose()
    await fresh.aclose()


async def test_files_that_were_damaged_after_they_were_made_are_made_again(chain: Chain, tmp_path: Path) -> None:
    chain.publish(4)
    weights, tensors = chain.published[2]
    inspector = inspector_of(chain, tmp_path / "cache")
    await inspector.check(weights, str(chain.base))
    for name in ("config.json", "model.safetensors"):
        (Path(inspector.path_of(weights)) / name).write_bytes(b"")
        await inspector.check(weights, str(chain.base))
        assert is_same(inspector.path_of(weights), tensors)
    (Path(inspector.path_of(weights)) / "model.safetensors").write_bytes(b"")
    newest, newest_tensors = chain.published[3]
    await inspector.check(newest, str(chain.base))
    assert is_same(inspector.path_of(newest), newest_tensors)
    await inspector.aclose()


async def test_another_base_of_the_same_size_does_not_pass(chain: Chain, tmp_path: Path) -> None:
    chain.publish(2)
    (first, _), (second, _) = chain.published
    file = Path(first.uri) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    inspector = inspector_of(chain, tmp_path / "cache")
    with pytest.raises(WeightsRejected, match="do not give the file that was published"):
        await inspector.check(second, str(chain.base))
    await inspector.aclose()


def test_a_trainer_goes_on_from_a_difference_and_writes_a_whole_version(chain: Chain) -> None:
    chain.publish(3)
    weights, tensors = chain.published[-1]
    assert (Path(weights.uri) / DELTA_INDEX).is_file()
    other = load_tiny(chain.base)
    chain.publisher = chain.new_publisher()
    assert chain.publisher.restore(chain.head, other) is None
    assert all(torch.equal(parameter, tensors[name].float()) for name, parameter in other.named_weights())
    assert not [path for path in chain.run.iterdir() if path.name.startswith(".whole-")]
    chain.publish(2)
    assert [is_delta(each) for each, _ in chain.published[3:]] == [False, True]


def test_bases_are_kept_as_long_as_a_version_needs_them(chain: Chain) -> None:
    chain.publish(6)
    versions = [weights.uri for weights, _ in chain.published]
    removed: list[str] = []
    while removable := chain.publisher.removable(chain.head):
        removed += removable
        chain.publisher.remove(removable)
    # The chain of old differences goes from its end; the head and its base stay.
    assert removed == [versions[3], versions[2], versions[1], versions[0]]


async def test_the_cache_is_bounded(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.contract.delta._IN_USE_SECONDS", -1.0)
    chain.publish(4)
    cache = tmp_path / "cache"
    inspector = inspector_of(chain, cache, most_bytes=1)
    for weights, _ in chain.published:
        await inspector.check(weights, str(chain.base))
    assert {path.name for path in cache.iterdir()} == {weights.sha256 for weights, _ in chain.published[2:]}
    await inspector.aclose()
