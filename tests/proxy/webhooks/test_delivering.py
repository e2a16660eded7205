"""Events reach receivers: at least once, signed, with growing pauses, and not for ever."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy import insert

from proxy.contract.states import JobState
from proxy.database.tables import EventRow
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobKinds
from proxy.jobs.running import Outcome
from proxy.outbound.secrets import SigningSecrets
from proxy.outbound.signing import signature
from proxy.webhooks import delivering
from proxy.webhooks.delivering import DISABLE_SECONDS, Delivery
from proxy.webhooks.following import WebhookFollower
from proxy.webhooks.repository import EVENTS_AT_ONCE
from proxy.webhooks.service import WebhookChange, WebhookRequest
from tests.fakes.run_history import add_run
from tests.proxy.outbound.targets import Received
from tests.proxy.webhooks.world import DEFAULT_PROJECT_ID, INSTALLATION, Webhooks, open_webhooks

DAY = 86400.0


def is_signed(request: Received, secret: str) -> bool:
    """Return whether one of the request's signatures is by this secret."""
    expected = signature(
        secret,
        event_id=request.headers["webhook-id"],
        timestamp=int(request.headers["webhook-timestamp"]),
        body=request.body,
    )
    return expected in request.headers["webhook-signature"].split()


async def test_events_are_delivered_signed_from_the_creation_on(webhooks: Webhooks) -> None:
    run_id = await add_run(webhooks.database)
    await webhooks.happen("version.committed", run_id=run_id, version=1)
    made = await webhooks.create("version")
    await webhooks.happen("version.committed", run_id=run_id, version=2)
    await webhooks.happen("run.paused", run_id=run_id)
    assert await webhooks.deliver() == [Outcome.DONE]
    (request,) = webhooks.received
    assert json.loads(request.body) == {
        "type": "version.committed",
        "timestamp": "1970-01-12T13:46:40.000Z",
        "run": "calculator",
        "run_id": run_id,
        "data": {"version": 2},
    }
    assert is_signed(request, made.secret)
    assert not is_signed(request, made.secret.replace("whsec_", "whsec_AAAA"))
    assert await webhooks.deliver() == []
    assert (await webhooks.row(made.webhook.id)).last_success_at == webhooks.clock()


async def test_a_webhook_sends_the_events_of_its_scope(webhooks: Webhooks) -> None:
    mine = await add_run(webhooks.database, name="mine")
    other = await add_run(webhooks.database, name="other")
    for scope in ({"run_id": mine}, {"project_id": DEFAULT_PROJECT_ID}, {}):
        await webhooks.create("*", **scope)
    await webhooks.happen("run.paused", run_id=mine)
    await webhooks.happen("version.served", run_id=other)
    await webhooks.happen("engine.added")
    await webhooks.deliver()
    await webhooks.deliver()
    assert sorted(webhooks.types) == sorted(
        ["run.paused", "run.paused", "version.served", "run.paused", "version.served", "engine.added"]
    )


async def test_several_proxies_enqueue_each_event_once_and_none_is_lost(webhooks: Webhooks) -> None:
    await webhooks.create("*")
    count = 2 * EVENTS_AT_ONCE + 7
    rows = [{"kind": "run.created", "data": {"n": n}, "created_at": 0.0} for n in range(count)]
    await webhooks.database.commit(lambda connection: connection.execute(insert(EventRow), rows).close())
    followers = [WebhookFollower(webhooks.database, webhooks.signals, webhooks.clock) for _ in range(3)]
    assert sum(await asyncio.gather(*(follower.follow() for follower in followers))) == count
    assert await webhooks.follower.follow() == 0


async def test_a_failed_delivery_is_tried_again_with_the_same_id_and_body(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    webhooks.status = 503
    await webhooks.happen("run.paused", reason="x")
    assert await webhooks.deliver() == [Outcome.FAILED]
    row = await webhooks.row(made.webhook.id)
    assert (row.failing_since, row.last_error) == (webhooks.clock(), "it answered 503")
    assert await webhooks.deliver() == []
    webhooks.clock.now += 10.0
    webhooks.status = 200
    assert await webhooks.deliver() == [Outcome.DONE]
    first, second = webhooks.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert int(second.headers["webhook-timestamp"]) == int(first.headers["webhook-timestamp"]) + 10
    assert is_signed(second, made.secret)
    row = await webhooks.row(made.webhook.id)
    assert (row.failing_since, row.last_error) == (None, None)


async def test_a_delivery_that_never_succeeds_is_dead_after_hours_and_causes_no_further_one(
    webhooks: Webhooks,
) -> None:
    made = await webhooks.create("*")
    webhooks.status = 500
    await webhooks.happen("run.paused")
    began = webhooks.clock()
    outcomes: list[Outcome] = []
    while Outcome.DEAD not in outcomes:
        outcomes += await webhooks.deliver()
        webhooks.clock.now += 60.0
        assert webhooks.clock() < began + 2 * DAY
    assert len(outcomes) == 15
    assert webhooks.clock() > began + 6 * 3600
    assert len(await webhooks.jobs.events("job.dead")) == 1
    assert await webhooks.deliver() == []
    (dead,) = await webhooks.service.deliveries(made.webhook.id, states=[JobState.DEAD], below=None, limit=9)
    assert (dead.type, dead.error, dead.attempts) == ("run.paused", "it answered 500", 15)


async def test_a_webhook_that_fails_for_days_is_disabled_with_an_event(webhooks: Webhooks) -> None:
    made = await webhooks.create("run", label="mine")
    watching = await webhooks.create("webhook")
    webhooks.status = 500
    await webhooks.happen("run.paused")
    await webhooks.deliver()
    webhooks.clock.now += DISABLE_SECONDS
    await webhooks.happen("run.resumed")
    assert Outcome.DEAD in await webhooks.deliver()
    view = await webhooks.service.get(made.webhook.id)
    assert not view.enabled
    assert view.disabled_because is not None
    assert "it answered 500" in view.disabled_because
    (event,) = await webhooks.jobs.events("webhook.disabled")
    assert (event["webhook"], event["label"]) == (made.webhook.id, "mine")
    # Disabled, it gets nothing, also not what waited; the other webhook gets the news.
    webhooks.status = 200
    webhooks.received.clear()
    await webhooks.happen("run.archived")
    await webhooks.deliver()
    assert webhooks.types == ["webhook.disabled"]
    assert (await webhooks.service.get(watching.webhook.id)).enabled
    # Enabled again, it sends what happens from then on.
    await webhooks.service.change(made.webhook.id, WebhookChange(enabled=True))
    await webhooks.happen("run.unarchived")
    await webhooks.deliver()
    assert webhooks.types == ["webhook.disabled", "run.unarchived"]


async def test_a_receiver_that_hangs_does_not_hold_up_the_others(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivering, "SLOW_SECONDS", 0.05)
    database = Database(database_url)
    async with open_webhooks(database, seconds=0.1) as slow, open_webhooks(database) as other:
        await slow.create("run.paused")
        slow.status = 0
        await slow.happen("run.paused")
        assert await slow.deliver() == [Outcome.FAILED]
        slow.clock.now += 5.0
        await slow.happen("run.paused")
        await slow.service.create(WebhookRequest(url=other.url, events=("run.resumed",)))
        await slow.happen("run.resumed")
        assert sorted(await slow.deliver()) == [Outcome.DONE, Outcome.POSTPONED]
        assert (len(slow.received), other.types) == (1, ["run.resumed"])
        # After the rest, all that waited is sent.
        slow.status = 200
        slow.clock.now += delivering.REST_SECONDS
        assert await slow.deliver() == [Outcome.DONE, Outcome.DONE]
    await database.aclose()


async def test_a_receiver_that_answers_410_gets_no_more(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    webhooks.status = 410
    await webhooks.happen("run.paused")
    assert await webhooks.deliver() == [Outcome.DEAD]
    assert not (await webhooks.service.get(made.webhook.id)).enabled


async def test_a_target_that_became_private_is_refused_at_once_and_nothing_is_sent(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    await webhooks.database.commit(
        lambda connection: connection.exec_driver_sql("UPDATE webhooks SET url = 'http://169.254.169.254/'").close()
    )
    await webhooks.happen("run.paused")
    assert await webhooks.deliver() == [Outcome.DEAD]
    assert "private" in str((await webhooks.row(made.webhook.id)).last_error)


async def test_both_secrets_sign_until_the_grace_has_passed(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    rotated = await webhooks.service.rotate(made.webhook.id, grace_seconds=60.0)
    assert rotated.secret != made.secret
    await webhooks.happen("run.paused")
    await webhooks.deliver()
    webhooks.clock.now += 60.0
    await webhooks.happen("run.paused")
    await webhooks.deliver()
    during, after = webhooks.received
    assert is_signed(during, made.secret)
    assert is_signed(during, rotated.secret)
    assert not is_signed(after, made.secret)
    assert is_signed(after, rotated.secret)
    # After a second rotation in time, two secrets are valid and not three.
    third = await webhooks.service.rotate(made.webhook.id, grace_seconds=60.0)
    fourth = await webhooks.service.rotate(made.webhook.id, grace_seconds=60.0)
    await webhooks.happen("run.paused")
    await webhooks.deliver()
    valid = [secret for secret in (rotated, third, fourth) if is_signed(webhooks.received[-1], secret.secret)]
    assert valid == [third, fourth]


async def test_a_worker_without_the_installations_secret_leaves_the_delivery_to_others(webhooks: Webhooks) -> None:
    await webhooks.create("*")
    await webhooks.happen("run.paused")
    await webhooks.follower.follow()
    for installation in (None, b"o" * 32):
        kinds = webhooks.jobs.kinds
        webhooks.jobs.kinds = JobKinds(
            [
                Delivery(
                    webhooks.database,
                    webhooks.client,
                    SigningSecrets(installation),
                    webhooks.signals,
                    webhooks.clock,
                ).kind()
            ]
        )
        assert await webhooks.jobs.run_due(webhooks.jobs.runner()) == [Outcome.POSTPONED]
        webhooks.jobs.kinds = kinds
        webhooks.clock.now += 60.0
    assert webhooks.received == []
    assert await webhooks.jobs.run_due(webhooks.runner) == [Outcome.DONE]
    assert INSTALLATION not in webhooks.received[0].body


async def test_a_test_message_is_sent_once_and_also_if_the_webhook_is_disabled(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    await webhooks.service.change(made.webhook.id, WebhookChange(enabled=False))
    await webhooks.service.test(made.webhook.id)
    assert await webhooks.deliver() == [Outcome.DONE]
    assert webhooks.types == ["webhook.test"]
    assert is_signed(webhooks.received[0], made.secret)
    webhooks.status = 500
    failed = await webhooks.service.test(made.webhook.id)
    assert await webhooks.deliver() == [Outcome.DEAD]
    assert (await webhooks.service.delivery(made.webhook.id, failed.id)).error == "it answered 500"


async def test_a_deleted_webhook_sends_nothing_that_waited(webhooks: Webhooks) -> None:
    made = await webhooks.create("*")
    await webhooks.happen("run.paused")
    await webhooks.follower.follow()
    await webhooks.service.delete(made.webhook.id)
    assert await webhooks.deliver() == []
    assert webhooks.received == []


async def test_the_follower_delivers_what_happens_while_it_runs(webhooks: Webhooks) -> None:
    await webhooks.create("*")
    task = asyncio.create_task(webhooks.follower.run())
    try:
        since = webhooks.signals.jobs.count
        await webhooks.happen("run.paused")
        webhooks.signals.events.notify()
        assert await webhooks.signals.jobs.wait(10.0, since=since)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert await webhooks.jobs.run_due(webhooks.runner) == [Outcome.DONE]
