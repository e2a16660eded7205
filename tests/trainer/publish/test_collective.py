"""Versions that engines receive through process groups: before they are on the disk, bit for bit, and not after."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from proxy.contract.claim import encode
from proxy.contract.exchange import JOIN_PATH, GroupBackend, Join, Offer
from proxy.contract.policy import STATE_INDEX, WeightsFormat
from proxy.errors import EngineFailed
from proxy.process_groups import WeightGroup
from proxy.serving.offers import OfferOver, join
from tests.trainer.publish import test_adapters
from tests.trainer.publish.receiver import Receiver, receive
from tests.trainer.publish.test_disk import World, same, state_of
from tests.trainer.tiny import load_tiny
from trainer.config import CollectiveWeights
from trainer.errors import ConfigurationError
from trainer.models.state_dict import gather_weights
from trainer.publish import sending
from trainer.publish.collective import CollectivePublisher
from trainer.publish.listener import own_address
from trainer.publish.publisher import Staged
from trainer.publish.sending import Sender, buckets_of

PROXY = "http://127.0.0.1:8080"


class SentWorld(World):
    def new_publisher(self, keep: int = 2, **settings: Any) -> CollectivePublisher:
        chosen = CollectiveWeights(directory=self.directory, keep_optimizer_states=keep, **settings)
        return CollectivePublisher(chosen, self.base, proxy_url=PROXY)

    def offered(self) -> tuple[Staged, Offer]:
        staged = self.stage()
        assert staged.offer is not None
        return staged, staged.offer


def saved(staged: Staged) -> Staged:
    assert staged.save is not None
    return staged.save(1)


@pytest.fixture
def world(tiny_model: Path, tmp_path: Path) -> Iterator[SentWorld]:
    made = SentWorld(tmp_path / "weights", tiny_model)
    yield made
    made.publisher.close()


def wanted(world: World) -> dict[str, torch.Tensor]:
    return dict(gather_weights(world.model.named_weights(), keep=True))


def test_an_engine_has_the_weights_before_the_disk_has_them(world: SentWorld) -> None:
    staged, offer = world.offered()
    assert staged.weights.files == {}
    assert same(receive(offer), wanted(world))
    assert not Path(staged.weights.uri).exists()
    durable = saved(staged)
    assert (durable.weights.uri, durable.weights.sha256 != staged.weights.sha256) == (staged.weights.uri, True)
    assert STATE_INDEX in durable.weights.files
    assert same(receive(offer), wanted(world))  # until the proxy knows that it is saved
    world.publisher.settle(durable)
    world.commit(durable)
    restored = world.new_publisher().restore(world.head, load_tiny(world.base))
    assert same(restored, state_of(msgspec.structs.replace(world.head, version=0)))
    with pytest.raises(EngineFailed, match="not sent any more"):
        receive(offer)


@pytest.mark.parametrize("ends", ["settle", "discard", "next"])
def test_nothing_is_sent_of_a_version_that_is_over(world: SentWorld, ends: str) -> None:
    staged, offer = world.offered()
    if ends == "next":
        world.stage()
    elif ends == "discard":
        world.publisher.discard(staged)
    else:
        world.publisher.settle(saved(staged))
    with pytest.raises(EngineFailed, match="not sent any more"):
        receive(offer)


def test_engines_receive_beside_each_other_and_one_that_dies_disturbs_none(world: SentWorld) -> None:
    _, offer = world.offered()
    dying, living = Receiver(offer), Receiver(offer)
    next(dying.tensors())
    received = living.tensors()
    first = dict([next(received)])
    dying.close()
    assert same({**first, **dict(received)}, wanted(world))
    assert same(receive(offer), wanted(world))


class SlowGroup(WeightGroup):
    """A trainer's end whose first tensor waits until the test lets it go."""

    began, may_end = threading.Event(), threading.Event()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        self.began.set()
        self.may_end.wait(30)
        super().broadcast(tensors)


def test_the_memory_is_free_only_when_nobody_receives(world: SentWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "WeightGroup", SlowGroup)
    staged, offer = world.offered()
    durable = saved(staged)
    found: dict[str, torch.Tensor] = {}
    engine = threading.Thread(target=lambda: found.update(receive(offer)))
    engine.start()
    assert SlowGroup.began.wait(30)
    settling = threading.Thread(target=world.publisher.settle, args=(durable,))
    settling.start()
    settling.join(0.2)
    assert settling.is_alive()
    SlowGroup.may_end.set()
    settling.join(30)
    engine.join(30)
    assert not settling.is_alive()
    assert same(found, wanted(world))


def test_only_who_has_the_token_is_let_in(world: SentWorld) -> None:
    _, offer = world.offered()
    with pytest.raises(EngineFailed, match="not sent any more"):
        asyncio.run(join(msgspec.structs.replace(offer, token="x" * len(offer.token)), 1))
    url = offer.url + JOIN_PATH
    body = encode(Join(token=offer.token))
    assert httpx.post(url, content=b"no message").status_code == 400
    assert httpx.post(offer.url + "/other", content=body).status_code == 404
    assert httpx.post(url, content=body + bytes(5000)).status_code == 404
    assert httpx.get(url).status_code == 501
    assert same(receive(offer), wanted(world))


def test_a_trainer_that_is_gone_is_an_error(world: SentWorld) -> None:
    _, offer = world.offered()
    world.publisher.close()
    with pytest.raises(EngineFailed, match="the trainer does not answer at http://127"):
        receive(offer)
    world.publisher = world.new_publisher()


def test_an_address_of_another_machine_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    settings = CollectiveWeights(directory=tmp_path, host="192.0.2.1")
    with pytest.raises(ConfigurationError, match="Set `host` to a name or an address of this machine"):
        CollectivePublisher(settings, tiny_model, proxy_url=PROXY)


def test_a_trainer_is_at_the_address_from_which_it_reaches_the_proxy() -> None:
    assert own_address(PROXY) == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="Name one"):
        own_address("http://no-such-host.invalid:8080")


def test_an_adapter_goes_to_the_disk_at_once(tiny_model: Path, tmp_path: Path) -> None:
    world = test_adapters.World(tmp_path / "weights", tiny_model)
    chosen = CollectiveWeights(directory=world.directory)
    publisher = CollectivePublisher(chosen, world.base, world.policy, proxy_url=PROXY)
    tensors = gather_weights(world.policy.named_weights(), keep=True)
    staged = publisher.stage(world.head, tensors, None)
    assert (staged.save, staged.offer) == (None, None)
    assert staged.weights.format is WeightsFormat.ADAPTER
    assert Path(staged.weights.uri).is_dir()
    publisher.close()


def test_tensors_are_sent_in_their_order_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_BUCKET_BYTES", 40)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 1}
    described = {name: torch.empty(size, dtype=torch.float32, device="meta") for name, size in sizes.items()}
    buckets = buckets_of(described)
    assert [[tensor.name for tensor in bucket] for bucket in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert buckets[0][0].dtype == "float32"
    assert buckets[2][0].shape == (30,)


def test_an_engine_that_the_proxy_announced_is_waited_for_and_no_other() -> None:
    sender = Sender("127.0.0.1", 0, GroupBackend.GLOO)
    tensors = {"a": torch.arange(6.0), "b": torch.tensor(7.0)}
    offer = sender.offer(tensors, None)
    found: dict[str, torch.Tensor] = {}
    engine = threading.Thread(target=lambda: found.update(receive(offer)))
    engine.start()
    assert sender.is_asked(1)
    sender.send(iter(tensors.values()))
    engine.join(30)
    assert same(found, tensors)
    assert not sender.is_asked(1)
    with pytest.raises(OfferOver):
        receive(offer)
    sender.close()
