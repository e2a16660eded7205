"""The addresses that requests to users' URLs may reach, pure."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from proxy.outbound.failures import TargetRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
# Networks that `ipaddress` of some Python versions calls global, and Azure's metadata and DNS service, which is at a
# public address. The metadata services of other clouds are at link-local, private or shared addresses.
_ALSO_REFUSED: tuple[_Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "fec0::/10", "5f00::/16")
)
_NUMBERS = re.compile(r"[0-9a-fx.]+", re.IGNORECASE)


class Destinations:
    """Decides which hosts and addresses may be reached. `allow` has networks, addresses and host names that may be
    reached although they are not public."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[_Network] = []
        for text in allow:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError:
                self._names.add(text.lower())

    def is_allowed_name(self, host: str) -> bool:
        """Return whether the settings allow the host of this name, wherever it is."""
        return host.lower().rstrip(".") in self._names

    def is_allowed(self, address: Address) -> bool:
        """Return whether the settings allow this address."""
        return any(
            each.version == network.version and each in network
            for network in self._networks
            for each in (address, embedded(address))
        )

    def check(self, host: str, address: Address, *, scheme: str) -> None:
        """Raise TargetRefused if a request to `host` must not go to `address`, or not by this scheme."""
        if self.is_allowed_name(host) or self.is_allowed(address):
            return
        if not is_public(address):
            where = f"{host!r} is" if host == str(address) else f"{host!r} is at {address}, which is"
            raise TargetRefused(
                f"{where} a private, local or reserved address: name a public one, or let the operator of this "
                "installation allow it with `[outbound] allow`"
            )
        if scheme != "https":
            raise TargetRefused(
                f"http:// would send to {host!r} in the clear: use https://, or let the operator of this "
                "installation allow it with `[outbound] allow`"
            )


def is_public(address: Address) -> bool:
    """Return whether anybody on the internet can reach the address, so that the proxy's place gives no advantage."""
    inner = embedded(address)
    if inner is not address:
        return is_public(inner)
    if any(address.version == network.version and address in network for network in _ALSO_REFUSED):
        return False
    return address.is_global and not address.is_multicast


def embedded(address: Address) -> Address:
    """Return the IPv4 address that packets to an IPv6 address of a translation or a tunnel end at; any other address
    as it is."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    # :: and ::1 are no embedded addresses, and private as they are.
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def literal(host: str) -> Address | None:
    """Return the address that a URL's host denotes without a look-up, in each form that the system's resolver takes:
    dotted, decimal, octal or hexadecimal; None for a name."""
    try:
        return ipaddress.ip_address(host.split("%", 1)[0])  # without the zone of a link-local address
    except ValueError:
        if not _NUMBERS.fullmatch(host):
            return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None
