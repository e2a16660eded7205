from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.proxy.domain_client import DomainClient, open_domain
from tests.proxy.store import Store, open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path) as opened:
        yield opened


@pytest.fixture
async def domain(store: Store) -> AsyncIterator[DomainClient]:
    async with open_domain(store) as client:
        yield client
