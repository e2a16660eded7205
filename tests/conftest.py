from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest
import structlog
import typer.main
import typer.testing
from hypothesis import settings

from proxy.database import sqlite
from tests.database import (
    assert_whole,
    needs_postgresql,
    postgresql_database,
    remove_servers,
    sqlite_database,
    sqlite_url,
    start_with_migrated_stores,
)
from tests.suites import SUITES, check, keep_together, may_have

pytest_plugins = ("tests.again", "pytester")

_DATABASES = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgresql", id="postgresql", marks=needs_postgresql),
]


def pytest_configure() -> None:
    """Remove hypothesis's time limits, because examples run on shared machines, fix the width of terminal output, and
    write no log unless a test or a command sets one up: structlog's default is the standard output, where a line of a
    server on another thread would be part of what a command printed. Read certificates once."""
    os.environ["COLUMNS"] = "200"
    settings.register_profile("shared-machine", deadline=None)
    settings.load_profile("shared-machine")
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    # Every client of httpx would read the certificates of all authorities again, which takes up to 60 ms, and every
    # application makes one. No public setting lets clients share a context.
    shared = functools.cache(httpx.create_ssl_context)
    for module in (httpx, httpx._transports.default):
        setattr(module, "create_ssl_context", shared)  # noqa: B010  (mypy knows neither as an attribute to set)
    # Without this, a test that runs a command would build it anew with all others of `base-rl`: a tenth of a second.
    setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))  # noqa: B010
    start_with_migrated_stores()
    sqlite.DEFAULT_SYNCHRONOUS = "off"  # no test store has to survive a power failure


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    parts = config.getoption("markexpr").split(" or ")
    suites = {part.removesuffix(" and not exhaustive") for part in parts}
    return True if suites <= SUITES and not any(may_have(collection_path, suite) for suite in suites) else None


@pytest.fixture(autouse=True)
def _logging_of_the_test() -> Iterator[None]:
    """Undo the set-up of logging by commands that ran in the test's process.

    Their handler writes to a stream that is closed after the test, so every later line would be an error on the
    output of another test.
    """
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers != handlers:
        root.handlers = handlers
        root.setLevel(level)
        structlog.configure(**configured)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and exempt what was collected from it.

    Modules and tests stay until the end, and walking them again and again took a quarter of the time of collecting.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check(items)
    keep_together(items, named=config.getoption("loadgroup", default=False))


def pytest_unconfigure() -> None:
    remove_servers()


@pytest.fixture(params=_DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated database of each kind; a test that uses it runs on both."""
    if request.param == "sqlite":
        yield sqlite_database(tmp_path)
    else:
        with postgresql_database() as url:
            yield url


@pytest.fixture
def whole_store(request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end of a test with a `database_url`, `base-rl db check` finds nothing in it; for use by a conftest.py.

    Tests marked `rows_by_hand` are exempt: they write what the program never would.
    """
    if "database_url" not in request.fixturenames or request.node.get_closest_marker("rows_by_hand") is not None:
        yield
        return
    url: str = request.getfixturevalue("database_url")
    yield
    assert_whole(url)


@pytest.fixture(params=_DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of each kind without tables."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path)
    else:
        with postgresql_database(migrated=False) as url:
            yield url
