"""Templates, and addresses of static files that carry the hash of the content, so that browsers can cache them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from proxy.admin import formatting
from proxy.admin.sparkline import sparkline

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
_FILTERS = [
    "number",
    "compact",
    "reward",
    "percent",
    "seconds",
    "ago",
    "moment",
    "clock_time",
    "size",
    "short_id",
    "words",
    "attribution",
    "model",
    "fields",
    "pretty",
]


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the template environment: every value is escaped, and an undefined name raises."""
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=select_autoescape(default_for_string=True, default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in _FILTERS:
        made.filters[name] = getattr(formatting, name)
    made.filters["sparkline"] = sparkline
    made.globals["static"] = static_address
    made.globals["ABSENT"] = formatting.ABSENT
    return made


@lru_cache(maxsize=64)
def static_address(path: str) -> str:
    return f"/admin/static/{path}?v={content_hash(path)}"


@lru_cache(maxsize=1)
def static_files() -> dict[str, Path]:
    """Return every static file by its path below /admin/static."""
    # A client's path is looked up here and never used as a path on disk, so it cannot escape the folder.
    return {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}


@lru_cache(maxsize=64)
def content_hash(path: str) -> str:
    return hashlib.sha256((STATIC / path).read_bytes()).hexdigest()[:16]


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)
