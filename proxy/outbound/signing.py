"""Signatures of requests by the scheme of Standard Webhooks (github.com/standard-webhooks), pure.

The signature is an HMAC-SHA256 over the request's id, its time and its body, so that a receiver knows who sent it,
refuses one that was recorded long ago, and recognises a repetition.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105  (the prefix that the scheme prescribes)


def secret_text(key: bytes) -> str:
    """Return a secret in the form that receivers' libraries take."""
    return SECRET_PREFIX + base64.b64encode(key).decode()


def signature(secret: str, *, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature by one secret, `v1,…`. `timestamp` is in seconds since the epoch."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def signed_headers(secrets: Sequence[str], *, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a signed request. With several secrets, a receiver that knows any of them accepts it."""
    headers = {"webhook-id": event_id, "webhook-timestamp": str(timestamp)}
    if secrets:
        headers["webhook-signature"] = " ".join(
            signature(secret, event_id=event_id, timestamp=timestamp, body=body) for secret in secrets
        )
    return headers
