"""Services are found by type; one that the wiring forgot is named."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from proxy.http.services import provide, service


def test_a_service_is_found_by_its_type() -> None:
    app = FastAPI()
    provide(app, 1, "one")
    assert (service({"app": app}, int), service({"app": app}, str)) == (1, "one")


def test_a_later_one_takes_the_place_of_its_type_alone() -> None:
    app = FastAPI()
    provide(app, 1, "one")
    provide(app, 2)
    assert (service({"app": app}, int), service({"app": app}, str)) == (2, "one")


@pytest.mark.parametrize("given", [(), (1,)])
def test_a_missing_service_is_named(given: tuple[object, ...]) -> None:
    app = FastAPI()
    if given:
        provide(app, *given)
    with pytest.raises(LookupError, match=r"no float: give it to provide\(\)"):
        service({"app": app}, float)
