"""Signed requests of jobs to a user's own service."""

from __future__ import annotations

from proxy.jobs.kinds import JobFailure, JobPostponed, JobRefused
from proxy.outbound.client import Answer, Client
from proxy.outbound.failures import TargetFailed, TargetRefused
from proxy.outbound.secrets import SigningSecrets

# The pause before another worker tries a request that this one cannot sign.
_UNSIGNED_SECONDS = 30.0


async def post_signed(
    client: Client,
    secrets: SigningSecrets,
    owner: str,
    url: str,
    body: bytes,
    *,
    event_id: str,
    timeout_seconds: float,
    answer_bytes: int,
) -> Answer:
    """Post `body`, signed with the first secret of `owner`, and return the answer, of at most `answer_bytes` bytes.

    Raise JobPostponed on a machine that cannot sign, JobRefused for a URL that may not be called, and JobFailure if
    no answer comes within `timeout_seconds`.
    """
    if secrets.fingerprint is None:
        raise JobPostponed(
            "this worker lacks the installation's secret (the file `secret` of the proxy's data directory), so "
            "it cannot sign",
            seconds=_UNSIGNED_SECONDS,
        )
    try:
        return await client.post(
            url,
            body,
            event_id=event_id,
            secrets=[secrets.text(owner, 1)],
            timeout_seconds=timeout_seconds,
            answer_bytes=answer_bytes,
        )
    except TargetRefused as error:
        raise JobRefused(str(error)) from error
    except TargetFailed as error:
        raise JobFailure(str(error)) from error
