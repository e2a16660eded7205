from __future__ import annotations

import asyncio

import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.identifiers import new_turn_id
from proxy.errors import Gone, InvalidRequest, NotFound, PermissionDenied
from proxy.feedback.preferences import PreferenceItem, PreferenceReceipt
from proxy.feedback.service import FeedbackService
from proxy.sessions.identification import SessionHints
from proxy.sessions.opening import SessionSpec
from proxy.sessions.views import PreferenceEntry
from proxy.settings import RunSettings
from tests.proxy.domain_client import DomainClient
from tests.proxy.store import Store


async def two_sessions(store: Store) -> tuple[str, str]:
    one, other = await store.sessions.create(store.run, SessionSpec(), 2)
    return one.id, other.id


async def prefer(store: Store, chosen: str, rejected: str, **fields: str) -> PreferenceReceipt:
    return await store.feedback.prefer(store.owner, PreferenceItem(chosen=chosen, rejected=rejected, **fields))


async def entries(store: Store, session_id: str) -> list[PreferenceEntry]:
    return list((await store.sessions.get(store.owner, session_id)).preferences)


async def test_a_preference_is_shown_on_both_sessions_and_changes_neither(store: Store) -> None:
    better, worse = await two_sessions(store)
    receipt = await prefer(store, better, worse, source="ada", comment="shorter")
    assert (receipt.chosen.session_id, receipt.rejected.session_id) == (better, worse)
    (chosen,), (rejected,) = await entries(store, better), await entries(store, worse)
    assert (chosen.id, chosen.verdict, chosen.other_session_id) == (receipt.id, "chosen", worse)
    assert (rejected.id, rejected.verdict, rejected.other_session_id) == (receipt.id, "rejected", better)
    assert (chosen.source, chosen.comment, chosen.created_at) == ("ada", "shorter", store.clock.now)
    for session_id in (better, worse):
        view = await store.sessions.get(store.owner, session_id)
        assert (view.state, view.training, view.reward, view.rewards) == ("open", "pending", None, ())


async def test_turns_are_compared_within_a_session_and_across_sessions(store: Store) -> None:
    one, other = await two_sessions(store)
    first, second = await store.add_turn(one), await store.add_turn(one)
    within = await prefer(store, second, first)
    assert [(entry.verdict, entry.turn_id, entry.other_turn_id) for entry in await entries(store, one)] == [
        ("chosen", second, first),
        ("rejected", first, second),
    ]
    across = await prefer(store, first, other)
    assert (across.chosen.session_id, across.chosen.turn_id) == (one, first)
    (rejected,) = await entries(store, other)
    assert (rejected.id, rejected.turn_id, rejected.other_turn_id) == (across.id, None, first)
    assert within.id != across.id


async def test_sessions_may_be_named_as_the_client_names_them(store: Store) -> None:
    one = await store.sessions.identify(store.owner, store.run, SessionHints(path="attempt-1"))
    other = await store.sessions.identify(store.owner, store.run, SessionHints(path="attempt-2"))
    receipt = await prefer(store, "attempt-2", "attempt-1")
    assert (receipt.chosen.session_id, receipt.rejected.session_id) == (other.id, one.id)
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    named = PreferenceItem(chosen="attempt-1", rejected="attempt-2", run="policy")
    assert (await store.feedback.prefer(admin, named)).chosen.session_id == one.id
    with pytest.raises(NotFound, match='"run"'):
        await store.feedback.prefer(admin, PreferenceItem(chosen="attempt-1", rejected="attempt-2"))


async def test_the_same_key_is_one_preference_and_one_answer(store: Store) -> None:
    better, worse = await two_sessions(store)
    first = await prefer(store, better, worse, idempotency_key="k")
    assert await prefer(store, better, worse, idempotency_key="k") == first
    with pytest.raises(InvalidRequest) as error:
        await prefer(store, worse, better, idempotency_key="k")
    assert error.value.param == "idempotency_key"
    assert len(await entries(store, better)) == 1
    at_once = [prefer(store, better, worse, idempotency_key="race") for _ in range(8)]
    assert len({receipt.id for receipt in await asyncio.gather(*at_once)}) == 1
    assert len(await entries(store, better)) == 2


async def test_preferences_between_incomparable_things_are_refused(store: Store) -> None:
    one, other = await two_sessions(store)
    turn = await store.add_turn(one)
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    (foreign,) = await store.sessions.create(elsewhere, SessionSpec())
    for chosen, rejected, param in (
        (one, one, "rejected"),
        (turn, turn, "rejected"),
        (one, turn, "rejected"),
        (turn, one, "rejected"),
    ):
        with pytest.raises(InvalidRequest) as wrong:
            await prefer(store, chosen, rejected)
        assert wrong.value.param == param
    for chosen, rejected, param in (
        ("nothing", other, "chosen"),
        (one, new_turn_id(), "rejected"),
        (one, foreign.id, "rejected"),
    ):
        with pytest.raises(NotFound) as unknown:
            await prefer(store, chosen, rejected)
        assert unknown.value.param == param
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    with pytest.raises(InvalidRequest, match="different runs"):
        await store.feedback.prefer(admin, PreferenceItem(chosen=one, rejected=foreign.id))
    await store.set_session(other, erased_at=store.clock(), erased_reason="requested")
    with pytest.raises(Gone) as gone:
        await prefer(store, one, other)
    assert gone.value.param == "rejected"
    assert await entries(store, one) == []


async def test_only_run_and_admin_keys_prefer(store: Store) -> None:
    one, other = await store.sessions.create(store.run, SessionSpec(), 2)
    who = await store.credentials.authenticate(one.api_key)
    trainer = await store.principal(PrincipalKind.TRAINER, run_id=store.run.id)
    for principal in (who, trainer):
        with pytest.raises(PermissionDenied):
            await store.feedback.prefer(principal, PreferenceItem(chosen=one.id, rejected=other.id))


async def test_the_observer_hears_of_new_preferences_alone(store: Store) -> None:
    heard: list[str] = []

    class Observer:
        def rewards_recorded(self, entries: int, *, effect: str) -> None:
            heard.append(effect)

        def text_recorded(self, *, effect: str) -> None:
            heard.append(effect)

        def preference_recorded(self) -> None:
            heard.append("preferred")

    feedback = FeedbackService(store.database, store.signals, store.clock, Observer())
    one, other = await two_sessions(store)
    for _ in range(2):
        await feedback.prefer(store.owner, PreferenceItem(chosen=one, rejected=other, idempotency_key="k"))
    assert heard == ["preferred"]


@pytest.mark.parametrize("path", ["/v1/feedback/preference", "/feedback/preference"])
async def test_over_http(domain: DomainClient, path: str) -> None:
    one, other = await two_sessions(domain.store)
    answer = await domain.http.post(path, json={"chosen": one, "rejected": other, "comment": "kinder"})
    assert answer.status_code == 201, answer.text
    assert answer.json() == {
        "id": answer.json()["id"],
        "chosen": {"session_id": one, "turn_id": None},
        "rejected": {"session_id": other, "turn_id": None},
    }
    (shown,) = (await domain.http.get(f"/v1/sessions/{one}")).json()["preferences"]
    assert (shown["verdict"], shown["comment"]) == ("chosen", "kinder")
    for body, param in (
        ({"chosen": one}, "rejected"),
        ({"chosen": one, "rejected": other, "reward": 1}, "reward"),
        ({"chosen": one, "rejected": ""}, "rejected"),
        ([], None),
    ):
        wrong = await domain.http.post(path, json=body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param), wrong.text
