"""The trainer's side of a proxy, in memory: head, claims with leases, and commits that consume exactly once.

`handle` answers a request; `transport()` puts it under an httpx client, `serve()` under a real port.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec

from proxy.contract.claim import (
    AbandonedProcess,
    ClaimedBatch,
    ClaimRequest,
    CommitReply,
    CommitRequest,
    EngineReading,
    LeaseReply,
    ReleasedClaims,
    decode,
    encode,
)
from proxy.contract.identifiers import ClaimId, RunId, SessionId, new_claim_id
from proxy.contract.policy import Head, PruneReply, PruneRequest, WeightsFormat, WeightsReference
from proxy.contract.trajectory import TrajectoryGroup

KEY = "rl-trainer-test"
RUN = "policy"

_PATH = re.compile(rf"/api/v1/runs/{RUN}(?P<rest>/.*)")
_CLAIM = re.compile(r"/claims/(?P<claim>[^/]+)/(?P<action>heartbeat|release)")


@dataclass
class _Lease:
    groups: list[TrajectoryGroup]
    expires_at: float
    process: str | None


@dataclass
class TrainingProxy:
    """`source(version)` returns the next group when a claim finds too few; with None, claims get only the groups that
    `offer` added.

    `lose_answers` is the number of commits that are made and whose answers are lost. `outage` is the number of
    requests that are answered with 503. `before_commit` runs before a commit, and `before_save` before a version is
    recorded as saved; a ConnectionAbortedError from them cuts the connection.
    """

    base_model: str
    source: Callable[[int], TrajectoryGroup | None] | None = None
    lease_seconds: float = 60.0
    version: int = 0
    weights: WeightsReference | None = None
    is_saved: bool = True
    waiting: list[TrajectoryGroup] = field(default_factory=list)
    leases: dict[ClaimId, _Lease] = field(default_factory=dict)
    commits: list[CommitRequest] = field(default_factory=list)
    consumed: dict[SessionId, int] = field(default_factory=dict)
    claimed: list[ClaimId] = field(default_factory=list)
    released: list[ClaimId] = field(default_factory=list)
    heartbeats: list[ClaimId] = field(default_factory=list)
    repeated: int = 0
    outage: int = 0
    lose_answers: int = 0
    refuse_to_prune: bool = False
    is_deleted: bool = False
    is_archived: bool = False
    engine: EngineReading | None = None
    formats: tuple[WeightsFormat, ...] | None = None
    max_new_tokens: int | None = None
    weights_kind: str = "full"
    trainer: dict[str, Any] = field(default_factory=dict)
    before_commit: Callable[[], None] = lambda: None
    before_save: Callable[[], None] = lambda: None
    saved: list[WeightsReference] = field(default_factory=list)
    """The weights of versions that were committed from memory and saved."""
    lost: list[CommitRequest] = field(default_factory=list)
    """Commits that were taken back, because their versions were not saved."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    _first_taken: dict[SessionId, int] = field(default_factory=dict)
    _departures: Counter[str | None] = field(default_factory=Counter)
    """How often each process has given everything back."""

    def offer(self, groups: Sequence[TrajectoryGroup]) -> None:
        with self.changed:
            self.waiting.extend(groups)
            self.changed.notify_all()

    def move_head(self, version: int, weights: WeightsReference | None) -> None:
        with self.changed:
            self.version, self.weights = version, weights

    @property
    def head(self) -> Head:
        return Head(
            run_id=RunId("run_test"),
            run_name=RUN,
            version=self.version,
            base_model=self.base_model,
            weights=self.weights,
            formats=self.formats,
            max_new_tokens=self.max_new_tokens,
            weights_kind=self.weights_kind,
            trainer=self.trainer,
            is_saved=self.is_saved,
        )

    def wait_for(self, condition: Callable[[], bool], timeout: float = 110.0) -> None:
        """Block until `condition` is true. It is evaluated after every request and, for changes of processes, a few
        times a second."""
        end = time.monotonic() + timeout
        with self.changed:
            while not condition():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("what the test waits for did not happen")
                self.changed.wait(min(left, 0.2))

    def handle(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        """Return (status, body). Raises ConnectionAbortedError if the answer is to be lost."""
        if authorization != f"Bearer {KEY}":
            return _error(401, "unknown key")
        match = _PATH.fullmatch(path)
        if match is None or self.is_deleted:
            return _error(404, "no such run")
        if self.is_archived:
            return _error(410, "the run is archived")
        with self.changed:
            if self.outage > 0:
                self.outage -= 1
                return _error(503, "down for a moment")
            answer = self._route(method, match["rest"], body)
            self.changed.notify_all()
        if match["rest"] == "/versions" and answer[0] == 200 and self.lose_answers > 0:
            self.lose_answers -= 1
            raise ConnectionAbortedError("answer lost")
        return answer

    def _route(self, method: str, rest: str, body: bytes) -> tuple[int, bytes]:
        answers: dict[tuple[str, str], Callable[[], tuple[int, bytes]]] = {
            ("GET", "/head"): lambda: (200, encode(self.head)),
            ("POST", "/claims"): lambda: (200, encode(self._claim(decode(body, ClaimRequest)))),
            ("POST", "/versions"): lambda: self._commit(decode(body, CommitRequest)),
            ("POST", f"/versions/{self.version}/saved"): lambda: self._save(decode(body, WeightsReference)),
            ("POST", "/versions/take-back"): lambda: (200, encode(self._take_back_head())),
            ("POST", "/versions/prune"): lambda: self._prune(decode(body, PruneRequest)),
            ("POST", "/claims/abandoned"): lambda: (
                200,
                encode(self._abandoned(decode(body, AbandonedProcess).process)),
            ),
        }
        if (answer := answers.get((method, rest))) is not None:
            return answer()
        match = _CLAIM.fullmatch(rest)
        return _error(404, "no such path") if match is None else self._lease(ClaimId(match["claim"]), match["action"])

    def _lease(self, claim_id: ClaimId, action: str) -> tuple[int, bytes]:
        self._expire()
        if claim_id not in self.leases:
            return _error(409, "no such lease")
        if action == "release":
            self._take_back(claim_id)
            self.released.append(claim_id)
            return 200, encode({})
        self.heartbeats.append(claim_id)
        self.leases[claim_id].expires_at = time.time() + self.lease_seconds
        return 200, encode(LeaseReply(claim_id=claim_id, lease_expires_at=self.leases[claim_id].expires_at))

    def _abandoned(self, process: str) -> ReleasedClaims:
        self._departures[process] += 1
        held = [claim_id for claim_id, lease in self.leases.items() if lease.process == process]
        for claim_id in held:
            self._take_back(claim_id)
            self.released.append(claim_id)
        return ReleasedClaims(claim_ids=tuple(held))

    def _prune(self, request: PruneRequest) -> tuple[int, bytes]:
        """Remove all versions older than the newest `keep`; here only the head ever serves."""
        if self.refuse_to_prune:
            return _error(503, "not now")
        old = {commit.weights.uri for commit in self.commits[: max(0, self.version - request.keep)]}
        return 200, encode(PruneReply(remove=tuple(uri for uri in request.present if uri in old)))

    def _claim(self, request: ClaimRequest) -> ClaimedBatch:
        deadline = time.monotonic() + request.wait_s
        departures = self._departures[request.process]
        while True:
            self._expire()
            self._fill(request.want)
            count = sum(len(group.trajectories) for group in self.waiting)
            left = deadline - time.monotonic()
            if self._departures[request.process] > departures:
                # The real proxy sees that this client has disconnected. Without that, a claim that still waits here
                # would take what its own process gives back.
                count = 0
                break
            if count >= request.want or left <= 0 or (self.source is not None and count >= request.at_least):
                break
            self.changed.wait(min(left, 0.2))
        if count < request.at_least:
            return ClaimedBatch(claim_id=None, lease_expires_at=0.0, base_version=self.version, groups=())
        taken: list[TrajectoryGroup] = []
        while self.waiting and sum(len(group.trajectories) for group in taken) < request.want:
            group = self.waiting.pop(0)
            self._first_taken.setdefault(group.trajectories[0].session_id, len(self._first_taken))
            taken.append(group)
        claim_id = new_claim_id()
        expires_at = time.time() + self.lease_seconds
        self.leases[claim_id] = _Lease(groups=taken, expires_at=expires_at, process=request.process)
        self.claimed.append(claim_id)
        return ClaimedBatch(
            claim_id=claim_id,
            lease_expires_at=expires_at,
            base_version=self.version,
            groups=tuple(taken),
            engine=self.engine,
            max_new_tokens=self.max_new_tokens,
        )

    def _fill(self, want: int) -> None:
        while self.source is not None and sum(len(group.trajectories) for group in self.waiting) < want:
            group = self.source(self.version)
            if group is None:
                return
            self.waiting.append(group)

    def _take_back(self, claim_id: ClaimId) -> None:
        """Let the groups of a claim wait again, in the order in which groups were first handed out, because several
        claims may come back in any order."""
        self.waiting[:0] = self.leases.pop(claim_id).groups
        never = len(self._first_taken)
        self.waiting.sort(key=lambda group: self._first_taken.get(group.trajectories[0].session_id, never))

    def _expire(self) -> None:
        for claim_id, lease in list(self.leases.items()):
            if lease.expires_at < time.time():
                self._take_back(claim_id)

    def _commit(self, request: CommitRequest) -> tuple[int, bytes]:
        self.before_commit()
        for number, made in enumerate(self.commits, start=1):
            if (made.claim_ids, made.weights.sha256) == (request.claim_ids, request.weights.sha256):
                self.repeated += 1
                return 200, encode(CommitReply(version=number, repeated=True))
        if request.parent_version != self.version:
            return _error(409, "the head moved")
        self._expire()
        if any(claim_id not in self.leases for claim_id in request.claim_ids):
            return _error(409, "a claim is gone")
        self.is_saved = request.is_saved
        if request.is_saved:
            self._consume(request)
        self.commits.append(request)
        self.version, self.weights = self.version + 1, request.weights
        return 200, encode(CommitReply(version=self.version, repeated=False))

    def _consume(self, request: CommitRequest) -> None:
        for claim_id in request.claim_ids:
            for group in self.leases.pop(claim_id).groups:
                for trajectory in group.trajectories:
                    self.consumed[trajectory.session_id] = self.consumed.get(trajectory.session_id, 0) + 1

    def _save(self, weights: WeightsReference) -> tuple[int, bytes]:
        self.before_save()
        self._expire()
        if not self.is_saved:
            if any(claim_id not in self.leases for claim_id in self.commits[-1].claim_ids):
                return _error(409, "a claim is gone")
            self._consume(self.commits[-1])
            self.is_saved, self.weights = True, weights
            self.saved.append(weights)
        return 200, encode(CommitReply(version=self.version, repeated=False))

    def _take_back_head(self) -> Head:
        """Unlike the real proxy, use the number again, so that `commits` has the versions in order."""
        if not self.is_saved:
            self.lost.append(self.commits.pop())
            self.is_saved, self.version = True, self.version - 1
            self.weights = self.saved[-1] if self.saved else None
        return self.head

    def transport(self) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            try:
                status, body = self.handle(
                    request.method, request.url.path, request.headers.get("authorization", ""), request.read()
                )
            except ConnectionAbortedError as error:
                raise httpx.ReadError(str(error), request=request) from error
            return httpx.Response(status, content=body)

        return httpx.MockTransport(answer)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve this behaviour on a free port, and yield the address."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                try:
                    status, content = proxy.handle(
                        self.command, self.path, self.headers.get("authorization", ""), body
                    )
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore broken connections: tests kill trainers in the middle of a request."""

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
                thread.join()


def _error(status: int, message: str) -> tuple[int, bytes]:
    body = {"error": {"message": message, "type": "test", "param": None, "code": None}}
    return status, msgspec.json.encode(body)
