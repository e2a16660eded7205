"""The client that posts to URLs which users name."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from proxy.clock import Clock, system_clock
from proxy.outbound.addresses import Address, Destinations
from proxy.outbound.failures import TargetFailed, TargetRefused
from proxy.outbound.signing import signed_headers
from proxy.outbound.targets import Target, parse_target
from proxy.settings import OutboundSettings

DEFAULT_ANSWER_BYTES = 64 << 10

# Threads for look-ups. They are not the loop's own ones: a name server that does not answer must not stop what the
# proxy does on threads.
_RESOLVERS = 4
# Addresses of one host that are tried.
_MOST_ADDRESSES = 4

Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a host, in the order in which they are to be tried. Raises OSError. Runs on a thread."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a target. `is_cut`: it was longer than the bound, and `body` is its beginning."""

    status: int
    body: bytes
    is_cut: bool

    @property
    def problem(self) -> str | None:
        """Why the answer does not confirm the request; None if it does."""
        if 200 <= self.status < 300:
            return None
        if 300 <= self.status < 400:
            return f"it answered {self.status}: redirects are not followed, so name the URL that it leads to"
        return f"it answered {self.status}"


class Client:
    """Posts to URLs that users name.

    Each request resolves the host, checks its addresses, and connects to an address that was checked; the name goes
    into the Host header and the TLS handshake. It follows no redirect, stores no cookie, uses no proxy of the
    environment, and shares no connection with other requests.
    """

    def __init__(
        self,
        settings: OutboundSettings,
        *,
        clock: Clock = system_clock,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._destinations = Destinations(settings.allow)
        self._timeout_seconds = settings.timeout_seconds
        self._clock = clock
        self._resolve = resolve or _system_addresses
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="outbound-dns")
        # A connection is never used again: at the same address may be several hosts, each with its own certificate.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # The bare transport, because httpx's client would store cookies and read proxies from the environment.
        self._transport = httpx.AsyncHTTPTransport(verify=tls or httpx.create_ssl_context(), limits=limits)

    def check(self, url: str) -> None:
        """Raise TargetRefused if no request to this URL will be sent, as far as that is known without a look-up."""
        parse_target(url, self._destinations)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        event_id: str,
        secrets: Sequence[str] = (),
        timeout_seconds: float | None = None,
        answer_bytes: int = DEFAULT_ANSWER_BYTES,
    ) -> Answer:
        """Post JSON, signed with each of the secrets, and return the answer, whatever its status.

        `event_id` names the request: use it again if the same request is sent again. `timeout_seconds` bounds the
        whole exchange, the look-up included. Raise TargetRefused if base-rl must not send to the URL, and
        TargetFailed if the target cannot be reached or does not answer in time.
        """
        target = parse_target(url, self._destinations)
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        signed = signed_headers(secrets, event_id=event_id, timestamp=int(self._clock()), body=body)
        headers = {
            "host": target.host_header,
            "user-agent": "base-rl",
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",  # a packed answer could be unpacked beyond any bound
            "content-length": str(len(body)),
            **signed,
        }
        try:
            # One bound for everything: an answer that comes byte by byte would never reach a bound between two bytes.
            async with asyncio.timeout(seconds):
                return await self._exchange(target, headers, body, answer_bytes)
        except TimeoutError as error:
            raise TargetFailed(f"{target.host} did not answer within {seconds:g} seconds") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise TargetFailed(f"{target.host}: {error or type(error).__name__}") from error

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._transport.aclose()

    async def _exchange(self, target: Target, headers: dict[str, str], body: bytes, answer_bytes: int) -> Answer:
        addresses = await self._addresses(target)
        for address in addresses:
            # For an address in the URL, the certificate must name the address itself.
            extensions: dict[str, Any] = {} if target.host == address else {"sni_hostname": target.host}
            request = httpx.Request("POST", target.at(address), headers=headers, content=body, extensions=extensions)
            try:
                response = await self._transport.handle_async_request(request)
            except httpx.ConnectError:
                # Nothing was sent, so the next address may have it; after the last one, the failure is the answer.
                if address == addresses[-1]:
                    raise
                continue
            try:
                text, is_cut = await _beginning(response, answer_bytes)
            finally:
                await response.aclose()
            return Answer(status=response.status_code, body=text, is_cut=is_cut)
        raise TargetFailed(f"{target.host} has no address")

    async def _addresses(self, target: Target) -> list[str]:
        """Return the addresses of the target's host. Raise TargetRefused if one of them is not permitted."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._resolve, target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise TargetFailed(f"the name {target.host!r} cannot be resolved: {error}") from error
        addresses = list(dict.fromkeys(found))[:_MOST_ADDRESSES]
        # All of them: a name with a public and a private address is a mistake or an attack.
        for text in addresses:
            self._destinations.check(target.host, _parsed(text), scheme=target.url.scheme)
        return addresses


def _parsed(text: str) -> Address:
    try:
        return ipaddress.ip_address(text.split("%", 1)[0])
    except ValueError as error:
        raise TargetRefused(f"{text!r} is not an internet address") from error


def _system_addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


async def _beginning(response: httpx.Response, most: int) -> tuple[bytes, bool]:
    """Return up to `most` bytes of the body, and whether there are more."""
    text = bytearray()
    async for chunk in response.aiter_raw():
        text += chunk
        if len(text) > most:
            return bytes(text[:most]), True
    return bytes(text), False
