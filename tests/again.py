"""`pytest --again` runs the tests that failed in the previous session once more, alone in one process.

A test that passes only then depends on load, on timing or on the tests before it. The summary lists it, so that it
is seen and mended. Every session records which of its tests failed, whether it distributes them with pytest-xdist or
not.

pytest's own `--last-failed` does not suffice: it does not find tests by the ids that pytest-xdist gives to groups,
and it succeeds after a session that was interrupted before it had run every test.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

import pytest

MOST = 10
"""More failures than this are a fault of the change, not of single tests."""
_KEY = "base-rl/failed"


class Previous(TypedDict):
    """The ids of the tests that failed in a session. It is `complete` if every other test passed or was skipped."""

    complete: bool
    failed: list[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again",
        action="store_true",
        help=f"run only the tests that failed in the previous session, at most {MOST}, in this process",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # pytest-xdist's workers report to the process that started them
        return
    if config.getoption("again"):
        config.pluginmanager.register(Again(config))
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(Failures(config))


class Failures:
    """Record the tests that fail in this session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, None] = {}
        _write(config, None)  # a session that is killed leaves no record, least of all that of an earlier one

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[_without_group(report.nodeid)] = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stopped = session.shouldfail or session.shouldstop  # as by -x: the exit status does not tell
        complete = session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stopped
        _write(self._config, {"complete": complete, "failed": list(self._failed)})


class Again:
    """Select the tests that failed in the previous session, and succeed only if every one of them passes now."""

    def __init__(self, config: pytest.Config) -> None:
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--again runs tests alone: leave out -n")
        self._root = config.rootpath
        self._failed = failed_before(config)
        self._files = {self._root / name.partition("::")[0] for name in self._failed}
        self._phases: dict[str, list[str]] = {}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Skip the other files: collecting the whole suite takes longer than ten tests."""
        return True if collection_path.is_file() and collection_path not in self._files else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = set(self._failed)
        found = [item for item in items if _without_group(item.nodeid) in wanted]
        missing = wanted - {_without_group(item.nodeid) for item in found}
        if missing:
            raise pytest.UsageError(f"tests that failed in the previous session are not found now: {sorted(missing)}")
        config.hook.pytest_deselected(items=[item for item in items if item not in found])
        items[:] = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.setdefault(report.nodeid, []).append(report.outcome)

    @property
    def passed(self) -> list[str]:
        """The tests whose set-up, call and tear-down passed: a test that is skipped now shows nothing."""
        return [name for name, outcomes in self._phases.items() if outcomes == ["passed"] * 3]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and len(self.passed) < len(self._failed):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.passed:
            terminalreporter.section("passed only when run again")
            for name in self.passed:
                terminalreporter.line(name)


def failed_before(config: pytest.Config) -> Collection[str]:
    """Return the ids of the tests that failed in the previous session.

    Raises UsageError if that session did not run to its end, if all its tests passed, or if too many failed.
    """
    previous: Previous | None = _cache(config).get(_KEY, None)
    if previous is None or not previous["complete"]:
        raise pytest.UsageError("the previous session did not end with failed tests: there is nothing to run again")
    if len(previous["failed"]) > MOST:
        raise pytest.UsageError(f"{len(previous['failed'])} tests failed: at most {MOST} are run again")
    return previous["failed"]


def _write(config: pytest.Config, previous: Previous | None) -> None:
    _cache(config).set(_KEY, previous)


def _cache(config: pytest.Config) -> pytest.Cache:
    if not config.pluginmanager.hasplugin("cacheprovider"):
        raise pytest.UsageError("--again needs pytest's cache: leave out -p no:cacheprovider")
    assert config.cache is not None
    return config.cache


def _without_group(name: str) -> str:
    """Return a test's id without the group that `tests.suites.keep_together` appends: `a.py::test[x]@group`."""
    return name if name.endswith("]") else name.rpartition("@")[0] or name
