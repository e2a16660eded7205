from __future__ import annotations

import pytest

from tests.proxy.sessions.processes import Proxy
from tests.proxy.store import Store


@pytest.fixture
def proxy(store: Store) -> Proxy:
    proxy = Proxy(store)
    proxy.sessions = store.sessions
    return proxy
