"""References to weights, as trainers send them."""

from __future__ import annotations

import re

from proxy.contract.policy import WeightsReference
from proxy.errors import InvalidRequest

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_sha256(weights: WeightsReference) -> None:
    """Raise InvalidRequest unless the version's checksum is one."""
    if not _SHA256.fullmatch(weights.sha256):
        raise InvalidRequest("weights.sha256 must be 64 hexadecimal digits in lower case", param="weights.sha256")


def check_has_files(weights: WeightsReference) -> None:
    """Raise InvalidRequest unless the version's files are listed with their checksums."""
    check_sha256(weights)
    if not weights.files:
        raise InvalidRequest(
            "weights.files must map the path of every file in the version's directory to its SHA-256",
            param="weights.files",
        )
