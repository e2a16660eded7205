"""Admission of bodies: first the key, then room for the bytes, then the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from proxy.errors import AuthenticationFailed, Overloaded, TooManyBytes
from proxy.http.admission import FREE_BYTES, BodyAdmission, BodyBytes

LIMIT = 10 * FREE_BYTES
MOST, PER_KEY = 4 * LIMIT, 2 * LIMIT


async def by_header(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            if value == b"wrong":
                raise AuthenticationFailed("no such key")
            return str(value, "latin-1")
    return None


class Reader:
    """An application that reads its body and answers when the test lets it continue."""

    def __init__(self) -> None:
        self.read = 0
        self.waiting = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message["body"])
            more = message["more_body"]
            self.read += len(message["body"])
        self.waiting += 1
        await self.go_on.wait()
        self.waiting -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(size).encode()})


class Setting:
    def __init__(self) -> None:
        self.reader = Reader()
        self.in_work = BodyBytes(most=MOST, most_per_key=PER_KEY)
        app = BodyAdmission(self.reader, limit=LIMIT, in_work=self.in_work, authenticate=by_header)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.test")

    async def post(self, size: int, key: str | None = None, *, chunked: bool = False) -> httpx.Response:
        headers = {} if key is None else {"x-api-key": key}
        content: Any = pieces(size) if chunked else b"x" * size
        return await self.client.post("/", content=content, headers=headers)

    async def waiting(self, number: int) -> None:
        async with asyncio.timeout(10):
            while self.reader.waiting < number:
                await asyncio.sleep(0.001)


async def pieces(size: int) -> AsyncIterator[bytes]:
    while size > 0:
        yield b"x" * min(size, FREE_BYTES // 2)
        size -= FREE_BYTES // 2


@pytest.fixture
def setting() -> Setting:
    return Setting()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [FREE_BYTES + 1, LIMIT, LIMIT + 1])
async def test_a_body_without_a_key_is_not_read(setting: Setting, size: int, chunked: bool) -> None:
    answer = await setting.post(size, chunked=chunked)
    assert answer.status_code in ((401,) if chunked or size <= LIMIT else (401, 413))
    assert setting.reader.read == 0


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1, FREE_BYTES, LIMIT + 1])
async def test_a_wrong_key_is_reported_before_any_other_error(setting: Setting, size: int, chunked: bool) -> None:
    assert code_of(await setting.post(size, "wrong", chunked=chunked)) == (401, "invalid_api_key")
    assert setting.reader.read == 0


async def test_a_small_announced_body_needs_no_key(setting: Setting) -> None:
    setting.reader.go_on.set()
    answer = await setting.post(FREE_BYTES)
    assert (answer.status_code, answer.text) == (200, str(FREE_BYTES))


@pytest.mark.parametrize("chunked", [False, True])
async def test_bytes_in_work_are_bounded_per_key_and_in_total(setting: Setting, chunked: bool) -> None:
    """Room is for two of the largest bodies per key and four in total; small ones are not counted."""
    in_work = [asyncio.create_task(setting.post(LIMIT, key, chunked=chunked)) for key in "aabb"]
    await setting.waiting(4)
    assert setting.in_work.total == MOST
    of_key = await setting.post(FREE_BYTES + 1, "a", chunked=chunked)
    assert (code_of(of_key), of_key.headers["retry-after"]) == ((429, "too_many_bytes"), "1")
    with capture_logs() as logs:
        of_all = await setting.post(FREE_BYTES + 1, "c", chunked=chunked)
    assert (code_of(of_all), of_all.headers["retry-after"]) == ((503, "overloaded"), "1")
    assert [entry["event"] for entry in logs] == ["body refused"]
    in_work.append(asyncio.create_task(setting.post(FREE_BYTES, "a")))
    await setting.waiting(5)
    setting.reader.go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*in_work)} == {200}
    assert setting.in_work.total == 0
    assert (await setting.post(LIMIT, "a", chunked=chunked)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_bound_is_not_counted(setting: Setting, chunked: bool) -> None:
    assert code_of(await setting.post(LIMIT + 1, "a", chunked=chunked)) == (413, "payload_too_large")
    assert setting.in_work.total == 0


async def test_a_failed_request_releases_its_bytes() -> None:
    in_work = BodyBytes(most=MOST, most_per_key=PER_KEY)

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise RuntimeError("a bug")

    app = BodyAdmission(failing, limit=LIMIT, in_work=in_work, authenticate=by_header)
    for name, value in ((b"content-length", b"%d" % LIMIT), (b"transfer-encoding", b"chunked")):

        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * LIMIT, "more_body": False}

        async def send(message: Message) -> None:
            raise AssertionError(json.dumps(message))

        scope = {"type": "http", "path": "/", "headers": [(name, value), (b"x-api-key", b"a")]}
        with pytest.raises(RuntimeError, match="a bug"):
            await app(scope, receive, send)
    assert in_work.total == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=40), st.randoms(use_true_random=False)
)
def test_no_order_of_bodies_exceeds_the_bounds(asked: list[tuple[str, int]], random: Any) -> None:
    most, per_key = 100, 60
    in_work = BodyBytes(most=most, most_per_key=per_key)
    held: list[tuple[str, int]] = []
    for key, size in asked:
        of_key = sum(other for holder, other in held if holder == key)
        total = sum(other for _, other in held)
        if of_key + size > per_key:
            with pytest.raises(TooManyBytes):
                in_work.add(key, size)
        elif total + size > most:
            with pytest.raises(Overloaded):
                in_work.add(key, size)
        else:
            in_work.add(key, size)
            held.append((key, size))
        if held and random.random() < 0.4:
            in_work.remove(*held.pop(random.randrange(len(held))))
        assert in_work.total == sum(other for _, other in held) <= most
