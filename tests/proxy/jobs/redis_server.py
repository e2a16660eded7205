"""The condition of tests with a real Redis. BASE_RL_REQUIRE_REDIS=1 makes its absence a failure."""

from __future__ import annotations

import os
import shutil

import pytest

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None and os.environ.get("BASE_RL_REQUIRE_REDIS") != "1",
    reason="no Redis server is installed (apt-get install redis-server)",
)
