from __future__ import annotations

import pytest

from tests.suites import ROOT, check, may_have


def test_a_suite_is_found_by_what_its_files_and_the_conftests_above_them_say() -> None:
    for place in ("", "proxy/admin", "proxy/admin/test_browser.py"):
        assert may_have(ROOT / place, "browser"), place
    assert may_have(ROOT / "engines" / "test_generation.py", "sglang"), "its conftest.py has a parameter of it"
    for place in ("engines", "proxy/admin/test_pages.py"):
        assert not may_have(ROOT / place, "browser"), place


def test_a_test_that_its_suite_would_not_find_is_an_error(request: pytest.FixtureRequest) -> None:
    check([request.node])
    request.node.add_marker("archon")
    with pytest.raises(pytest.UsageError, match=r"-m archon would not find them"):
        check([request.node])


@pytest.fixture(scope="module")
def made_once() -> object:
    return object()


@pytest.mark.usefixtures("made_once")
def test_tests_that_share_a_module_fixture_run_in_one_process(request: pytest.FixtureRequest) -> None:
    (group,) = request.node.iter_markers("xdist_group")
    assert group.args == ("test_suites.py",)
    is_told = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@test_suites.py") is is_told, "pytest-xdist knows groups by ids"


def test_others_run_in_any(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("xdist_group") is None
