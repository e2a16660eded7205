"""Ways to run one attempt: a program, or a Python function."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from proxy.cli.attempts.feedback import Feedback, NotFeedback, feedback_from, feedback_from_output
from proxy.cli.attempts.sessions import Session
from proxy.cli.attempts.task_file import Task
from proxy.cli.console import Refused
from proxy.cli.supervisor import die_with_parent

_ERROR_CHARACTERS = 500
_KEPT_BYTES = 2**20
_STOP_S = 5.0
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8


class AttemptFailed(Exception):
    """An attempt ended without a result, which says nothing about its quality. The message has the reason."""


class Runner(Protocol):
    """A way to run an attempt."""

    async def run(self, task: Task, session: Session) -> Feedback:
        """Attempt the task in the session. Raise AttemptFailed; a cancellation ends the attempt."""
        ...


class FunctionRunner:
    """Calls `attempt(task, session)`, and `reward(task, result)` with what it returned if there is one.

    Both may be coroutine functions; other functions run in a thread each, because they wait for the model.
    """

    def __init__(self, attempt: Callable[..., Any], reward: Callable[..., Any] | None = None) -> None:
        self._attempt = attempt
        self._reward = reward

    async def run(self, task: Task, session: Session) -> Feedback:
        returned = await _call("the attempt", self._attempt, dict(task.fields), session)
        if self._reward is not None:
            returned = await _call("the reward function", self._reward, dict(task.fields), returned)
        return _checked(feedback_from, returned)


class ProgramRunner:
    """Runs a program per attempt, which finds its session in the environment and its task on standard input.

    The last line that it prints is the reward, unless there is a function `reward(task, output)`.
    """

    def __init__(self, command: str, reward: Callable[..., Any] | None = None) -> None:
        """Raise Refused if the command cannot be split into words."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise Refused(f"the command {command!r} cannot be read: {error}") from error
        if not self._words:
            raise Refused("the command is empty: name a program that makes one attempt")
        self._reward = reward

    async def run(self, task: Task, session: Session) -> Feedback:
        text = json.dumps(task.fields, ensure_ascii=False)
        environment = {**os.environ, **environment_of(session), "BASE_RL_TASK": text}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,  # so that a time-out ends its children too
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise AttemptFailed(f"cannot run {self._words[0]}: {error.strerror}") from error
        try:
            output, complaints = await _talk(process, f"{text}\n".encode())
        finally:
            await _end_group(process)
        if process.returncode != 0:
            last = without_secrets(complaints.strip(), environment)[-_ERROR_CHARACTERS:]
            raise AttemptFailed(f"exit status {process.returncode}" + (f": {last}" if last else ""))
        if self._reward is None:
            return _checked(feedback_from_output, output)
        returned = await _call("the reward function", self._reward, dict(task.fields), output)
        return _checked(feedback_from, returned)


def environment_of(session: Session) -> dict[str, str]:
    """Return the variables by which agents find a session: those of the SDKs of OpenAI and Anthropic, and ours."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
        "BASE_RL_MODEL": session.model,
        "BASE_RL_SESSION": session.id,
    }


def without_secrets(text: str, environment: dict[str, str]) -> str:
    """Replace the values of variables that sound like secrets by the variables' names."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, f"[{name}]")
    return text


def load_function(named: str) -> Callable[..., Any]:
    """Import `FILE.py:NAME` or `module:NAME`. Raise Refused with what is wrong."""
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise Refused(f"{named!r} names no function: write FILE.py:NAME or module:NAME")
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise Refused(f"cannot import {place}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"{place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _module_from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # Modules beside the file are imported as they are when Python runs the file.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


async def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await _in_thread(function, *arguments)
    except Exception as error:
        described = f"{type(error).__name__}: {error}"
        raise AttemptFailed(f"{what} raised {without_secrets(described, dict(os.environ))}") from error


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own and return its result.

    The threads of asyncio's executor are few, and it waits for them at the end: a function that hangs would hold up
    the others, and then the end of the command.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(returned: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(returned) if error is None else result.set_exception(error)

    def call() -> None:
        returned, raised = None, None
        try:
            returned = function(*arguments)
        except StopIteration as error:  # which no future can hold
            raised = RuntimeError(f"StopIteration: {error}")
        except Exception as error:  # noqa: BLE001  the caller raises it
            raised = error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, returned, raised)

    threading.Thread(target=call, daemon=True, name="attempt").start()
    return await result


async def _talk(process: asyncio.subprocess.Process, given: bytes) -> tuple[str, str]:
    """Write a program's standard input, and return the end of its output and of its complaints once it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(given)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read its input
        await process.stdin.drain()
    process.stdin.close()
    output, complaints, _ = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr), process.wait())
    return output, complaints


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Return the last characters of a stream: a program may print without end."""
    kept = b""
    while chunk := await stream.read(65536):
        kept = (kept + chunk)[-_KEPT_BYTES:]
    return kept.decode(errors="replace")


def _checked(read: Callable[[Any], Feedback], returned: Any) -> Feedback:
    try:
        return read(returned)
    except NotFeedback as error:
        raise AttemptFailed(str(error)) from error


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the program and all that it started: politely first, by force after some seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
