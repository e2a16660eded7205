"""Templates, and the addresses of static files with their content's hash, so that browsers may keep them for ever."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from proxy.admin import formatting

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
    """Everything is escaped, and a name that is not there is an error."""
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=select_autoescape(default_for_string=True, default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in _FILTERS:
        made.filters[name] = getattr(formatting, name)
    made.globals["static"] = static_address
    made.globals["ABSENT"] = formatting.ABSENT
    return made


@lru_cache(maxsize=64)
def static_address(path: str) -> str:
    return f"/admin/static/{path}?v={content_hash(path)}"


@lru_cache(maxsize=1)
def static_files() -> dict[str, Path]:
    """Return every file that may be asked for, by its path below /admin/static. What a client asks for is looked up
    in this, and is never itself a path on our disk."""
    return {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}


@lru_cache(maxsize=64)
def content_hash(path: str) -> str:
    return hashlib.sha256((STATIC / path).read_bytes()).hexdigest()[:16]


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)
