from __future__ import annotations

import pytest

from tests.proxy.turns.conftest import world

__all__ = ["world"]


@pytest.fixture(autouse=True)
def _every_store_is_whole(whole_store: None) -> None:
    """Neither erasure nor retention may look like damage."""
