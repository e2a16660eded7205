"""The trainer's end of an offer: an HTTP server that opens a process group for each engine that is to receive."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from proxy.contract.addresses import address_towards
from proxy.contract.claim import MEDIA_TYPE, decode, encode
from proxy.contract.exchange import JOIN_PATH, Join, Place
from trainer.errors import ConfigurationError

# A request is a token and a number.
_MOST_BYTES = 4096
# Silence after which a connection is closed, so that a client that hangs keeps no thread.
_SILENCE_SECONDS = 10.0

Open = Callable[[int], Place]
"""Opens a group with an engine of so many processes, and returns where they join it."""


class Listener:
    """Listens at `host` until `close`. After `offer` whoever has the token is let in, after `withdraw` nobody."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0 takes a free one. Raises ConfigurationError if the address is not this machine's or is taken."""
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"trainer.weights: cannot listen at {host}:{port}: {error.strerror or error}. Set `host` to a name or"
                " an address of this machine under which the proxy and the engines reach it, and `port` to a free one"
            ) from error
        self._server.answer = self._answer
        self._host = host
        self._open: tuple[str, Open] | None = None
        # `withdraw` returns only when no request is using what was offered.
        self._lock = threading.Lock()
        threading.Thread(target=self._server.serve_forever, name="weights-listener", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._server.server_address[1]}"

    def offer(self, token: str, open_group: Open) -> None:
        with self._lock:
            self._open = (token, open_group)

    def withdraw(self) -> None:
        with self._lock:
            self._open = None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, body: bytes) -> tuple[HTTPStatus, bytes]:
        """Return the answer to a `Join`."""
        try:
            join = decode(body, Join)
        except msgspec.DecodeError as error:
            return HTTPStatus.BAD_REQUEST, f"not a request for weights: {error}".encode()
        with self._lock:
            if self._open is None or not hmac.compare_digest(join.token, self._open[0]):
                return HTTPStatus.GONE, b"this version is not sent any more: it is on the disk, or was withdrawn"
            try:
                return HTTPStatus.OK, encode(self._open[1](join.ranks))
            except (OSError, RuntimeError) as error:
                return HTTPStatus.INTERNAL_SERVER_ERROR, f"the trainer opens no group: {error}".encode()


def own_address(url: str) -> str:
    """Return the IPv4 address of this machine from which a URL is reached. Raises ConfigurationError if there is
    none."""
    try:
        return address_towards(url, socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(
            f"trainer.weights.host: this machine has no address from which {url} is reached: {error}. Name one"
        ) from error


class _Server(ThreadingHTTPServer):
    answer: Callable[[bytes], tuple[HTTPStatus, bytes]]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_SECONDS

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if self.path != JOIN_PATH or not length.isdecimal() or int(length) > _MOST_BYTES:
            self._send(HTTPStatus.NOT_FOUND, b"nothing is here but weights for engines")
            return
        self._send(*self.server.answer(self.rfile.read(int(length))))

    def _send(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", MEDIA_TYPE if status is HTTPStatus.OK else "text/plain")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write nothing: the sender logs what becomes of a request."""
