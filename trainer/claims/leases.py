"""Renewal of leases, on a thread of its own, while the trainer computes, publishes or waits."""

from __future__ import annotations

import time
from contextvars import copy_context
from threading import Condition, Thread

import structlog

from proxy.contract.identifiers import ClaimId
from trainer.errors import ClaimLost, ProxyRefused, ProxySilent
from trainer.proxy_client import ProxyClient

# However long a lease is, the loss of a claim is noticed within this time.
LONGEST_PAUSE = 20.0
# A lease that is nearly over, or of a proxy with another clock, must not make the thread spin.
SHORTEST_PAUSE = 0.25
# A heartbeat under way is not worth waiting for at the end: the thread is a daemon.
_STOP_SECONDS = 2.0

_log = structlog.get_logger("trainer.leases")


def pause_before_heartbeat(lease_expires_at: float, now: float) -> float:
    """Return a third of the rest of the lease, within bounds: two attempts may fail, and the clocks of proxy and
    trainer may differ by as much as the rest."""
    return min(max((lease_expires_at - now) / 3, SHORTEST_PAUSE), LONGEST_PAUSE)


class LeaseKeeper:
    """Renews the claims that the trainer holds.

    The thread waits until the next heartbeat is due; `hold` and `stop` wake it. A claim whose lease ended is
    dropped, so `is_held` returns False for it. The commit then refuses it.
    """

    def __init__(self, client: ProxyClient) -> None:
        self._client = client
        self._due: dict[ClaimId, float] = {}
        self._changed = Condition()
        self._ended = False
        # The thread logs in the context of its creator, which names the run.
        self._thread = Thread(target=copy_context().run, args=(self._renew_due,), name="leases", daemon=True)
        self._thread.start()

    def hold(self, claim_id: ClaimId, lease_expires_at: float) -> None:
        with self._changed:
            self._due[claim_id] = time.monotonic() + pause_before_heartbeat(lease_expires_at, time.time())
            self._changed.notify()

    def drop(self, claim_id: ClaimId) -> None:
        with self._changed:
            self._due.pop(claim_id, None)

    def is_held(self, claim_id: ClaimId) -> bool:
        with self._changed:
            return claim_id in self._due

    def held(self) -> list[ClaimId]:
        with self._changed:
            return list(self._due)

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout=_STOP_SECONDS)

    def _renew_due(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (wait := self._until_next()) != 0.0:
                    self._changed.wait(wait)
                if self._ended:
                    return
                now = time.monotonic()
                due = [claim_id for claim_id, at in self._due.items() if at <= now]
            # Without the lock: a heartbeat may wait for the proxy, and `hold` and `drop` must not.
            for claim_id in due:
                self._renew(claim_id)

    def _until_next(self) -> float | None:
        """Return the seconds until a heartbeat is due; None if no claim is held."""
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _renew(self, claim_id: ClaimId) -> None:
        pause = SHORTEST_PAUSE
        try:
            reply = self._client.heartbeat(claim_id)
            pause = pause_before_heartbeat(reply.lease_expires_at, time.time())
        except ClaimLost as error:
            _log.warning("lease lost", claim=claim_id, reason=str(error))
            self.drop(claim_id)
            return
        except (ProxySilent, ProxyRefused) as error:
            _log.warning("lease not renewed, trying again", claim=claim_id, reason=str(error))
        with self._changed:
            # The claim may have been dropped during the heartbeat.
            if claim_id in self._due:
                self._due[claim_id] = time.monotonic() + pause
