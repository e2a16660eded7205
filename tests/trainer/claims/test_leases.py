from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from tests.fakes.training_proxy import KEY, RUN, TrainingProxy
from tests.trainer.tiny import group_of, trajectory, turn
from trainer.claims.leases import LeaseKeeper, pause_before_heartbeat
from trainer.proxy_client import ProxyClient


@pytest.fixture
def proxy() -> TrainingProxy:
    return TrainingProxy(base_model="m", lease_seconds=0.9)


@pytest.fixture
def keeper(proxy: TrainingProxy) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(ProxyClient("http://proxy", KEY, RUN, transport=proxy.transport()))
    yield keeper
    keeper.stop()


def claim(proxy: TrainingProxy, keeper: LeaseKeeper) -> ClaimId:
    proxy.offer([group_of([trajectory(turn([4]))])])
    client = ProxyClient("http://proxy", KEY, RUN, transport=proxy.transport())
    batch = client.claim(ClaimRequest(trainer="t", want=1))
    assert batch.claim_id is not None
    keeper.hold(batch.claim_id, batch.lease_expires_at)
    return batch.claim_id


@given(expires=st.floats(-1e6, 1e6))
def test_heartbeats_are_sent_three_times_per_lease_whatever_the_clocks_show(expires: float) -> None:
    pause = pause_before_heartbeat(expires, 0.0)
    assert 0.25 <= pause <= 20.0
    if 0.75 < expires < 60:
        assert pause == pytest.approx(expires / 3)


def test_all_held_leases_are_renewed_beyond_their_first_term(proxy: TrainingProxy, keeper: LeaseKeeper) -> None:
    first, second = claim(proxy, keeper), claim(proxy, keeper)
    proxy.wait_for(lambda: min(proxy.heartbeats.count(first), proxy.heartbeats.count(second)) >= 4)
    assert keeper.held() == [first, second]
    assert set(proxy.leases) == {first, second}


def test_a_dropped_lease_is_not_renewed(proxy: TrainingProxy, keeper: LeaseKeeper) -> None:
    first, second = claim(proxy, keeper), claim(proxy, keeper)
    keeper.drop(first)
    proxy.wait_for(lambda: len(proxy.heartbeats) >= 2)
    assert set(proxy.heartbeats) == {second}


def test_a_lost_lease_is_reported_as_lost(proxy: TrainingProxy, keeper: LeaseKeeper) -> None:
    lost, held = claim(proxy, keeper), claim(proxy, keeper)
    with proxy.changed:
        proxy.leases.pop(lost)
    proxy.wait_for(lambda: proxy.heartbeats.count(held) >= 2)
    assert not keeper.is_held(lost)
    assert keeper.is_held(held)


def test_an_outage_does_not_end_the_renewal(proxy: TrainingProxy, keeper: LeaseKeeper) -> None:
    with proxy.changed:
        proxy.lease_seconds = 60.0
    held = claim(proxy, keeper)
    with proxy.changed:
        proxy.outage = 2
    keeper.hold(held, 0.0)  # Due soon.
    proxy.wait_for(lambda: held in proxy.heartbeats)
    assert proxy.outage == 0
    assert keeper.is_held(held)
