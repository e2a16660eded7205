"""Whatever a client sends, the answer is one of ours: never a 500, and every error in the envelope.

`make test-fuzz` tries more examples (`FUZZ_EXAMPLES`).
"""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pydantic import SecretStr

from proxy.app import create_app
from proxy.settings import BootstrapSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model

pytestmark = [pytest.mark.xdist_group("fuzz"), pytest.mark.timeout(1800)]

ADMIN, RUN, TRAINER = "rl-admin-chosen", "rl-run-chosen", "rl-trainer-chosen"
BODY_MIB = 32
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "4"))
TRAINERS_PATHS = ("/claims", "/versions", "/head")
POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/sessions",
    "/v1/feedback",
)
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The proxy on a real socket, in a thread of its own, with an engine that answers one word."""
    model = write_model(directory / "model")
    engine = FakeEngine(lambda _request: [5, 6, 2], model_path=str(model), label="default")
    app = create_app(
        Settings(
            server=ServerSettings(data_dir=directory / "data", max_body_mib=BODY_MIB),
            bootstrap=BootstrapSettings(
                admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
            ),
            run=RunSettings(name="policy", model=str(model)),
        ),
        engine=engine,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        _until_ready(url)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()


def _until_ready(url: str) -> None:
    for _ in range(300):
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("not ready")


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, served(tmp_path_factory.mktemp("fuzzed")) as url:
        # Requests for new runs name models at random: no such name may be looked up on the network.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield url


@pytest.fixture(scope="session")
def document(proxy: str) -> Any:
    """The project's own OpenAPI document without the event stream, which does not end."""
    return schemathesis.openapi.from_url(f"{proxy}/openapi.json").exclude(path_regex="/events$")


def test_valid_and_invalid_requests_of_every_operation(document: Any) -> None:
    """Requests for every operation of the document, both valid and invalid."""
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > len(POSTS)
    for operation in operations:
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @BOUNDED
            def holds(case: Any) -> None:
                answer = case.call(headers={"authorization": f"Bearer {key_for(case.path)}"}, timeout=60)
                check(answer.status_code, answer.headers, answer.content)

            try:
                holds()
            except Unsatisfiable:  # an operation without parameters has no invalid requests
                continue


def key_for(path: str) -> str:
    if any(part in path for part in TRAINERS_PATHS):
        return TRAINER
    return ADMIN if path.startswith("/api") else RUN


def check(status: int, headers: Any, content: bytes) -> None:
    assert status < 500 or status in (502, 503, 504), content[:2000]
    assert headers["x-request-id"]
    if status >= 400:
        error = json.loads(content)["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        assert error["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "input",
        "tools",
        "n",
        "stop",
        "stream",
        "max_tokens",
        "system",
        "reward",
        "metadata",
    ]
)
BODIES = (
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELDS, json_values, max_size=5).map(
        lambda value: json.dumps({"model": "policy", "max_tokens": 5, **value}).encode()
    )
)
TYPES = st.sampled_from(
    ["application/json", "text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)


@pytest.mark.parametrize("path", POSTS)
@given(body=BODIES, kind=TYPES)
@BOUNDED
def test_any_body(proxy: str, path: str, body: bytes, kind: str) -> None:
    answer = post(proxy, path, body, kind)
    check(answer.status_code, answer.headers, answer.content)


def post(proxy: str, path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    headers = {"authorization": f"Bearer {RUN}", "content-type": kind}
    return httpx.post(f"{proxy}{path}", content=body, headers=headers, timeout=120)


def said(**fields: Any) -> bytes:
    return json.dumps({"model": "policy", "max_tokens": 5, **fields}).encode()


def deep(depth: int) -> bytes:
    return b'{"model": "policy", "messages": ' + b"[" * depth + b"]" * depth + b"}"


USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HOSTILE = {
    "nested": deep(100_000),
    "nested a little": deep(900),
    "many answers": said(messages=[USER], n=10**9),
    "many tools": said(messages=[USER], tools=[TOOL] * 10_000),
    "a lone surrogate": b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "a huge number": b'{"model": "policy", "temperature": 1e400, "messages": [{"role": "user", "content": "x"}]}',
    "a number of a million digits": b'{"model": "policy", "seed": ' + b"9" * 10**6 + b"}",
    "another encoding": said(messages=[USER]).decode().encode("utf-16"),
    "no body": b"",
    "a null": b"null",
    "a name of a megabyte": said(messages=[USER], model="m" * 10**6),
    "many stop strings": said(messages=[USER], stop=["s"] * 10**5),
    "roles that are none": said(messages=[{"role": ["user"], "content": {}}]),
}


OTHERS_FIELDS = ("many answers", "many tools", "many stop strings", "a number of a million digits", "a huge number")
"""Fields that not every endpoint has: unknown ones are ignored."""


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", HOSTILE)
def test_malicious_bodies_are_refused(proxy: str, path: str, name: str) -> None:
    answer = post(proxy, path, HOSTILE[name])
    if path == "/v1/sessions" and name in ("no body", "a null"):
        assert answer.status_code == 201  # a session needs no texts
    elif path == "/v1/chat/completions" or name not in OTHERS_FIELDS:
        assert 400 <= answer.status_code < 500, answer.text[:500]
    check(answer.status_code, answer.headers, answer.content)


@pytest.mark.parametrize("path", POSTS)
def test_nul_bytes_are_text_or_refused(proxy: str, path: str) -> None:
    answer = post(proxy, path, said(messages=[{"role": "user", "content": "a\0b"}], prompt="a\0b", input="a\0b"))
    check(answer.status_code, answer.headers, answer.content)


@pytest.mark.parametrize("path", POSTS)
def test_a_body_beyond_the_bound_is_413(proxy: str, path: str) -> None:
    answer = post(proxy, path, said(messages=[{"role": "user", "content": "x" * (BODY_MIB << 20)}]))
    assert answer.status_code == 413
    check(answer.status_code, answer.headers, answer.content)


def test_memory_is_returned_after_large_bodies(proxy: str) -> None:
    large = said(messages=[{"role": "user", "content": "word " * (5 << 20)}])
    process = psutil.Process()
    post(proxy, "/v1/chat/completions", large)
    gc.collect()
    before = process.memory_info().rss
    for _ in range(5):
        answer = post(proxy, "/v1/chat/completions", large)
        assert answer.status_code == 400  # it does not fit the context
        check(answer.status_code, answer.headers, answer.content)
    gc.collect()
    assert process.memory_info().rss - before < 128 << 20
