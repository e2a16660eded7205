"""Signing secrets. They are derived from the installation's secret and stored nowhere."""

from __future__ import annotations

import hmac

from proxy.outbound.signing import secret_text


class SigningSecrets:
    """Derives the signing secrets of an installation.

    The store has the generation of a secret alone, so a copy of the store cannot sign. `installation` is the content
    of the data directory's file `secret`; None for a worker that lacks the file.
    """

    def __init__(self, installation: bytes | None) -> None:
        self._installation = installation

    @property
    def fingerprint(self) -> str | None:
        """Identifies the installation's secret, so that a worker with another one does not sign wrongly."""
        if self._installation is None:
            return None
        return hmac.digest(self._installation, b"fingerprint of webhook secrets", "sha256")[:8].hex()

    def text(self, owner: str, generation: int) -> str:
        """Return a secret, `whsec_…`. `owner` names the webhook or judge whose requests it signs. Raise ValueError
        without the installation's secret."""
        if self._installation is None:
            raise ValueError("the installation's secret is missing")
        return secret_text(hmac.digest(self._installation, f"webhook {owner} {generation}".encode(), "sha256"))
