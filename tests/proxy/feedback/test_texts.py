"""Feedback in words, recorded and shown."""

from __future__ import annotations

import asyncio

import pytest

from proxy.auth.service import PrincipalKind
from proxy.errors import Gone, InvalidRequest, PermissionDenied
from proxy.feedback.service import Effect, FeedbackItem, Receipt
from proxy.lifecycle.texts import FeedbackEntry
from proxy.sessions.opening import SessionSpec
from tests.proxy.domain_client import DomainClient
from tests.proxy.store import Store


async def one_session(store: Store) -> str:
    (created,) = await store.sessions.create(store.run, SessionSpec(), 1)
    return created.id


async def post(store: Store, *items: FeedbackItem) -> list[Receipt]:
    return await store.feedback.record(store.owner, items)


def words(session_id: str, text: str = "use the calculator", **fields: object) -> FeedbackItem:
    return FeedbackItem(entries=(), session_id=session_id, text=text, **fields)  # type: ignore[arg-type]


async def shown(store: Store, session_id: str) -> tuple[FeedbackEntry, ...]:
    return (await store.sessions.get(store.owner, session_id)).feedback


async def test_all_texts_are_stored_in_order_and_end_nothing(store: Store) -> None:
    session_id = await one_session(store)
    turn_id = await store.add_turn(session_id)
    first, second = await post(
        store, words(session_id, source="ada"), words(session_id, "too long", turn_id=turn_id, source="ada")
    )
    assert (first.effect, first.rewards, first.turn_id) == (Effect.RECORDED, (), None)
    assert (second.session_id, second.turn_id) == (session_id, turn_id)
    one, other = await shown(store, session_id)
    assert (one.id, one.text, one.turn_id, one.source) == (first.text, "use the calculator", None, "ada")
    assert (other.id, other.text, other.turn_id, other.created_at) == (
        second.text,
        "too long",
        turn_id,
        store.clock.now,
    )
    view = await store.sessions.get(store.owner, session_id)
    assert (view.state, view.training, view.reward, view.rewards) == ("open", "pending", None, ())


async def test_a_text_ends_the_session_with_a_reward_or_on_request(store: Store) -> None:
    rewarded, asked = await one_session(store), await one_session(store)
    item = FeedbackItem(entries=(("reward", 1.0),), session_id=rewarded, text="well done")
    (receipt,) = await post(store, item)
    assert (len(receipt.rewards), receipt.text is None) == (1, False)
    await post(store, words(asked, final=True))
    for session_id, reward, reason in ((rewarded, 1.0, "reward"), (asked, None, "explicit")):
        view = await store.sessions.get(store.owner, session_id)
        assert (view.state, view.end_reason, view.reward, len(view.feedback)) == ("ended", reason, reward, 1)


async def test_a_repeated_key_gets_the_same_answer_and_records_nothing(store: Store) -> None:
    session_id, other = await one_session(store), await one_session(store)
    with_reward = FeedbackItem(
        entries=(("reward", 1.0), ("style", 0.5)), session_id=session_id, text="fine", idempotency_key="both"
    )
    alone = words(session_id, idempotency_key="alone")
    first = await post(store, with_reward, alone, alone)
    assert first[1] == first[2]
    assert await post(store, with_reward, alone) == first[:2]
    assert len(await shown(store, session_id)) == 2
    with pytest.raises(InvalidRequest) as error:
        await post(store, words(other, idempotency_key="alone"))
    assert error.value.param == "idempotency_key"
    assert await shown(store, other) == ()


async def test_requests_at_once_with_one_key_make_one_text(store: Store) -> None:
    session_id = await one_session(store)
    item = words(session_id, idempotency_key="k")
    receipts = await asyncio.gather(*(post(store, item) for _ in range(8)))
    assert len({receipt.text for (receipt,) in receipts}) == 1
    assert len(await shown(store, session_id)) == 1


async def test_a_text_after_the_claim_is_late(store: Store) -> None:
    session_id = await one_session(store)
    await store.add_turn(session_id)
    await store.set_session(session_id, state="ended", training="leased")
    (receipt,) = await post(store, words(session_id))
    assert receipt.effect is Effect.RECORDED_AFTER_TRAINING
    (entry,) = await shown(store, session_id)
    assert entry.after_training


async def test_erased_sessions_and_strangers_get_no_text(store: Store) -> None:
    session_id, other = await one_session(store), await one_session(store)
    stranger = await store.principal(PrincipalKind.SESSION, run_id=store.run.id, session_id=other)
    with pytest.raises(PermissionDenied):
        await store.feedback.record(stranger, [words(session_id)])
    await store.set_session(session_id, erased_at=1.0, erased_reason="requested")
    with pytest.raises(Gone):
        await post(store, words(session_id))
    assert await shown(store, session_id) == ()


async def test_one_bad_item_records_none(store: Store) -> None:
    session_id = await one_session(store)
    with pytest.raises(Exception, match="turn_id"):
        await post(store, words(session_id), words(session_id, turn_id="turn_unknown"))
    assert await shown(store, session_id) == ()


async def test_words_over_http(domain: DomainClient) -> None:
    created = (await domain.http.post("/v1/sessions")).json()
    answer = await domain.http.post(f"/sessions/{created['id']}/v1/feedback", json={"text": "Écris plus court 🙂"})
    assert answer.status_code == 201, answer.text
    assert answer.json() == {
        "effect": "recorded",
        "session_id": created["id"],
        "turn_id": None,
        "rewards": [],
        "text": answer.json()["text"],
    }
    view = (await domain.http.get(f"/v1/sessions/{created['id']}")).json()
    assert [(entry["id"], entry["text"]) for entry in view["feedback"]] == [
        (answer.json()["text"], "Écris plus court 🙂")
    ]
