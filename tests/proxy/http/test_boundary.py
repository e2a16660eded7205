from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Scope
from structlog.testing import capture_logs

from proxy.errors import EngineUnavailable, StoreUnavailable
from proxy.http import errors
from proxy.http.admission import BodyAdmission, BodyBytes
from proxy.http.boundary import RequestBoundary

LIMIT = 1000


class Recorder:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.requests.append((method, route, status))


class Body(BaseModel):
    number: int


async def anybody(scope: Scope) -> str:
    """Authenticate every request with the same valid key."""
    return "key"


def bound_bodies(app: FastAPI) -> None:
    in_work = BodyBytes(most=10 * LIMIT, most_per_key=10 * LIMIT)
    app.add_middleware(BodyAdmission, limit=LIMIT, in_work=in_work, authenticate=anybody)


def application(recorder: Recorder) -> FastAPI:
    app = FastAPI()
    bound_bodies(app)
    app.add_middleware(RequestBoundary, observer=recorder)
    errors.install(app)

    @app.post("/echo/{name}")
    async def echo(request: Request, name: str) -> dict[str, Any]:
        return {"name": name, "size": len(await request.body()), "request_id": request.state.request_id}

    @app.post("/declared")
    async def declared(body: Body, limit: int = 1) -> int:
        return body.number + limit

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("secret detail")

    @app.get("/memory")
    async def memory() -> None:
        raise MemoryError

    @app.get("/half")
    async def half() -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            raise RuntimeError("in mid-stream")

        return StreamingResponse(chunks())

    @app.get("/busy")
    async def busy() -> None:
        raise StoreUnavailable("the disk is full \ud800", retry_after=0.2)

    @app.get("/down")
    async def down() -> None:
        raise EngineUnavailable("no engine")

    return app


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def client(recorder: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=application(recorder))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as opened:
        yield opened


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def test_every_answer_has_a_request_id(client: httpx.AsyncClient) -> None:
    seen = set()
    for path in ("/echo/a", "/nothing", "/bug", "/declared"):
        answer = await client.post(path, content=b"{")
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 4
    answer = await client.post("/echo/a", headers={"x-request-id": "mine-1"})
    assert (answer.headers["x-request-id"], answer.json()["request_id"]) == ("mine-1", "mine-1")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a;b"])
async def test_an_odd_request_id_is_replaced(client: httpx.AsyncClient, given: str) -> None:
    answer = await client.post("/echo/a", headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    missing = await client.get("/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = await client.get("/declared")
    assert (wrong.status_code, error_of(wrong)["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


@pytest.mark.parametrize(
    ("content", "query", "param"),
    [
        ('{"number": "x"}', "", "number"),
        ("{}", "", "number"),
        ("{", "", None),
        ('{"number": 1}', "?limit=x", "limit"),
    ],
)
async def test_declared_bodies_and_queries_are_400(
    client: httpx.AsyncClient, content: str, query: str, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    answer = await client.post(f"/declared{query}", content=content, headers=headers)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_a_bug_is_a_500_without_its_details_and_is_logged_with_them(client: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        answer = await client.get("/bug", headers={"x-request-id": "mine-2"})
    assert answer.status_code == 500
    error = error_of(answer)
    assert "secret" not in error["message"]
    assert "mine-2" in error["message"]
    (failure,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert (failure["path"], failure["exc_info"]) == ("/bug", True)


async def test_a_request_without_memory_left_is_refused_and_logged(client: httpx.AsyncClient) -> None:
    with capture_logs() as logs:
        answer = await client.get("/memory")
    assert (answer.status_code, error_of(answer)["code"], answer.headers["retry-after"]) == (503, "overloaded", "2")
    assert [(entry["event"], entry["path"]) for entry in logs] == [("out of memory", "/memory")]


async def test_a_stream_that_breaks_is_cut_not_closed(client: httpx.AsyncClient, recorder: Recorder) -> None:
    with capture_logs(), pytest.raises(RuntimeError, match="mid-stream"):
        await client.get("/half")
    assert recorder.requests == [("GET", "/half", 200)]


async def test_retry_after(client: httpx.AsyncClient) -> None:
    busy, down = await client.get("/busy"), await client.get("/down")
    assert (busy.status_code, busy.headers["retry-after"], error_of(busy)["code"]) == (503, "1", "store_unavailable")
    assert (down.status_code, down.headers["retry-after"], error_of(down)["code"]) == (503, "2", "engine_unavailable")


async def in_pieces(sizes: list[int]) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


@pytest.mark.parametrize(
    "content", [lambda: b"x" * (LIMIT + 1), lambda: in_pieces([LIMIT, 1]), lambda: in_pieces([LIMIT * 5])]
)
@pytest.mark.parametrize("path", ["/echo/a", "/declared"])
async def test_bodies_are_bounded_announced_or_not(
    client: httpx.AsyncClient, path: str, content: Callable[[], Any]
) -> None:
    answer = await client.post(path, content=content(), headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "payload_too_large")


async def test_a_body_of_exactly_the_bound_is_accepted(client: httpx.AsyncClient) -> None:
    answer = await client.post("/echo/a", content=in_pieces([LIMIT - 1, 1]))
    assert (answer.status_code, answer.json()["size"]) == (200, LIMIT)


async def test_requests_are_counted_by_their_pattern(client: httpx.AsyncClient, recorder: Recorder) -> None:
    await client.post("/echo/a")
    await client.post("/echo/b")
    await client.get("/nothing/at/all")
    assert recorder.requests == [
        ("POST", "/echo/{name}", 200),
        ("POST", "/echo/{name}", 200),
        ("GET", "unmatched", 404),
    ]


async def test_a_client_that_leaves_while_sending_its_body_is_not_an_error(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[Any] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http", "method": "POST", "path": "/echo/x", "raw_path": b"/echo/x", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": None,
    }  # fmt: skip
    await application(recorder)(scope, receive, send)
    assert sent == []
    assert recorder.requests == [("POST", "/echo/{name}", 499)]
    assert "Traceback" not in "".join(capsys.readouterr())
