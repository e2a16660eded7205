"""The client against targets that behave badly."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.outbound.client import Client, Resolve
from proxy.outbound.failures import TargetFailed, TargetRefused
from proxy.settings import OutboundSettings
from tests.proxy.outbound.targets import LOOPBACK, OK, target

HOST = "hooks.example.org"


@asynccontextmanager
async def opened(
    *allow: str, resolve: Resolve | None = None, seconds: float = 10.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Client]:
    client = Client(OutboundSettings(allow=allow, timeout_seconds=seconds), resolve=resolve, tls=tls)
    try:
        yield client
    finally:
        await client.aclose()


def at(*addresses: str) -> Resolve:
    return lambda _host, _port: list(addresses)


async def test_a_request_arrives_with_the_name_of_its_host_and_its_body() -> None:
    async with target() as served, opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
        answer = await client.post(f"http://{HOST}:{served.port}/a?b=c", b'{"x":1}', event_id="msg_1")
    assert (answer.status, answer.body, answer.problem) == (200, b"ok", None)
    (request,) = served.requests
    assert request.line == "POST /a?b=c HTTP/1.1"
    assert request.headers["host"] == f"{HOST}:{served.port}"
    assert request.headers["webhook-id"] == "msg_1"
    assert request.body == b'{"x":1}'


async def test_a_name_with_a_private_address_is_refused_and_nothing_is_sent() -> None:
    async with target() as served:
        for addresses in (["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:127.0.0.1"]):
            async with opened(resolve=at(*addresses)) as client:
                with pytest.raises(TargetRefused, match="private"):
                    await client.post(f"https://{HOST}:{served.port}/", b"{}", event_id="msg_1")
    assert served.requests == []


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to() -> None:
    looked_up = []

    def rebinding(host: str, _port: int) -> list[str]:
        # The first answer is permitted; a second look-up would lead elsewhere.
        looked_up.append(host)
        return ["127.0.0.1"] if len(looked_up) == 1 else ["127.0.0.99"]

    async with target() as served, opened("127.0.0.1", resolve=rebinding) as client:
        assert (await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="msg_1")).status == 200
        with pytest.raises(TargetRefused):
            await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="msg_2")
    assert looked_up == [HOST, HOST]
    assert len(served.requests) == 1


async def test_no_redirect_is_followed_and_no_cookie_is_kept() -> None:
    async with target() as secret:
        redirect = (
            f"HTTP/1.1 307 See\r\nlocation: http://127.0.0.1:{secret.port}/\r\nset-cookie: a=b\r\n"
            "content-length: 0\r\n\r\n"
        )
        async with target(redirect.encode()) as served, opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
            for _ in range(2):
                answer = await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="msg_1")
    assert answer.problem is not None
    assert "redirects are not followed" in answer.problem
    assert secret.requests == []
    assert "cookie" not in served.requests[1].headers


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with target() as between, target() as served:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{between.port}")
        async with opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
            await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="msg_1")
    assert between.requests == []
    assert len(served.requests) == 1


async def test_a_long_answer_is_cut() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with target(endless) as served, opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
        answer = await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="m", answer_bytes=1000)
    assert answer.is_cut
    assert answer.body == b"x" * 1000


@pytest.mark.parametrize(
    "beginning", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\n"]
)
async def test_an_answer_that_comes_byte_by_byte_ends_in_time(beginning: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    began = time.monotonic()
    async with target(drip) as served, opened(LOOPBACK, resolve=at("127.0.0.1"), seconds=0.3) as client:
        with pytest.raises(TargetFailed, match=r"0\.3 seconds"):
            await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="m")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000, b"HTTP/1.1 999999 X\r\n\r\n"]
)
async def test_an_answer_that_is_no_http_is_a_failure(answer: bytes) -> None:
    async with target(answer) as served, opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
        with pytest.raises(TargetFailed):
            await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="m")


async def test_a_name_without_address_and_a_closed_port_are_failures_that_say_so() -> None:
    def unknown(_host: str, _port: int) -> list[str]:
        raise OSError("no such name")

    async with opened(resolve=unknown) as client:
        with pytest.raises(TargetFailed, match="cannot be resolved"):
            await client.post(f"https://{HOST}/", b"{}", event_id="m")
    async with target() as served:
        pass
    async with opened(LOOPBACK, resolve=at("127.0.0.1")) as client:
        with pytest.raises(TargetFailed, match=HOST):
            await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="m")


async def test_a_name_server_that_hangs_costs_the_time_of_the_request() -> None:
    async with opened(resolve=lambda _host, _port: time.sleep(1) or [], seconds=0.1) as client:  # type: ignore[func-returns-value]
        with pytest.raises(TargetFailed, match=r"0\.1 seconds"):
            await client.post(f"https://{HOST}/", b"{}", event_id="m")


async def test_the_next_address_is_tried_if_one_cannot_be_connected_to() -> None:
    async with target(OK) as served, opened(LOOPBACK, resolve=at("127.9.9.9", "127.0.0.1")) as client:
        assert (await client.post(f"http://{HOST}:{served.port}/", b"{}", event_id="m")).status == 200


async def test_the_system_resolver_is_asked_and_its_answer_checked() -> None:
    async with target() as served:
        async with opened("localhost") as client:
            assert (await client.post(f"http://localhost:{served.port}/", b"{}", event_id="m")).status == 200
        async with opened() as client:
            with pytest.raises(TargetRefused):
                await client.post(f"https://localhost:{served.port}/", b"{}", event_id="m")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a file with a key and a certificate for `HOST`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl is missing")
    file = tmp_path / "both.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"),
            *("-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{HOST}"),
        ],
        check=True,
        capture_output=True,
    )
    file.write_bytes((tmp_path / "key.pem").read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return file


async def test_the_certificate_is_that_of_the_name_and_not_of_the_address(certificate: Path) -> None:
    asked: list[str | None] = []
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    server.sni_callback = lambda _socket, name, _context: asked.append(name)
    trusting = ssl.create_default_context(cafile=certificate)
    async with (
        target(tls=server) as served,
        opened(LOOPBACK, resolve=at("127.0.0.1"), tls=trusting) as client,
    ):
        assert (await client.post(f"https://{HOST}:{served.port}/", b"{}", event_id="m")).status == 200
        with pytest.raises(TargetFailed, match="certificate"):
            await client.post(f"https://other.example.org:{served.port}/", b"{}", event_id="m")
        with pytest.raises(TargetFailed, match="certificate"):
            await client.post(f"https://127.0.0.1:{served.port}/", b"{}", event_id="m")
    assert asked[:2] == [HOST, "other.example.org"]
    assert served.requests[0].headers["host"] == f"{HOST}:{served.port}"
    async with (
        target(tls=server) as served,
        opened(LOOPBACK, resolve=at("127.0.0.1")) as client,
    ):
        with pytest.raises(TargetFailed, match="certificate"):  # of an authority that nobody trusts
            await client.post(f"https://{HOST}:{served.port}/", b"{}", event_id="m")
