from __future__ import annotations

from hypothesis import settings


def pytest_configure() -> None:
    """Property tests run on machines that are shared: how long an example takes says nothing there."""
    settings.register_profile("shared-machine", deadline=None)
    settings.load_profile("shared-machine")
