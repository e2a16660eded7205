"""A user's URL, parsed and checked as far as that is possible without a look-up. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from proxy.outbound.addresses import Destinations, literal
from proxy.outbound.failures import TargetRefused

MAX_URL_CHARACTERS = 2000

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_.])?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A URL to which base-rl may send if the addresses of its host are permitted. `host` is in ASCII."""

    url: httpx.URL
    host: str
    port: int

    @property
    def host_header(self) -> str:
        """The name of the host as its server expects it, with the port if the URL has one."""
        return self.url.netloc.decode("ascii")

    def at(self, address: str) -> httpx.URL:
        """Return the URL with an address in place of the host's name."""
        return self.url.copy_with(host=address)


def parse_target(url: str, destinations: Destinations) -> Target:
    """Return the target of a URL. Raise TargetRefused for a malformed one, and for a host that is plainly local."""
    if len(url) > MAX_URL_CHARACTERS:
        raise TargetRefused(f"the URL has more than {MAX_URL_CHARACTERS} characters: shorten it")
    # The URL that is checked is the one that is sent to: a second parser might see another host in the same text.
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError) as error:
        raise TargetRefused(f"this is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise TargetRefused("write a URL such as https://hooks.example.org/base-rl")
    if parsed.userinfo:
        raise TargetRefused("the URL must not contain a user or a password: requests are signed instead")
    if parsed.fragment:
        raise TargetRefused("the URL has a fragment, which is never sent: omit the part from # on")
    if parsed.port is not None and not 0 < parsed.port < 1 << 16:
        raise TargetRefused("the port of the URL must be between 1 and 65535")
    address = literal(host)
    if address is not None:
        destinations.check(host, address, scheme=parsed.scheme)
    elif not _NAME.fullmatch(host):
        raise TargetRefused(f"{host[:100]!r} is no name of a host")
    elif _is_local(host) and not destinations.is_allowed_name(host):
        raise TargetRefused(
            f"{host!r} is this machine: name a public host, or let the operator of this installation allow it with "
            "`[outbound] allow`"
        )
    return Target(url=parsed, host=host, port=parsed.port or (443 if parsed.scheme == "https" else 80))


def _is_local(host: str) -> bool:
    name = host.lower().rstrip(".")
    return name == "localhost" or name.endswith(".localhost")
