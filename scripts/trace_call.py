"""Trace one chat completion through the proxy: its trunk in order, all files it passes, and the calls it makes.

    make trace-call                      # or: python -m scripts.trace_call --json
    python -m scripts.trace_call --functions 40      # and the functions that are called most, each with its callers

A proxy in this process answers from the scripted engine, which is a process of its own, over a real connection. Some
conversations come first, so that caches are warm; then two completions of one conversation are traced, from the ASGI
edge to the response: the first, and the second, which goes on from it. Of several traced completions the one with the
fewest calls is shown: what else runs on the event loop meanwhile, such as health checks, only adds to it.

**Calls** are those on the event loop's thread, as `sys.setprofile` reports them: Python functions (each resumption of
a coroutine counts) and built-in functions, libraries included. Not counted are the server before the ASGI edge, the
thread that writes to SQLite, and the event loop's own rounds (`asyncio/base_events.py`, `asyncio/events.py` and
`selectors.py`), whose number depends on when the engine's bytes arrive; they are shown apart.

**The trunk** is the way that the call itself takes: the files in which a coroutine awaits a coroutine of another file
of the project, in the order in which they begin. These are the files to open to follow a call from the edge to the
commit. A file that is awaited but hands the call on to no other file is a leaf (a look-up, a cache, a lock); a file
that is only called is a helper, a contract type or a pure function. Leaves and helpers are listed after the trunk.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import SecretStr

from proxy.app import Application, create_app
from proxy.cli.addresses import random_free_port
from proxy.engines.launch import HOST
from proxy.engines.scripted.script import MODEL
from proxy.settings import BootstrapSettings, EngineSettings, RunSettings, ServerSettings, Settings

_ROOT = Path(__file__).resolve().parent.parent
_KEY = "rl-run-traced"
_WARM_CONVERSATIONS = 3
_CONVERSATIONS = 50
_READY_SECONDS = 60.0
_LOOP_FILES = ("asyncio/base_events.py", "asyncio/events.py", "selectors.py")
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass
class Trace:
    """One traced completion. `trunk`, `leaves` and `helpers` are paths in the repository, in order of appearance."""

    python_calls: int = 0
    builtin_calls: int = 0
    loop_calls: int = 0
    functions: set[tuple[str, str]] = field(default_factory=set)
    by_caller: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls by name of the called function and place of the caller."""
    awaited: dict[str, None] = field(default_factory=dict)
    handing_on: dict[str, None] = field(default_factory=dict)
    passed: dict[str, None] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return self.python_calls + self.builtin_calls

    @property
    def trunk(self) -> list[str]:
        return [path for path in self.awaited if path in self.handing_on]

    @property
    def leaves(self) -> list[str]:
        return [path for path in self.awaited if path not in self.handing_on]

    @property
    def helpers(self) -> list[str]:
        return [path for path in self.passed if path not in self.awaited]

    def observe(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one event; `sys.setprofile` calls this."""
        if event not in ("call", "c_call"):
            return
        if frame.f_code.co_filename.endswith(_LOOP_FILES):
            self.loop_calls += 1
        elif event == "c_call":
            self.builtin_calls += 1
            self.by_caller[_builtin_name(argument), _place(frame)] += 1
        else:
            self.python_calls += 1
            self.by_caller[_place(frame), _place(frame.f_back)] += 1
            path = _own(frame)
            if path is not None:
                self.passed.setdefault(path)
                self.functions.add((path, frame.f_code.co_qualname))
                if frame.f_code.co_flags & _COROUTINE:
                    self.awaited.setdefault(path)
                    awaiting = frame.f_back
                    before = None if awaiting is None else _own(awaiting)
                    if before not in (None, path) and awaiting is not None and awaiting.f_code.co_flags & _COROUTINE:
                        self.handing_on.setdefault(str(before))


def _own(frame: FrameType) -> str | None:
    """Return the path of the frame's file in the repository; None for a file of others."""
    file = frame.f_code.co_filename
    return os.path.relpath(file, _ROOT) if file.startswith(f"{_ROOT}/proxy/") else None


def _place(frame: FrameType | None) -> str:
    """Return the function that a frame runs, with the end of its file's path."""
    if frame is None:
        return "(no caller)"
    return f"{'/'.join(frame.f_code.co_filename.rsplit('/', 2)[1:])}:{frame.f_code.co_qualname}"


def _builtin_name(function: object) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return f"built-in {getattr(function, '__module__', None) or ''}.{name}"


async def traced_completions() -> tuple[Trace, Trace]:
    """Return the traces of a conversation's first and second completion, on a proxy that is started for them."""
    with tempfile.TemporaryDirectory() as directory, _scripted_engine() as url:
        settings = Settings(
            server=ServerSettings(data_dir=Path(directory)),
            bootstrap=BootstrapSettings(run_key=SecretStr(_KEY)),
            engine=EngineSettings(url=url),
            run=RunSettings(name="policy", model=str(MODEL)),
        )
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            await _until_ready(app)
            traces = [await _conversation(app, number) for number in range(_CONVERSATIONS)]
    first, second = zip(*traces[_WARM_CONVERSATIONS:], strict=True)
    return min(first, key=lambda trace: trace.calls), min(second, key=lambda trace: trace.calls)


async def _conversation(app: Application, number: int) -> tuple[Trace, Trace]:
    """Ask twice in one conversation and return the traces of both completions."""
    messages: list[dict[str, Any]] = []
    first, second = Trace(), Trace()
    for trace, question in ((first, f"What is {number} plus {number}?"), (second, "Are you sure?")):
        messages.append({"role": "user", "content": question})
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 16}).encode()
        status, answer = await _request(app, "POST", "/v1/chat/completions", body, trace)
        if status != 200:
            raise RuntimeError(f"the proxy answered {status}: {answer!r}")
        messages.append(json.loads(answer)["choices"][0]["message"])
    return first, second


async def _request(app: Application, method: str, path: str, body: bytes, trace: Trace | None) -> tuple[int, bytes]:
    """Make one request to the ASGI application, traced if there is a `trace`, and return status and body."""
    sent: list[Any] = []
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    gone = asyncio.Event()

    async def receive() -> Any:
        for message in messages:
            return message
        return await gone.wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {_KEY}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("proxy.test", 80),
        "state": {},
    }
    if trace is not None:
        sys.setprofile(trace.observe)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
    whole = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], whole


async def _until_ready(app: Application) -> None:
    async with asyncio.timeout(_READY_SECONDS):
        # Polled, because the engine is another process.
        while (await _request(app, "GET", "/readyz", b"", None))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextmanager
def _scripted_engine() -> Iterator[str]:
    """Run the scripted engine and yield its address. It may still be starting: the proxy waits until it answers."""
    port = random_free_port(HOST)
    command = [sys.executable, "-m", "proxy.engines.scripted", "--port", str(port)]
    process = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def report(first: Trace, second: Trace) -> dict[str, Any]:
    """Return the traces as `--json` prints them."""
    return {
        "trunk": second.trunk,
        "leaves": second.leaves,
        "helpers": second.helpers,
        "functions": len(second.functions),
        "calls": [
            {"python": trace.python_calls, "builtin": trace.builtin_calls, "loop": trace.loop_calls}
            for trace in (first, second)
        ],
    }


def _lines(first: Trace, second: Trace) -> Iterator[str]:
    """Yield the lines of the report for people."""
    for title, paths in (("trunk", second.trunk), ("leaves", second.leaves), ("helpers", second.helpers)):
        yield f"{title}: {len(paths)} files"
        yield from (f"  {number:2} {path}" for number, path in enumerate(paths, 1))
    yield f"all files passed: {len(second.passed)}, functions of the project: {len(second.functions)}"
    for name, trace in (("first", first), ("second", second)):
        parts = f"{trace.python_calls} Python, {trace.builtin_calls} built-in"
        yield f"calls of the {name} completion: {trace.calls} ({parts}); {trace.loop_calls} more of the event loop"


def _most_called(trace: Trace, number: int) -> Iterator[str]:
    """Yield lines for the functions that are called most, each with the number of calls by each caller."""
    totals: Counter[str] = Counter()
    for (called, _), count in trace.by_caller.items():
        totals[called] += count
    for called, total in totals.most_common(number):
        yield f"{total:5} {called}"
        callers = Counter({caller: count for (name, caller), count in trace.by_caller.items() if name == called})
        yield from (f"        {count:4} from {caller}" for caller, count in callers.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.trace_call", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        metavar="N",
        help="list the N functions that the first completion calls most often",
    )
    options = parser.parse_args(arguments)
    first, second = asyncio.run(traced_completions())
    if options.json:
        sys.stdout.write(json.dumps(report(first, second)) + "\n")
        return 0
    sys.stdout.write("\n".join([*_lines(first, second), *_most_called(first, options.functions)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
