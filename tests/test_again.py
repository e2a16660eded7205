"""Sessions of pytest with tests of their own, which `pytester` runs in this process."""

from __future__ import annotations

import pytest

from tests.again import MOST

CONFTEST = """
from tests.again import pytest_addoption, pytest_configure
from tests.suites import keep_together

def pytest_collection_modifyitems(config, items):
    keep_together(items, named=config.getoption("loadgroup", default=False))
"""
SUITE = """
from pathlib import Path
import pytest

seen = Path(__file__).parent / "seen"

@pytest.mark.xdist_group("loaded")
@pytest.mark.parametrize("address", ["a@b", "c@d"])
def test_load(address):
    marker = seen.with_name(f"seen-{address}")
    once, _ = marker.exists(), marker.touch()
    assert once

@pytest.mark.parametrize("address", ["x@y"])
def test_passes(address):
    assert not seen.exists()
"""
FAULT = """
def test_fault():
    assert False
"""
HEADING = "*= passed only when run again =*"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_inprocess(
        "-p", "no:schemathesis", "-p", "no:asyncio", "-p", "no:hypothesispytest", *options
    )


@pytest.mark.parametrize("how", [[], ["-n", "1", "--dist", "loadgroup"]])
def test_a_test_that_passes_only_the_second_time_is_listed(suite: pytest.Pytester, how: list[str]) -> None:
    run(suite, *how).assert_outcomes(failed=2, passed=1)
    again = run(suite, "--again")
    again.assert_outcomes(passed=2, deselected=1)
    assert again.ret == pytest.ExitCode.OK
    again.stdout.fnmatch_lines([HEADING, "test_suite.py::test_load[[]a@b[]]", "test_suite.py::test_load[[]c@d[]]"])


def test_a_fault_fails_twice(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other=FAULT)
    run(suite).assert_outcomes(failed=3, passed=1)
    again = run(suite, "--again")
    again.assert_outcomes(failed=1, passed=2, deselected=1)
    assert again.ret == pytest.ExitCode.TESTS_FAILED
    again.stdout.fnmatch_lines([HEADING])


def test_a_test_that_is_skipped_the_second_time_has_not_passed(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite="import pytest\n\ndef test_one():\n    assert False\n")
    run(suite).assert_outcomes(failed=1)
    suite.makepyfile(test_suite="import pytest\n\n@pytest.mark.skip\ndef test_one():\n    assert False\n")
    assert run(suite, "--again").ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_that_is_gone_has_not_passed(suite: pytest.Pytester) -> None:
    run(suite).assert_outcomes(failed=2, passed=1)
    again = run(suite, "--again", "--deselect", "test_suite.py::test_load[a@b]")
    assert again.ret == pytest.ExitCode.USAGE_ERROR
    assert "not found now: ['test_suite.py::test_load[a@b]']" in str(again.stderr)


@pytest.mark.parametrize(
    ("tests", "refusal"),
    [
        ("", "ERROR: the previous session did not end with failed tests*"),
        ("def test_passes():\n    pass\n", "ERROR: the previous session did not end with failed tests*"),
        ("import nowhere\n", "ERROR: the previous session did not end with failed tests*"),
        (
            "import pytest\n\ndef test_one():\n    assert False\n\ndef test_two():\n    pytest.exit('stop')\n",
            "ERROR: the previous session did not end with failed tests*",
        ),
        (
            "import pytest\n\n@pytest.mark.parametrize('x', range(11))\ndef test_one(x):\n    assert False\n",
            f"ERROR: 11 tests failed: at most {MOST} are run again",
        ),
    ],
    ids=["no tests", "all passed", "cannot be collected", "interrupted", "too many"],
)
def test_only_a_session_with_few_failures_is_run_again(suite: pytest.Pytester, tests: str, refusal: str) -> None:
    suite.makepyfile(test_suite=tests)
    run(suite)
    again = run(suite, "--again")
    assert again.ret == pytest.ExitCode.USAGE_ERROR
    again.stderr.fnmatch_lines([refusal])


def test_a_session_that_stopped_at_the_first_failure_is_not_run_again(suite: pytest.Pytester) -> None:
    run(suite, "-x").assert_outcomes(failed=1)
    assert run(suite, "--again").ret == pytest.ExitCode.USAGE_ERROR


def test_tests_run_again_alone(suite: pytest.Pytester) -> None:
    run(suite)
    again = run(suite, "--again", "-n", "1")
    assert again.ret == pytest.ExitCode.USAGE_ERROR
    again.stderr.fnmatch_lines(["ERROR: --again runs tests alone: leave out -n"])
