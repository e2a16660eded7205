"""What kinds of judges use to come to their scores."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets


@dataclass(frozen=True, kw_only=True)
class Tools:
    """`client` and `secrets` are for verifiers, `functions` for judges in Python."""

    models: JudgeModels
    client: Client
    secrets: SigningSecrets
    functions: Functions
