"""Processes of the proxy that find sessions on one store, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import func, select

from proxy.database.tables import SessionRow
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunDirectory
from proxy.sessions.identification import AttributedBy, Name, SessionContext, SessionHints
from proxy.sessions.service import SessionService
from tests.proxy.store import Store

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16

NAMES_OF_ATTEMPTS = [AttributedBy.PATH, AttributedBy.HEADER, AttributedBy.AGENT_HEADER]
NAMES_THAT_LAST = [by for by in AttributedBy if by.outlives_sessions]


def by_name(by: AttributedBy, text: str) -> SessionHints:
    return SessionHints(path=text) if by is AttributedBy.PATH else SessionHints(named=Name(by, text))


def goes_on(*hashes: bytes) -> SessionHints:
    return SessionHints(conversation_hashes=hashes)


class Proxy:
    """A proxy process on the store: a service with a cache of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        signals = Signals()
        runs = RunDirectory(store.database, store.clock)
        self.sessions = SessionService(store.database, runs, store.credentials, signals, store.clock)

    async def call(self, hints: SessionHints) -> SessionContext:
        return await self.sessions.identify(self.store.owner, self.store.run, hints)

    async def answer(self, context: SessionContext, conversation: bytes) -> None:
        await self.store.add_turn(context.id, conversation_hash=conversation)
        self.sessions.answered(context, conversation, seen_open=None)


@contextmanager
def transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list of the transactions opened on the store during the block."""
    opened: list[str] = []

    def counting(kind: str) -> Any:
        real = getattr(store.database, kind)

        def count(*work: Any, **about: Any) -> Any:
            opened.append(kind)
            return real(*work, **about)

        return count

    with monkeypatch.context() as patch:
        for kind in ("read", "commit"):
            patch.setattr(store.database, kind, counting(kind))
        yield opened


async def sessions(store: Store) -> int:
    return await store.database.read(
        lambda connection: connection.execute(select(func.count()).select_from(SessionRow)).scalar_one()
    )
