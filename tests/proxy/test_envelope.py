"""Whatever an address contains, the answer is ours: an envelope under the API, a page under /admin, and never a 500.

The requests go directly into the application, because no HTTP library would send such paths. Bodies are tested in
`test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, quote_from_bytes

import pytest
from fastapi import params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from structlog.testing import capture_logs

from proxy.app import Application, create_app
from tests.fakes.engine import FakeEngine
from tests.proxy.test_app import ADMIN, RUN, TRAINER, settings_for
from tests.proxy.tokens.models import write_model

pytestmark = pytest.mark.xdist_group("envelope")

ODD = (
    "\0", "x" * 5000, "9" * 23, str(2**31), str(2**63), "-1", "1e5", "..", "%", "\u202e\n", "'\"<{}", "１２", "nan",
    "\udcff",
)  # fmt: skip
"""NUL, too long for a file's name, beyond 32 and 64 bits, other digits, invalid UTF-8 (here a lone surrogate)."""

STREAMS = ("/events", "/live")
TRAINERS = ("/claims", "/versions", "/head")


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def app(tmp_path: Path, model: Path) -> AsyncIterator[Application]:
    engine = FakeEngine(lambda _request: [5, 6, 2], model_path=str(model))
    opened = create_app(settings_for(tmp_path, model), engine=engine)
    async with opened.router.lifespan_context(opened):
        yield opened


async def ask(
    app: Application, method: str, path: str, query: str = "", *, body: bytes = b"", **headers: str
) -> Answer:
    """Send one request as a server would pass it on. Raise the application's unhandled exceptions."""
    received = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, answered, parts = 0, {}, []

    async def receive() -> Any:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        nonlocal status, answered
        if message["type"] == "http.response.start":
            status, answered = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    named = {"host": "proxy.test", "origin": "http://proxy.test", "authorization": f"Bearer {_key(path)}", **headers}
    raw = path.encode("utf-8", "surrogateescape")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw.decode("utf-8", "replace"),
        "raw_path": quote_from_bytes(raw).encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "server": ("proxy.test", 80),
        "client": ("127.0.0.1", 50000),
    }
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    return Answer(status, answered, b"".join(parts))


def _key(path: str) -> str:
    if any(part in path for part in TRAINERS):
        return TRAINER
    return ADMIN if path.startswith("/api") else RUN


def routes(app: Application) -> Iterator[APIRoute]:
    waiting: list[Any] = list(app.router.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, APIRoute):
            yield route
        else:
            inner = getattr(route, "original_router", route)
            waiting.extend(getattr(inner, "routes", ()))


def addresses(route: APIRoute) -> Iterator[tuple[str, str]]:
    """Return every address with each parameter of path and query once with each odd value: (path, query)."""
    names = re.findall(r"{(\w+)", route.path)
    usual = {"run": "policy", "version": "0", "switch": "pause"}

    def path_with(**odd: str) -> str:
        return re.sub(r"{(\w+)(?::\w+)?}", lambda found: (usual | odd).get(found[1], "x"), route.path)

    for name, odd in itertools.product(names, ODD):
        yield path_with(**{name: odd}), ""
    for field in get_flat_params(route.dependant):
        if isinstance(field.field_info, params.Query):
            for odd in ODD:
                yield path_with(), f"{field.alias}={quote(odd, errors='surrogateescape')}"
    yield path_with(), f"nobody_takes_this=1&{quote('x' * 5000)}=%00"


async def _cookie(app: Application) -> str:
    kind = "application/x-www-form-urlencoded"
    entered = await ask(app, "POST", "/admin/login", body=f"key={ADMIN}".encode(), **{"content-type": kind})
    assert entered.status == 303
    return entered.headers[b"set-cookie"].decode().partition(";")[0]


async def test_every_route_answers_odd_addresses_itself(app: Application) -> None:
    """A quarter of all combinations, a different one for each route, which limits the time to seconds."""
    cookie = await _cookie(app)
    found = sorted(routes(app), key=lambda route: (route.path, sorted(route.methods or ())))
    assert len(found) > 60
    for number, route in enumerate(found):
        if route.path.endswith(STREAMS) or route.path == "/admin/logout":
            continue
        for path, query in itertools.islice(addresses(route), number % 4, None, 4):
            for method in route.methods or ():
                answer = await ask(app, method, path, query, cookie=cookie)
                _check(f"{method} {path[:100]!r}?{query[:100]}", path, answer)


def _check(asked: str, path: str, answer: Answer) -> None:
    assert 200 <= answer.status < 500 or answer.status == 503, (asked, answer)
    assert answer.headers[b"x-request-id"], asked
    if answer.status >= 400 and path.startswith("/admin"):
        assert answer.headers[b"content-type"].startswith(b"text/html"), (asked, answer)
    elif answer.status >= 400:
        error = json.loads(answer.body)["error"]
        assert {"message", "type", "param", "code"} <= set(error), asked
        assert error["message"], asked


@pytest.mark.parametrize("name", ["\0", "x" * 5000, "é" * 200, "../endpoints.py", "vendor", "", "admin.css/"])
async def test_names_of_static_files_are_not_paths(app: Application, name: str) -> None:
    answer = await ask(app, "GET", f"/admin/static/{name}")
    assert answer.status == 404
    assert answer.headers[b"content-type"].startswith(b"text/html")
    assert (await ask(app, "GET", "/admin/static/admin.css")).status == 200


@pytest.mark.parametrize("number", [10**22, 2**31, -1])
@pytest.mark.parametrize("end", ["", "/tokens", "/batch"])
async def test_a_step_beyond_all_numbers_is_a_wrong_value(app: Application, number: int, end: str) -> None:
    bearer = TRAINER if end == "/batch" else ADMIN
    path = f"/api/v1/runs/policy/steps/{number}{end}"
    answer = await ask(app, "GET", path, authorization=f"Bearer {bearer}")
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "version")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/api/v1/runs?statr=open", "statr"),
        ("/api/v1/runs/policy/sessions?limit=1&limit=2", "limit"),
        ("/api/v1/runs/policy/versions?limit=1", "limit"),
        ("/api/v1/runs/policy/steps?cursor=%C2%B2", "cursor"),
        ("/api/v1/rewards?cursor=0x1p0~99999999999999999999999", None),
    ],
)
async def test_a_query_that_means_nothing_is_refused(app: Application, path: str, param: str | None) -> None:
    path, _, query = path.partition("?")
    answer = await ask(app, "GET", path, query, authorization=f"Bearer {ADMIN}")
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, param)


async def test_an_uncaught_exception_is_an_envelope_too(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework has an outermost layer of its own, which would otherwise answer first, in plain text."""

    async def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app.services.overview, "health", broken)
    with capture_logs() as logs:
        answer = await ask(app, "GET", "/api/v1/health")
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["request failed"]
    assert answer.status == 500
    error = json.loads(answer.body)["error"]
    assert error["type"] == "server_error"
    assert answer.headers[b"x-request-id"].decode() in error["message"]
