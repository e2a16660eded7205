from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_history, add_run
from tests.proxy.domain_client import DomainClient, open_domain
from tests.proxy.overview.site import Site, open_site
from tests.proxy.store import Store, open_store


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with open_store(database_url) as opened:
        yield opened


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncIterator[Store]:
    """A store for tests of SQLite's own behaviour."""
    async with open_store(sqlite_database(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def domain(store: Store) -> AsyncIterator[DomainClient]:
    async with open_domain(store) as client:
        yield client


@pytest.fixture
async def site(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(database_url, tmp_path, clock=lambda: NOW) as opened:
        yield opened


@pytest.fixture
async def run_id(site: Site) -> str:
    """A run with 6 steps of 16 sessions, and 10 sessions in other states; it ends at `NOW`."""
    run_id = await add_run(site.database, now=NOW - 200)
    await add_history(site.database, run_id, steps=6, per_step=16)
    return run_id
