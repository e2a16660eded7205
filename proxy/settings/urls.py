"""Passwords in URLs: put in from a setting of its own, and left out of what is shown."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import SecretStr

_HIDDEN = "***"
# From `scheme://` to the last `@` before the path, as drivers read it: a password may have an unescaped `@` or `:`.
_USER_INFO = re.compile(r"^([a-z][a-z0-9+.-]*://[^:/@]*:)[^/]*@", re.IGNORECASE)
# The drivers of PostgreSQL and Redis also read passwords from the query, those of certificates' keys included.
_IN_QUERY = re.compile(r"([?&](?:ssl_?)?password=)[^&#]*", re.IGNORECASE)


def has_password(url: str) -> bool:
    """Return whether the URL has a password, even an empty one."""
    return _USER_INFO.match(url) is not None or re.search(r"[?&]password=", url) is not None


def with_password(url: str, password: SecretStr) -> str:
    """Return a URL without a password with this one, for its user or for the server's default user."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    # Not even a slash is safe in this part of a URL.
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password.get_secret_value(), safe='')}@{host}"))


def without_passwords(value: Any) -> Any:
    """Return a tree of JSON values with `***` for every password of a URL in it."""
    if isinstance(value, str):
        return _IN_QUERY.sub(rf"\g<1>{_HIDDEN}", _USER_INFO.sub(rf"\g<1>{_HIDDEN}@", value))
    if isinstance(value, dict):
        return {key: without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_passwords(inner) for inner in value]
    return value
