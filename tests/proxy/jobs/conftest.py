from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.proxy.jobs.world import Jobs, open_jobs


@pytest.fixture
async def jobs(database_url: str) -> AsyncIterator[Jobs]:
    async with open_jobs(database_url) as opened:
        yield opened
