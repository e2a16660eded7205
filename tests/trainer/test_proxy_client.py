from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from proxy.contract.claim import ClaimRequest, CommitRequest, StepReport
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import WeightsFormat, WeightsReference
from tests.fakes.training_proxy import KEY, RUN, TrainingProxy
from tests.trainer.tiny import group_of, trajectory, turn
from trainer.errors import ClaimLost, HeadMoved, ProxyRefused, ProxySilent
from trainer.proxy_client import ProxyClient

WEIGHTS = WeightsReference(uri="/w/v1", format=WeightsFormat.HUGGINGFACE, sha256="1", bytes=1)
REQUEST = ClaimRequest(trainer="t", want=1, wait_s=0.0)


def client_of(transport: httpx.BaseTransport, key: str = KEY, run: str = RUN) -> tuple[ProxyClient, list[float]]:
    pauses: list[float] = []
    return ProxyClient("http://proxy/", key, run, transport=transport, pause=pauses.append), pauses


def commit_of(*claims: ClaimId, parent: int = 0) -> CommitRequest:
    report = StepReport(config_hash="", seed=0, metrics={}, audit=())
    return CommitRequest(claim_ids=claims, parent_version=parent, weights=WEIGHTS, step=report)


def test_an_empty_claim_is_not_an_error() -> None:
    client, _ = client_of(TrainingProxy(base_model="m").transport())
    assert client.claim(REQUEST).claim_id is None


@pytest.mark.parametrize(
    ("key", "run", "remedy"),
    [
        ("rl-other", RUN, "trainer.api_key is not a key of this proxy"),
        (KEY, "other", "trainer.run: is 'other' a run"),
    ],
)
def test_a_permanent_error_is_raised_at_once(key: str, run: str, remedy: str) -> None:
    client, pauses = client_of(TrainingProxy(base_model="m").transport(), key, run)
    with pytest.raises(ProxyRefused, match=remedy):
        client.head()
    assert pauses == []


def test_a_key_of_another_kind_is_an_error_at_once() -> None:
    client, _ = client_of(httpx.MockTransport(lambda request: httpx.Response(403, text="no")))
    with pytest.raises(ProxyRefused, match="not a trainer key of run 'policy'"):
        client.head()


def test_a_client_without_patience_gives_up() -> None:
    proxy = TrainingProxy(base_model="m", outage=3)
    client, pauses = client_of(proxy.transport())
    client.patience = 0.0
    with pytest.raises(ProxySilent, match="503"):
        client.head()
    assert (proxy.outage, pauses) == (2, [])


def test_the_trainer_of_an_archived_run_waits_until_it_is_brought_back() -> None:
    proxy = TrainingProxy(base_model="m").transport()
    archived = iter([True, True])

    def answer(request: httpx.Request) -> httpx.Response:
        if next(archived, False):
            return httpx.Response(410, json={"error": {"message": "the run 'policy' is archived"}})
        return proxy.handle_request(request)

    client, pauses = client_of(httpx.MockTransport(answer))
    assert client.head().version == 0
    assert len(pauses) == 2


def test_an_answer_of_another_protocol_is_refused() -> None:
    client, _ = client_of(httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")))
    with pytest.raises(ProxyRefused, match="not a Head"):
        client.head()


@pytest.mark.parametrize("failure", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_a_request_is_repeated_if_the_proxy_does_not_answer(failure: Callable[[str], Exception]) -> None:
    proxy = TrainingProxy(base_model="m", version=4)
    working, attempts = proxy.transport(), iter(range(3))

    def flaky(request: httpx.Request) -> httpx.Response:
        if next(attempts, None) is not None:
            raise failure("gone")
        return working.handle_request(request)

    client, pauses = client_of(httpx.MockTransport(flaky))
    assert client.head().version == 4
    assert pauses == [0.2, 0.4, 0.8]


def test_a_refused_commit_has_the_reason() -> None:
    proxy = TrainingProxy(base_model="m")
    client, _ = client_of(proxy.transport())
    with pytest.raises(ClaimLost):
        client.commit(commit_of(ClaimId("clm_gone")))
    proxy.move_head(5, None)
    with pytest.raises(HeadMoved, match="the head is version 5, not 0"):
        client.commit(commit_of(ClaimId("clm_gone")))


def test_a_refused_commit_that_is_already_the_head_succeeded() -> None:
    """The first attempt succeeded and its answer was lost; the proxy no longer remembers it."""
    proxy = TrainingProxy(base_model="m", version=1, weights=WEIGHTS)
    client, _ = client_of(proxy.transport())
    reply = client.commit(commit_of(ClaimId("clm_gone")))
    assert (reply.version, reply.repeated) == (1, True)


def test_a_claim_that_cannot_be_released_is_left_to_expire() -> None:
    proxy = TrainingProxy(base_model="m")
    proxy.offer([group_of([trajectory(turn([4]))])])
    client, pauses = client_of(proxy.transport())
    claimed = client.claim(REQUEST)
    assert claimed.claim_id is not None
    proxy.outage = 1
    assert not client.release(claimed.claim_id)
    assert client.release(claimed.claim_id)
    assert not client.release(claimed.claim_id)
    assert pauses == []


def test_a_request_of_a_client_that_is_closed_between_attempts_ends() -> None:
    client, _ = client_of(TrainingProxy(base_model="m", outage=1000).transport())
    client.pause = lambda _: client.close()
    with pytest.raises(ProxySilent):
        client.head()
