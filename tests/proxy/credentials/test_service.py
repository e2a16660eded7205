from __future__ import annotations

import asyncio
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.pool import NullPool

from proxy.credentials.service import Credentials, PrincipalKind, load_secret
from proxy.database.tables import ApiKeyRow, Base
from proxy.errors import AuthenticationFailed, NotFound
from proxy.sessions.opening import SessionSpec
from proxy.settings import ConfigurationError
from tests.proxy.store import Store


async def test_a_key_names_its_kind_and_run(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.TRAINER, run_id=store.run.id, label="mine")
    assert key.text.startswith("rl-trainer-")
    who = await store.credentials.authenticate(key.text)
    assert (who.kind, who.key_id, who.run_id, who.session_id) == (
        PrincipalKind.TRAINER,
        key.id,
        store.run.id,
        None,
    )


def stored(store: Store, directory: Path) -> bytes:
    """Everything that the database keeps, as it keeps it or as it gives it out."""
    if store.database.url.get_backend_name() == "sqlite":
        return b"".join(path.read_bytes() for path in directory.glob("store.sqlite3*"))
    with create_engine(store.database.url, poolclass=NullPool).connect() as connection:
        rows = [row for table in Base.metadata.tables.values() for row in connection.execute(select(table))]
    return repr(rows).encode()


async def test_the_text_is_not_in_the_database(store: Store, tmp_path: Path) -> None:
    key = await store.credentials.create(PrincipalKind.ADMIN)
    async with store.database.read() as connection:
        row = (await connection.execute(select(ApiKeyRow.__table__).where(ApiKeyRow.id == key.id))).one()
    assert len(row.digest) == 32
    content = stored(store, tmp_path)
    assert key.id.encode() in content
    assert key.text.encode() not in content


@pytest.mark.parametrize("text", ["", "rl-run-unknown", "ключ", "\ud800", "x" * 100_000])
async def test_unknown_texts_are_refused(store: Store, text: str) -> None:
    with pytest.raises(AuthenticationFailed):
        await store.credentials.authenticate(text)


async def test_another_secret_knows_no_key(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.ADMIN)
    with pytest.raises(AuthenticationFailed):
        await Credentials(store.database, b"t" * 32, store.clock).authenticate(key.text)


async def test_a_revocation_counts_here_at_once_and_elsewhere_within_seconds(store: Store) -> None:
    elsewhere = Credentials(store.database, b"s" * 32, store.clock)
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
    for credentials in (store.credentials, elsewhere):
        await credentials.authenticate(key.text)
    await store.credentials.revoke(key.id)
    await store.credentials.revoke(key.id)
    with pytest.raises(AuthenticationFailed):
        await store.credentials.authenticate(key.text)
    store.clock.now += 6
    with pytest.raises(AuthenticationFailed):
        await elsewhere.authenticate(key.text)


async def test_revoking_what_is_not_there(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.credentials.revoke("key_nobody")


async def test_registering_the_same_text_again_is_the_same_key(store: Store) -> None:
    first = await store.credentials.register(PrincipalKind.RUN, "chosen", run_id=store.run.id, label="bootstrap")
    assert await store.credentials.register(PrincipalKind.RUN, "chosen", run_id=store.run.id) == first
    assert (await store.credentials.authenticate("chosen")).key_id == first
    with pytest.raises(ConfigurationError, match=r"bootstrap\.admin_key"):
        await store.credentials.register(PrincipalKind.ADMIN, "chosen")
    await store.credentials.revoke(first)
    with pytest.raises(ConfigurationError):
        await store.credentials.register(PrincipalKind.RUN, "chosen", run_id=store.run.id)


async def test_a_run_lists_its_keys_without_those_of_sessions(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    trainer = await store.credentials.create(PrincipalKind.TRAINER, run_id=store.run.id, label="t")
    await store.credentials.revoke(trainer.id)
    keys = await store.credentials.list_(store.run.id)
    assert [(key.kind, key.label, key.revoked_at) for key in keys] == [
        (PrincipalKind.RUN, None, None),
        (PrincipalKind.TRAINER, "t", store.clock.now),
    ]
    assert (await store.credentials.authenticate(session.api_key)).session_id == session.id


async def test_concurrent_checks_of_one_key_agree(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
    found = await asyncio.gather(*(store.credentials.authenticate(key.text) for _ in range(32)))
    assert {who.key_id for who in found} == {key.id}


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(load_secret, [tmp_path / "data"] * 16))
    assert len(secrets) == 1
    assert secrets == {load_secret(tmp_path / "data")}
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["secret"]
    assert stat.S_IMODE((tmp_path / "data" / "secret").stat().st_mode) == 0o600


def test_a_damaged_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="damaged"):
        load_secret(tmp_path)
