"""The trainer's client of the proxy: head, claim, heartbeat, release, commit, and batches of earlier steps.

What waits for what: a request that gets no answer, or a 5xx, is sent again with growing pauses until the proxy
answers or `patience` ends. Repeating is safe for every request: a repeated commit gets the same answer, and a claim
whose answer was lost is a lease that expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec
import structlog

from proxy.contract import claim as wire
from proxy.contract.claim import (
    AbandonedProcess,
    ClaimedBatch,
    ClaimRequest,
    CommitReply,
    CommitRequest,
    LeaseReply,
    ReleasedClaims,
)
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head, PruneReply, PruneRequest, WeightsReference
from proxy.contract.replay import StepBatch
from proxy.contract.states import RunState
from trainer.errors import ClaimLost, HeadMoved, ProxyRefused, ProxySilent, RunArchived, TrainerError

# Seconds. Pauses double from the first to the longest, so that a proxy that restarts is not flooded.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
_ANSWER_TIMEOUT = 30.0
# The proxy assembles all trajectories of a step, or of an export, before the first byte.
_BATCH_TIMEOUT = 300.0
# At the end of the process; leases expire by themselves.
_FAREWELL_TIMEOUT = 2.0

_Message = TypeVar("_Message")
_log = structlog.get_logger("trainer.proxy")


class ProxyClient:
    """One run's trainer API at a proxy. Safe to use from several threads.

    `pause` waits between attempts; `transport` replaces the network in tests. Retries end with ProxySilent after
    `patience` seconds; None: never.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        run: str,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.patience: float | None = None
        self._closed = False
        self._run = run
        self.pause = pause
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1/runs/{run}",
            headers={
                "authorization": f"Bearer {api_key}",
                "content-type": wire.MEDIA_TYPE,
                "accept": wire.MEDIA_TYPE,
            },
            timeout=httpx.Timeout(_ANSWER_TIMEOUT, connect=5.0),
            transport=transport,
        )

    def head(self) -> Head:
        """Return the version to train from. Raises ProxyRefused."""
        return self._patiently("GET", "/head", None, Head)

    def claim(self, request: ClaimRequest) -> ClaimedBatch:
        """Claim trajectories, waiting at the proxy for up to `wait_s`; an empty batch if there were too few. Raises
        ProxyRefused."""
        return self._patiently("POST", "/claims", request, ClaimedBatch, request.wait_s + _ANSWER_TIMEOUT)

    def commit(self, request: CommitRequest) -> CommitReply:
        """Make the version. Raises HeadMoved or ClaimLost if the proxy refuses it (409), else ProxyRefused.

        A refusal counts only if the head does not have these weights: an earlier attempt, whose answer was lost, may
        have made the version.
        """
        try:
            return self._patiently("POST", "/versions", request, CommitReply)
        except ClaimLost as error:
            head = self.head()
            if head.weights == request.weights:
                return CommitReply(version=head.version, repeated=True)
            if head.version != request.parent_version:
                raise HeadMoved(f"the head is version {head.version}, not {request.parent_version}") from error
            raise

    def saved(self, version: int, weights: WeightsReference) -> CommitReply:
        """Report that the directory of a version that was committed from memory is on the disk. Raises ClaimLost if
        the version was taken back or a claim has lost its lease, ProxyRefused."""
        return self._patiently("POST", f"/versions/{version}/saved", weights, CommitReply)

    def take_back(self) -> Head:
        """Take the head back if it is not on the disk, and return the head. Raises ProxyRefused."""
        return self._patiently("POST", "/versions/take-back", None, Head)

    def step_batch(self, version: int) -> StepBatch:
        """Return the record of the step that made a version. One attempt, because a person waits for the result.
        Raises ProxySilent or ProxyRefused."""
        return self._once("GET", f"/steps/{version}/batch", None, StepBatch, _BATCH_TIMEOUT)

    def lines(self, path: str, query: Sequence[tuple[str, str]]) -> Iterator[bytes]:
        """Yield the lines of a streamed answer, without line ends, in one attempt. Raises ProxySilent or
        ProxyRefused."""
        rest, request = b"", f"GET {path}"
        try:
            with self._http.stream(
                "GET", path, params=list(query), headers={"accept": "*/*"}, timeout=httpx.Timeout(_BATCH_TIMEOUT)
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _refusal(answer, request, self._run)
                for chunk in answer.iter_bytes():
                    *whole, rest = (rest + chunk).split(b"\n")
                    yield from whole
        except httpx.TransportError as error:
            raise ProxySilent(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if rest:
            raise ProxySilent(f"{request}: the answer ends in the middle of a line")

    def prune(self, request: PruneRequest) -> PruneReply:
        """Mark old versions as removed, and return which of the present weights may be deleted. One attempt, because
        the next version tries again. Raises ProxySilent or ProxyRefused."""
        return self._once("POST", "/versions/prune", request, PruneReply, _ANSWER_TIMEOUT)

    def release_abandoned(self, process: str) -> ReleasedClaims:
        """Give back the claims of a dead trainer's process. Raises ProxyRefused."""
        return self._patiently("POST", "/claims/abandoned", AbandonedProcess(process=process), ReleasedClaims)

    def heartbeat(self, claim_id: ClaimId) -> LeaseReply:
        """Renew a lease, in one attempt. Raises ClaimLost, ProxySilent or ProxyRefused."""
        return self._once("POST", f"/claims/{claim_id}/heartbeat", None, LeaseReply, _ANSWER_TIMEOUT)

    def release(self, claim_id: ClaimId) -> bool:
        """Give a claim back, in one short attempt, and return whether that worked. If not, its lease expires."""
        try:
            self._send("POST", f"/claims/{claim_id}/release", None, _FAREWELL_TIMEOUT)
        except (ClaimLost, ProxySilent, ProxyRefused) as error:
            _log.warning("claim not released, its lease will expire", claim=claim_id, reason=str(error))
            return False
        return True

    def release_own(self, process: str, known: Sequence[ClaimId]) -> tuple[ClaimId, ...]:
        """Give back all claims of this process, `known` or not, in one short attempt, and return them. If it fails,
        their leases expire."""
        message = AbandonedProcess(process=process)
        try:
            return self._once("POST", "/claims/abandoned", message, ReleasedClaims, _FAREWELL_TIMEOUT).claim_ids
        except (ProxySilent, ProxyRefused) as error:
            if known:
                _log.warning("claims not released, their leases will expire", claims=known, reason=str(error))
            return ()

    def pause_run(self, reason: str) -> None:
        """Pause the run, so that no trajectories are handed out until somebody resumes it. Raises ProxyRefused."""
        self._until_answered("POST", f"/pause?{urlencode({'reason': reason})}", None, _ANSWER_TIMEOUT)

    def close(self) -> None:
        """Close the client; pending requests end with ProxySilent."""
        self._closed = True
        self._http.close()

    def _patiently(
        self, method: str, path: str, message: Any, kind: type[_Message], answer_timeout: float = _ANSWER_TIMEOUT
    ) -> _Message:
        return _decoded(self._until_answered(method, path, message, answer_timeout), kind, f"{method} {path}")

    def _until_answered(self, method: str, path: str, message: Any, answer_timeout: float) -> bytes:
        pause, began = _FIRST_PAUSE, time.monotonic()
        while True:
            try:
                return self._send(method, path, message, answer_timeout)
            except RunArchived as error:
                # A trainer of one run waits, as it does while the run is paused: if it ended, its supervisor would
                # restart it again and again. A trainer of several runs has a patience, and lets this one go.
                if self._closed or self.patience is not None:
                    raise
                _log.warning("the run is archived, waiting", request=f"{method} {path}", reason=str(error))
            except ProxySilent as error:
                if self._closed or (self.patience is not None and time.monotonic() - began >= self.patience):
                    raise
                _log.warning("the proxy does not answer, trying again", request=f"{method} {path}", reason=str(error))
            self.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self, method: str, path: str, message: Any, kind: type[_Message], timeout: float) -> _Message:
        return _decoded(self._send(method, path, message, timeout), kind, f"{method} {path}")

    def _send(self, method: str, path: str, message: Any, timeout: float) -> bytes:
        content = None if message is None else wire.encode(message)
        try:
            answer = self._http.request(method, path, content=content, timeout=httpx.Timeout(timeout, connect=5.0))
        except (httpx.TransportError, RuntimeError) as error:
            # httpx reports a request of a closed client as a RuntimeError.
            if isinstance(error, RuntimeError) and not self._closed:
                raise
            raise ProxySilent(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer.content
        raise _refusal(answer, f"{method} {path}", self._run)


class RunLister:
    """Lists the runs of a proxy, for an admin key or a trainer key. Safe to close from another thread."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pause = pause
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1",
            headers={"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(_ANSWER_TIMEOUT, connect=5.0),
            transport=transport,
        )

    def active(self) -> tuple[str, ...]:
        """Return the names of the active runs, oldest first, in one attempt. Raises ProxySilent or ProxyRefused."""
        try:
            answer = self._http.get("/runs")
        # The client may be closed between two requests, which httpx reports as a RuntimeError.
        except (httpx.TransportError, RuntimeError) as error:
            raise ProxySilent(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if not answer.is_success:
            raise _refusal(answer, "GET /runs", None)
        try:
            found = msgspec.json.decode(answer.content, type=_RunList)
        except ValueError as error:
            raise ProxyRefused(f"GET /runs: the answer is not a list of runs: {error}") from error
        return tuple(run.name for run in found.runs if run.state == RunState.ACTIVE)

    def close(self) -> None:
        self._http.close()


class _ListedRun(msgspec.Struct, frozen=True):
    name: str
    state: str


class _RunList(msgspec.Struct, frozen=True):
    runs: tuple[_ListedRun, ...]


def _refusal(answer: httpx.Response, request: str, run: str | None) -> TrainerError:
    said = f"{request} answered {answer.status_code}: {_message_of(answer)}"
    if answer.status_code == httpx.codes.CONFLICT:
        return ClaimLost(said)
    if answer.status_code >= 500 or answer.status_code in {408, 425, 429}:
        return ProxySilent(said)
    if answer.status_code == httpx.codes.GONE:
        return RunArchived(said)
    return ProxyRefused(f"{said}{_remedy(answer.status_code, run)}")


def _decoded(content: bytes, kind: type[_Message], request: str) -> _Message:
    try:
        return wire.decode(content, kind)
    except ValueError as error:
        raise ProxyRefused(f"{request}: the answer is not a {kind.__name__}: {error}") from error


def _message_of(answer: httpx.Response) -> str:
    """What the proxy's error envelope says; the beginning of the body where there is none."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _remedy(status: int, run: str | None) -> str:
    """Return what to change after a refusal of a request about a run, or about all runs (None)."""
    if status == httpx.codes.UNAUTHORIZED:
        return " (trainer.api_key is not a key of this proxy)"
    if status == httpx.codes.FORBIDDEN and run is None:
        return " (trainer.api_key is neither an admin key nor a trainer key for every run)"
    if status == httpx.codes.FORBIDDEN:
        return f" (trainer.api_key is not a trainer key of run {run!r})"
    if status == httpx.codes.NOT_FOUND:
        return f" (trainer.run: is {run!r} a run of the proxy at trainer.proxy_url? --run names another)"
    return ""
