"""The trajectory store."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, SecretStr, model_validator

from proxy.settings.section import Section
from proxy.settings.urls import has_password, with_password

DEFAULT_CONNECTIONS = 6
"""Three connections write at once, and readers seldom need more than the other three. With two, the least that is
allowed, one always remains for model calls."""

_STORE_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+aiosqlite": "sqlite",  # a driver of earlier versions, in existing configurations
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def _store_url(url: str) -> str:
    """Return the URL with the driver that the store uses. Errors never quote the URL, which may hold a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _STORE_DRIVERS:
        named = f"{scheme}://" if separator else "no scheme"
        raise ValueError(
            f"the store is a SQLite file or a PostgreSQL database, and this names {named}: write "
            "sqlite:////absolute/path/store.sqlite3 or postgresql://user:password@host:5432/database"
        )
    if scheme.startswith("postgresql"):
        try:
            parts = urlsplit(f"postgresql://{rest}")
            named_database = bool(parts.path.strip("/")) and (parts.port is None or parts.port > 0)
        except ValueError:
            named_database = False
        if not named_database:
            raise ValueError("write postgresql://user:password@host:5432/database, with the database's name")
    return f"{_STORE_DRIVERS[scheme]}://{rest}"


class DatabaseSettings(Section):
    """The trajectory store."""

    url: Annotated[str, AfterValidator(_store_url)] | None = None
    """`sqlite:////path` or `postgresql://user:password@host/database`; default: SQLite at `base-rl.sqlite3` in the
    data directory."""
    password: SecretStr | None = None
    """PostgreSQL: the password of the URL's user, for a URL that has none."""
    synchronous: Literal["normal", "full"] | None = None
    """What a commit waits for (`docs/operating.md` has the table); default: `full` on SQLite, and the server's own
    setting on PostgreSQL."""
    busy_timeout_seconds: PositiveFloat = 10.0
    """How long a write waits for the lock of another write."""
    when_unavailable: Literal["refuse", "serve"] = "refuse"
    """What happens to model calls that cannot be recorded, while the database is down or the disk is full. `refuse`:
    503; `serve`: they are answered, marked `x-base-rl-unrecorded`, and not trained."""
    connect_timeout_seconds: PositiveFloat = 5.0
    """PostgreSQL: how long the server may take to accept a connection."""
    statement_timeout_seconds: PositiveFloat = 60.0
    """PostgreSQL: how long one statement may run."""
    connections: int = Field(default=DEFAULT_CONNECTIONS, ge=2, le=100)
    """PostgreSQL: most connections that this proxy opens. All its work shares them, and waits `busy_timeout_seconds`
    at most for a free one; where the server allows fewer, the proxy works with those."""

    @model_validator(mode="after")
    def _password_has_a_user(self) -> DatabaseSettings:
        """Refuse a password that would have no effect, or that would replace the URL's own."""
        if self.password is not None:
            url = self.url or ""
            has_user = url.startswith("postgresql") and urlsplit(url).netloc.rpartition("@")[0] != ""
            if not has_user or has_password(url):
                raise ValueError(
                    "password: it belongs to a url with a user and without a password; write "
                    "url = postgresql://user@host:5432/database"
                )
        return self

    @property
    def full_url(self) -> str | None:
        """The URL with the password, never to be shown."""
        return self.url if self.url is None or self.password is None else with_password(self.url, self.password)
