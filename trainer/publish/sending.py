"""The first rank sends a version's tensors to the engines that ask for them, each in a process group of its own.

A group for each engine, because a broadcast ends only if all ranks take part: an engine that dies costs no other one.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import structlog
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from proxy.contract.exchange import Buckets, GroupBackend, Offer, Place, SentTensor
from proxy.process_groups import WeightGroup, host_store
from trainer.publish.listener import Listener

# Longest wait for an engine: it joins when the prefill that it computes has ended, and takes no tensor while it
# copies a bucket into its model.
_SILENCE_SECONDS = 60.0
# Longest wait for an engine that the proxy has announced: its proxy looks at the store, and asks.
_ASK_SECONDS = 10.0
# What an engine receives in one request and holds beside its model.
_BUCKET_BYTES = 128 << 20

_log = structlog.get_logger("trainer.weights")


class _Joining(NamedTuple):
    """An engine that is about to join a group."""

    store: Store
    group: str
    ranks: int


class Sender:
    """Offers one version at a time.

    With a `source` each engine is sent to on a thread of its own, for as long as the version is offered. Without one
    the tensors come when all ranks gather them: `is_asked` and `send` take turns.
    """

    def __init__(self, host: str, port: int, backend: GroupBackend) -> None:
        """Raises ConfigurationError if this machine cannot listen there."""
        self._listener = Listener(host, port)
        self._host = host
        self._backend = backend
        self._source: Callable[[], Iterable[Tensor]] | None = None
        self._waiting: queue.SimpleQueue[_Joining] = queue.SimpleQueue()
        self._asked: list[_Joining] = []
        self._served = 0
        self._sending = 0
        self._changed = threading.Condition()
        self._groups: list[WeightGroup] = []
        """Groups that everything was sent to. They are closed later, when the engines have read it and have left."""

    def offer(self, described: Mapping[str, Tensor], source: Callable[[], Iterable[Tensor]] | None) -> Offer:
        """Offer tensors of these names, dtypes and shapes, which are sent in this order."""
        self.withdraw()
        self._forget()
        self._source, self._served = source, 0
        token = secrets.token_urlsafe(32)
        self._listener.offer(token, self._open)
        return Offer(url=self._listener.url, token=token, backend=self._backend, buckets=buckets_of(described))

    def withdraw(self) -> None:
        """Let no further engine join, and wait until those that were let in have the version, so that the memory of
        its tensors is free."""
        self._listener.withdraw()
        with self._changed:
            # An engine that is silent ends this wait by the time-out of its group.
            self._changed.wait_for(lambda: not self._sending)

    def close(self) -> None:
        """Stop at the end of the trainer. An engine that still receives is not waited for: it may be silent."""
        self._listener.close()
        self._listener.withdraw()
        self._forget()

    def is_asked(self, expected: int) -> bool:
        """Return whether an engine waits for the tensors. Wait for one a while if fewer than `expected` were served
        yet. After False, no further engine is let in: nobody would send to it."""
        if self._served < expected:
            with suppress(queue.Empty):
                self._asked.append(self._waiting.get(timeout=_ASK_SECONDS))
        if not self._asked:
            self._listener.withdraw()
        with suppress(queue.Empty):
            while True:
                self._asked.append(self._waiting.get_nowait())
        return bool(self._asked)

    def send(self, tensors: Iterable[Tensor | None]) -> None:
        """Send to the engines that `is_asked` has found. All tensors are taken, because the other ranks wait until
        the first has taken them, even if no engine receives them any more."""
        asked, self._asked = self._asked, []
        self._served += len(asked)
        groups = [group for each in asked if (group := self._group(each)) is not None]
        for tensor in tensors:
            if tensor is None:
                raise ValueError("only the first rank, which has the tensors, sends")
            for group in list(groups):
                if not self._broadcast(group, tensor):
                    groups.remove(group)
        self._groups += groups

    def _open(self, ranks: int) -> Place:
        store = host_store(self._host, _SILENCE_SECONDS)
        joining = _Joining(store, f"weights-{secrets.token_hex(8)}", ranks)
        place = Place(host=self._host, port=store.port, group=joining.group)
        if self._source is None:
            self._waiting.put(joining)
        else:
            with self._changed:
                self._sending += 1
            threading.Thread(
                target=self._send_alone, args=(joining, self._source), name="weights-sender", daemon=True
            ).start()
        return place

    def _send_alone(self, joining: _Joining, source: Callable[[], Iterable[Tensor]]) -> None:
        try:
            group = self._group(joining)
            if group is not None and all(self._broadcast(group, tensor) for tensor in source()):
                self._groups.append(group)
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def _group(self, joining: _Joining) -> WeightGroup | None:
        try:
            return WeightGroup(
                joining.store,
                group=joining.group,
                rank=0,
                size=1 + joining.ranks,
                backend=self._backend.value,
                seconds=_SILENCE_SECONDS,
                host=self._host,
            )
        except RuntimeError as error:
            _log.warning("an engine that asked for weights did not join", reason=_first_line(error))
            return None

    def _broadcast(self, group: WeightGroup, tensor: Tensor) -> bool:
        try:
            group.broadcast([tensor])
        except RuntimeError as error:
            _log.warning("weights not sent to an engine", reason=_first_line(error))
            group.close()
            return False
        return True

    def _forget(self) -> None:
        while self._groups:
            self._groups.pop().close()


def buckets_of(described: Mapping[str, Tensor]) -> Buckets:
    """Group tensors in their order; a tensor that is larger than a bucket has one of its own."""
    buckets: list[list[SentTensor]] = [[]]
    size = 0
    for name, tensor in described.items():
        if buckets[-1] and size + tensor.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        buckets[-1].append(SentTensor(name, dtype, tuple(tensor.shape)))
        size += tensor.nbytes
    return tuple(tuple(bucket) for bucket in buckets)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
