"""The check for packages that only some commands need."""

from __future__ import annotations

from proxy.contract.extras import missing_packages
from proxy.settings import ConfigurationError


def require_extras(*extras: str) -> None:
    """Raise ConfigurationError, with the command to run, unless the packages of every extra are installed."""
    if reason := missing_packages(*extras):
        raise ConfigurationError(reason)
