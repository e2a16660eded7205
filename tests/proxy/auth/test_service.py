from __future__ import annotations

import asyncio
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.pool import NullPool

from proxy.auth.secret import find_secret, load_secret
from proxy.auth.service import Credentials, PrincipalKind
from proxy.database.tables import ApiKeyRow, Base
from proxy.errors import AuthenticationFailed, Conflict, KeyExpired, NotFound
from proxy.sessions.opening import SessionSpec
from proxy.settings import ConfigurationError, RunSettings
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
    """Return everything in the database, as stored or as dumped."""
    if store.database.url.get_backend_name() == "sqlite":
        return b"".join(path.read_bytes() for path in directory.glob("store.sqlite3*"))
    with create_engine(store.database.url, poolclass=NullPool).connect() as connection:
        rows = [row for table in Base.metadata.tables.values() for row in connection.execute(select(table))]
    return repr(rows).encode()


async def test_the_text_of_a_key_is_not_in_the_database(store: Store, tmp_path: Path) -> None:
    key = await store.credentials.create(PrincipalKind.ADMIN)
    row = await store.database.read(
        lambda connection: connection.execute(select(ApiKeyRow.__table__).where(ApiKeyRow.id == key.id)).one()
    )
    assert len(row.digest) == 32
    content = stored(store, tmp_path)
    assert key.id.encode() in content
    assert key.text.encode() not in content


@pytest.mark.parametrize("text", ["", "rl-run-unknown", "ключ", "\ud800", "x" * 100_000])
async def test_unknown_texts_are_refused(store: Store, text: str) -> None:
    with pytest.raises(AuthenticationFailed):
        await store.credentials.authenticate(text)


async def test_with_another_secret_no_key_is_known(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.ADMIN)
    with pytest.raises(AuthenticationFailed):
        await Credentials(store.database, b"t" * 32, store.clock).authenticate(key.text)


async def test_a_revocation_takes_effect_here_at_once_and_elsewhere_within_seconds(store: Store) -> None:
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


async def test_revoking_an_unknown_key_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.credentials.revoke("key_nobody")


async def refused(credentials: Credentials, text: str) -> bool:
    try:
        await credentials.authenticate(text)
    except AuthenticationFailed:
        return True
    return False


async def test_registering_the_same_text_again_is_the_same_key(store: Store) -> None:
    first = await store.credentials.register(PrincipalKind.RUN, "chosen", run_id=store.run.id)
    assert await store.credentials.register(PrincipalKind.RUN, "chosen", run_id=store.run.id) == first
    assert (await store.credentials.authenticate("chosen")).key_id == first
    with pytest.raises(ConfigurationError, match=r"bootstrap\.admin_key"):
        await store.credentials.register(PrincipalKind.ADMIN, "chosen")


@pytest.mark.parametrize("kind", [PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.TRAINER])
async def test_a_key_that_the_configuration_replaces_stops_working(store: Store, kind: PrincipalKind) -> None:
    run_id = None if kind is PrincipalKind.ADMIN else store.run.id
    by_hand = await store.credentials.create(kind, run_id=run_id, label="mine")
    elsewhere = Credentials(store.database, b"s" * 32, store.clock)
    await store.credentials.register(kind, "first", run_id=run_id)
    await elsewhere.authenticate("first")
    await store.credentials.register(kind, "second", run_id=run_id)
    assert await refused(store.credentials, "first")
    store.clock.now += 5
    assert await refused(elsewhere, "first"), "other proxies refuse it within five seconds"
    assert not await refused(store.credentials, "second")
    assert not await refused(store.credentials, by_hand.text), "the configuration never named this one"


async def test_an_old_configuration_neither_restores_nor_revokes_a_key(store: Store) -> None:
    for text in ("first", "second", "first"):
        await store.credentials.register(PrincipalKind.ADMIN, text)
    assert await refused(store.credentials, "first")
    assert not await refused(store.credentials, "second")


async def test_the_configured_keys_of_runs_do_not_replace_each_other(store: Store) -> None:
    other = await store.runs.ensure(RunSettings(name="other", model="base/model"))
    for text, run in (("one", store.run), ("two", other)):
        await store.credentials.register(PrincipalKind.RUN, text, run_id=run.id)
    assert not await refused(store.credentials, "one")


async def test_a_rotated_key_is_replaced_by_one_with_the_same_rights(store: Store) -> None:
    old = await store.credentials.create(PrincipalKind.TRAINER, run_id=store.run.id, label="gpu")
    await store.credentials.authenticate(old.text)
    rotated = await store.credentials.rotate(old.id)
    assert await refused(store.credentials, old.text)
    who = await store.credentials.authenticate(rotated.key.text)
    assert (who.kind, who.run_id, rotated.view.label) == (PrincipalKind.TRAINER, store.run.id, "gpu")
    with pytest.raises(Conflict, match="create a new one"):
        await store.credentials.rotate(old.id)
    with pytest.raises(NotFound):
        await store.credentials.rotate("key_nobody")


async def test_a_rotated_key_works_until_its_grace_ends_and_no_longer(store: Store) -> None:
    elsewhere = Credentials(store.database, b"s" * 32, store.clock, outlive_store=True)
    old = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
    rotated = await store.credentials.rotate(old.id, grace_seconds=10)
    assert rotated.replaced_until == store.clock.now + 10
    store.clock.now += 9
    for credentials in (store.credentials, elsewhere):
        assert not await refused(credentials, old.text)
    store.clock.now += 1
    for credentials in (store.credentials, elsewhere):
        assert await refused(credentials, old.text), "its end is known in advance: no cache outlives it"


async def test_a_key_in_its_grace_can_be_revoked_at_once(store: Store) -> None:
    old = await store.credentials.create(PrincipalKind.ADMIN)
    await store.credentials.rotate(old.id, grace_seconds=3600)
    await store.credentials.revoke(old.id)
    assert await refused(store.credentials, old.text)


async def test_the_last_admin_key_is_not_revoked(store: Store) -> None:
    first = await store.credentials.create(PrincipalKind.ADMIN)
    with pytest.raises(Conflict, match="create another one first"):
        await store.credentials.revoke(first.id)
    second = await store.credentials.rotate(first.id, grace_seconds=60)
    with pytest.raises(Conflict):  # a key in its grace period does not count
        await store.credentials.revoke(second.key.id)
    await store.credentials.create(PrincipalKind.ADMIN)
    await store.credentials.revoke(second.key.id)


async def test_keys_are_listed_page_by_page_without_their_texts(store: Store) -> None:
    made = []
    for kind in (PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.TRAINER, PrincipalKind.SESSION):
        store.clock.now += 1
        made.append((await store.credentials.create(kind, run_id=store.run.id)).id)
    every = list(PrincipalKind)
    seen, below = [], None
    while page := await store.credentials.page(kinds=every, below=below, limit=2):
        seen += [key.id for key in page]
        below = (page[-1].created_at, page[-1].id)
    assert seen[:4] == made[::-1]
    await store.credentials.revoke(made[1])
    (trainer,) = await store.credentials.page(kinds=[PrincipalKind.TRAINER])
    assert (trainer.id, trainer.run_id) == (made[2], store.run.id)
    assert made[1] not in {key.id for key in await store.credentials.page(kinds=every)}
    assert made[1] in {key.id for key in await store.credentials.page(kinds=every, with_revoked=True)}


async def test_the_last_use_of_a_key_is_recorded(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)

    async def last_used() -> float | None:
        await store.credentials.write_uses()
        view = await store.credentials.find(key.id)
        assert view is not None
        return view.last_used_at

    assert await last_used() is None
    await store.credentials.authenticate(key.text)
    first = store.clock.now
    assert await last_used() == first
    store.clock.now += 30
    await store.credentials.authenticate(key.text)
    assert await last_used() == first, "a busy key is written once a minute"
    store.clock.now += 31
    await store.credentials.authenticate(key.text)
    assert await last_used() == store.clock.now


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


def test_the_secret_is_created_once_and_private(tmp_path: Path) -> None:
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


async def test_an_expired_key_is_refused_with_the_reason_and_not_rotated(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id, label="guest", expires_in=60.0)
    assert (await store.credentials.authenticate(key.text)).run_id == store.run.id
    store.clock.now += 60.0
    with pytest.raises(KeyExpired, match=r"^this API key expired at 1970-01-12 13:47 UTC: ask an administrator"):
        await store.credentials.authenticate(key.text)
    assert await store.credentials.find_valid(key.id) is None
    with pytest.raises(Conflict, match="expired at"):
        await store.credentials.rotate(key.id)


async def test_a_rotated_key_lives_as_long_as_its_predecessor_did(store: Store) -> None:
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id, expires_in=60.0)
    store.clock.now += 45.0
    rotated = await store.credentials.rotate(key.id, grace_seconds=30.0)
    assert rotated.view.expires_at == store.clock.now + 60.0
    store.clock.now += 20.0  # the grace period does not outlast the expiry of the old key
    with pytest.raises(KeyExpired):
        await store.credentials.authenticate(key.text)
    assert (await store.credentials.authenticate(rotated.key.text)).run_id == store.run.id


async def test_an_admin_key_that_expires_does_not_make_the_last_one_dispensable(store: Store) -> None:
    last = await store.credentials.create(PrincipalKind.ADMIN)
    guest = await store.credentials.create(PrincipalKind.ADMIN, expires_in=60.0)
    with pytest.raises(Conflict, match="last admin key"):
        await store.credentials.revoke(last.id)
    await store.credentials.revoke(guest.id)


def test_a_secret_is_found_and_not_made(tmp_path: Path) -> None:
    assert find_secret(tmp_path) is None
    assert not (tmp_path / "secret").exists()
    assert load_secret(tmp_path) == find_secret(tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="damaged"):
        find_secret(tmp_path)
