"""The address for clients never comes from a foreign Host header."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from proxy.http.address import client_address, is_https
from proxy.http.services import provide
from proxy.settings import ServerSettings, Settings


def request(
    said: str | None, *, server: tuple[str, int | None] | None = ("10.0.0.7", 8080), scheme: str = "http", **more: Any
) -> Request:
    app = FastAPI()
    provide(app, Settings(server=ServerSettings(**more)))
    headers = [] if said is None else [(b"host", said.encode("utf-8", "surrogatepass"))]
    headers.append((b"x-forwarded-host", b"evil.example"))
    scope = {"type": "http", "app": app, "headers": headers, "server": server, "scheme": scheme, "path": "/"}
    return Request({**scope, "query_string": b""})


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7:8080", "http://10.0.0.7:8080"),
        ("10.0.0.7:9000", "http://10.0.0.7:9000"),
        ("localhost:9000", "http://localhost:9000"),
        ("127.0.0.2", "http://127.0.0.2"),
        ("[::1]:8080", "http://[::1]:8080"),
        (f"{socket.gethostname()}:8080", f"http://{socket.gethostname()}:8080"),
        ("box.example:8080", "http://box.example:8080"),
        ("evil.example", "http://10.0.0.7:8080"),
        ("localhost@evil.example", "http://10.0.0.7:8080"),
        ("localhost:99999", "http://10.0.0.7:8080"),
        ("localhost.evil.example", "http://10.0.0.7:8080"),
        ("", "http://10.0.0.7:8080"),
        (None, "http://10.0.0.7:8080"),
    ],
)
def test_only_host_names_of_this_machine_are_used(host: str | None, address: str) -> None:
    assert client_address(request(host, host="box.example")) == address


@given(st.text(max_size=60))
def test_no_host_header_leads_to_another_machine(host: str) -> None:
    name = host.partition(":")[0].strip("[]").lower()
    if name in {"localhost", "", socket.gethostname().lower()} or name.startswith("127."):
        return
    assert client_address(request(host)) == "http://10.0.0.7:8080"


def test_the_public_url_has_priority() -> None:
    public = request("localhost:8080", public_url="https://rl.example.org/base/")
    assert client_address(public) == "https://rl.example.org/base"
    assert is_https(public)
    assert not is_https(request("localhost:8080"))


def test_unix_sockets_and_default_ports() -> None:
    assert client_address(request("evil", server=("fe80::1", 8080))) == "http://[fe80::1]:8080"
    assert client_address(request("evil", server=("/run/base-rl.sock", None))) == "http://127.0.0.1:8080"
    assert client_address(request("evil", server=("10.0.0.7", 443), scheme="https")) == "https://10.0.0.7"
