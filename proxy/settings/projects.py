"""The names of projects, to which runs belong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

DEFAULT_PROJECT = "default"
"""The project of runs for which none is given. It always exists."""

ProjectName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
