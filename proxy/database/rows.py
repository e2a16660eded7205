"""The type of rows whose columns the type checker does not know."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

AnyRow = Row[*tuple[Any, ...]]
