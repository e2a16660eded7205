"""Versions that trainers offer to engines: what is refused at the commit, and what when the files are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from proxy.contract.claim import CommitReply
from proxy.contract.exchange import SentTensor
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.database.tables import PolicyVersionRow, SessionRow
from proxy.errors import Conflict, InvalidRequest, WeightsRejected
from proxy.lifecycle.check import check
from proxy.settings import ConfigurationError, Settings
from proxy.versions.offers import Senders, check_offer
from proxy.versions.safetensors import TensorEntry
from proxy.versions.weights import BaseModel
from tests.proxy.turns.world import World
from tests.proxy.versions.offering import Offering, new_tensors, offer_of
from tests.proxy.versions.publishing import publish


@pytest.fixture
def offering(world: World, tmp_path: Path) -> Offering:
    return Offering(world, tmp_path)


async def test_an_offered_version_is_the_head_and_consumes_its_claims_once_it_is_on_the_disk(
    offering: Offering, database_url: str
) -> None:
    tensors = new_tensors()
    request = await offering.request(tensors)
    assert await offering.versions.commit(offering.world.run, request) == CommitReply(version=1, repeated=False)
    assert await offering.versions.commit(offering.world.run, request) == CommitReply(version=1, repeated=True)
    assert await offering.head() == (1, False)
    (session,) = await offering.world.rows(SessionRow)
    assert session.training == "leased"
    durable = offering.write(request.weights, tensors)
    assert await offering.unsaved.save(offering.world.run, 1, durable) == CommitReply(version=1, repeated=False)
    assert await offering.unsaved.save(offering.world.run, 1, durable) == CommitReply(version=1, repeated=True)
    assert await offering.head() == (1, True)
    assert (await offering.versions.head(offering.world.run)).weights == durable
    (session,) = await offering.world.rows(SessionRow)
    assert (session.training, session.consumed_by) == ("consumed", 1)
    rows = await offering.world.rows(PolicyVersionRow)
    assert [row.offer for row in rows] == [None, None]
    assert check(database_url) == []


async def test_the_next_version_waits_until_this_one_is_on_the_disk(offering: Offering) -> None:
    await offering.commit(new_tensors())
    with pytest.raises(Conflict, match="not on the disk yet"):
        await offering.commit(new_tensors())


async def test_a_lost_version_is_taken_back(offering: Offering) -> None:
    tensors = new_tensors()
    weights = await offering.commit(tensors)
    await offering.unsaved.take_back(offering.world.run)
    assert await offering.head() == (0, True)
    with pytest.raises(Conflict, match="was withdrawn"):
        await offering.unsaved.save(offering.world.run, 1, offering.write(weights, tensors))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"weight": np.array([1, np.nan], np.float32)}, "not finite"),
        ({"weight": np.full(4, 1e5, np.float32), "bias": np.ones((3, 2), np.float32)}, "factor of 10"),
    ],
)
async def test_files_that_are_bad_take_the_version_back(
    offering: Offering, written: dict[str, Any], reason: str
) -> None:
    first = new_tensors()
    weights = await offering.commit(first)
    await offering.unsaved.save(offering.world.run, 1, offering.write(weights, first))
    weights = await offering.commit(new_tensors())
    with pytest.raises(Conflict, match=reason):
        await offering.unsaved.save(offering.world.run, 2, offering.write(weights, written))
    assert await offering.head() == (1, True)
    (event,) = await offering.world.events("version.rolled_back")
    assert reason in event["reason"]
    training = sorted(row.training for row in await offering.world.rows(SessionRow))
    assert training == ["consumed", "leased"]


async def test_a_report_of_other_weights_changes_nothing(offering: Offering) -> None:
    tensors = new_tensors()
    weights = await offering.commit(tensors)
    durable = offering.write(weights, tensors)
    other = msgspec.structs.replace(durable, uri=publish(offering.disk / "run_x").uri)
    for wrong, error in (
        (other, Conflict),
        (msgspec.structs.replace(durable, files={}), InvalidRequest),
        (msgspec.structs.replace(durable, sha256="?"), InvalidRequest),
    ):
        with pytest.raises(error):
            await offering.unsaved.save(offering.world.run, 1, wrong)
    assert await offering.head() == (1, False)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://192.0.2.7:9", r"add the trainer's host, or its network, to server\.weights_senders"),
        ("http://3221225991:9", "weights_senders"),
        ("http://metadata.internal:80", "weights_senders"),
        ("https://127.0.0.1:9", "HOST:PORT"),
        ("http://127.0.0.1:9/path", "HOST:PORT"),
        ("http://user@127.0.0.1:9", "HOST:PORT"),
        ("http://127.0.0.1", "HOST:PORT"),
        ("http://127.0.0.1:99999", "HOST:PORT"),
        ("http://[", "HOST:PORT"),
    ],
)
async def test_weights_come_from_allowed_hosts_alone(offering: Offering, url: str, message: str) -> None:
    with pytest.raises(WeightsRejected, match=message):
        await offering.commit(new_tensors(), url)
    assert await offering.head() == (0, True)


def test_names_and_networks_of_senders_are_settings() -> None:
    settings = Settings.model_validate({"server": {"weights_senders": ["10.0.0.0/8", "Trainer-0"]}})
    senders = Senders(settings.server.weights_senders)
    for url in ("http://10.1.2.3:4", "http://trainer-0:4"):
        senders.check(url)
    for url in ("http://11.1.2.3:4", "http://trainer-1:4", "http://127.0.0.1:4"):
        with pytest.raises(WeightsRejected):
            senders.check(url)
    with pytest.raises((ConfigurationError, ValueError), match="neither a network nor a host name"):
        Settings.model_validate({"server": {"weights_senders": ["10.0.0.300"]}})


async def test_an_offer_that_contradicts_itself_is_refused(offering: Offering) -> None:
    request = await offering.request(new_tensors())
    adapter = msgspec.structs.replace(request.weights, format=WeightsFormat.ADAPTER)
    for wrong in (
        msgspec.structs.replace(request, is_saved=True),
        msgspec.structs.replace(request, weights=adapter),
        msgspec.structs.replace(request, offer=None),
    ):
        with pytest.raises(InvalidRequest):
            await offering.versions.commit(offering.world.run, wrong)
    outside = msgspec.structs.replace(request.weights, uri="/elsewhere/run_x/v")
    with pytest.raises(WeightsRejected, match="outside the directory for weights"):
        await offering.versions.commit(offering.world.run, msgspec.structs.replace(request, weights=outside))


BASE = BaseModel(
    {"weight": TensorEntry("BF16", (4,), 0, 8), "bias": TensorEntry("BF16", (3, 2), 8, 20)}, {"num_hidden_layers": 1}
)


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [
        ([("weight", "float32", (4,))], "missing: bias"),
        ([("weight", "float32", (4,)), ("bias", "float32", (2, 3))], r"shape \[2, 3\]"),
        ([("weight", "float32", (4,)), ("bias", "float32", (3, 2)), ("more", "float32", (1,))], "called more"),
        ([("weight", "float32", (4,)), ("weight", "float32", (4,))], "twice"),
        ([("weight", "complex64", (4,))], "dtype"),
        ([("weight", "float32", (-4,))], "shape"),
        ([], "0 bytes"),
    ],
)
def test_offered_tensors_are_those_of_the_base_model(
    bucket: list[tuple[str, str, tuple[int, ...]]], reason: str
) -> None:
    tensors = new_tensors()
    offer = offer_of(tensors)
    offer = msgspec.structs.replace(offer, buckets=(tuple(SentTensor(*each) for each in bucket),))
    size = sum(4 * int(np.prod(shape)) for _, _, shape in bucket)
    weights = WeightsReference(uri="/w", format=WeightsFormat.HUGGINGFACE, sha256="0" * 64, bytes=size)
    with pytest.raises(WeightsRejected, match=reason):
        check_offer(weights, offer, BASE)
    sound = msgspec.structs.replace(weights, bytes=40)
    check_offer(sound, offer_of(tensors), BASE)
    with pytest.raises(WeightsRejected, match="40 bytes, not 41"):
        check_offer(msgspec.structs.replace(weights, bytes=41), offer_of(tensors), None)
