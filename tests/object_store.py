"""A real S3 server (moto's) on a port of this machine that can fail, lie, and be stopped and started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

BUCKET = "weights"
URL = f"s3://{BUCKET}/site"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

Fault = Callable[[str, str, str], "tuple[str, bytes] | None"]
"""The answer to a request by method, path and range, in place of the server's; None: the server's."""


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class ObjectServer:
    """`requests` has the method, path and range of every request; `fault` may answer them in place of the server, and
    `lose` after the server has done what was asked."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._port = 0
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Fault | None = None
        self.lose: Fault | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=_Quiet)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        asked = (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", ""))
        self.requests.append(asked)
        answer = self.fault(*asked) if self.fault is not None else None
        if answer is None:
            lost = self.lose(*asked) if self.lose is not None else None
            if lost is None:
                found: Iterable[bytes] = self._app(environ, start)
                return found
            for _ in self._app(environ, lambda *_: None):
                pass
            return _answered(lost, start)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"].read(length)
        return _answered(answer, start)

    def parts(self) -> int:
        """Return the number of requests that wrote an object or a part."""
        return sum(method == "PUT" for method, *_ in self.requests)


def _answered(answer: tuple[str, bytes], start: Any) -> Iterable[bytes]:
    start(answer[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(answer[1])))])
    return [answer[1]]


@contextmanager
def object_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Provide a server with the bucket of `URL`, which the AWS environment names."""
    import boto3  # type: ignore[import-untyped]

    server = ObjectServer()
    server.start()
    # The server's data belong to the process, so those of an earlier test are still there.
    httpx.post(f"{server.endpoint}/moto-api/reset").raise_for_status()
    for key, value in {
        "AWS_ENDPOINT_URL_S3": server.endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(key, value)
    try:
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        server.requests.clear()
        yield server
    finally:
        server.stop()
