"""Runs that are created and changed by a process that dies half way."""

from __future__ import annotations

import pytest
from pydantic import model_validator
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from proxy.errors import BaseRlError, InvalidRequest
from proxy.feedback.service import FeedbackItem
from proxy.runs.management import RunManagement
from proxy.runs.switch import RunSwitch
from proxy.sessions.opening import SessionSpec
from proxy.settings import ConfigurationError, RunSettings
from tests.proxy.store import Store
from tests.proxy.versions.publishing import inspector


class Killed(BaseException):
    """Stands for the death of the process."""


def management_of(store: Store, *, dies_after_commit: bool = False) -> RunManagement:
    async def check(base_model: str, settings: RunSettings) -> None:
        if base_model == "no/model":
            raise ConfigurationError("there is no such model")

    async def apply_rules() -> None:
        if dies_after_commit:
            raise Killed
        await store.feedback.apply_changed_rules()

    return RunManagement(
        database=store.database,
        runs=store.runs,
        signals=store.signals,
        clock=store.clock,
        check=check,
        apply_rules=apply_rules,
        check_weights=inspector().check,
    )


async def rename(store: Store, table: str, to: str) -> None:
    await store.database.commit(lambda connection: connection.execute(text(f"ALTER TABLE {table} RENAME TO {to}")))


async def test_a_change_that_fails_half_way_leaves_nothing(store: Store) -> None:
    """The event is the last write of each operation. Without its table the operation fails after the others."""
    management, switch = management_of(store), RunSwitch(store.database, store.signals, store.clock)
    before = await store.runs.list_()
    await rename(store, "events", "lost")
    for operation in (
        lambda: management.create("shop", "base/model", {}),
        lambda: management.clone("policy", "shop", {}),
        lambda: management.change("policy", {"max_new_tokens": 3}),
        lambda: switch.archive("policy"),
    ):
        with pytest.raises((BaseRlError, DBAPIError)):
            await operation()
    await rename(store, "lost", "events")
    assert await store.runs.list_() == before
    assert (await management.create("shop", "base/model", {})).name == "shop"


async def test_a_process_that_dies_after_a_change_is_made_leaves_the_rest_to_the_next_start(store: Store) -> None:
    session = (await store.sessions.create(store.run, SessionSpec()))[0]
    await store.feedback.record(store.owner, [FeedbackItem(session_id=session.id, entries=(("style", 1.0),))])
    with pytest.raises(Killed):
        await management_of(store, dies_after_commit=True).change("policy", {"reward_weights": {"style": 0.25}})
    await store.feedback.apply_changed_rules()  # as every start does
    assert (await store.sessions.get(store.owner, session.id)).reward == 0.25


async def test_an_error_about_all_settings_together_is_the_clients(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(RunSettings):
        @model_validator(mode="after")
        def _fits(self) -> Strict:
            if self.max_new_tokens == 3:
                raise ValueError("three tokens are too few for this model")
            return self

    management = management_of(store)
    monkeypatch.setattr("proxy.runs.management.RunSettings", Strict)
    with pytest.raises(InvalidRequest, match="settings: three tokens are too few for this model"):
        await management.change("policy", {"max_new_tokens": 3})


async def test_what_the_model_check_refuses_is_not_stored(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="there is no such model"):
        await management_of(store).create("shop", "no/model", {})
    assert [run.name for run in await store.runs.list_()] == ["policy"]
