"""A section of the configuration, and the error for a wrong one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigurationError(Exception):
    """The configuration is wrong. The message names the key and what it accepts."""


class Section(BaseModel):
    """One section: its values never change, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
