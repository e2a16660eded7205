"""Which hosts and addresses may be reached."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.outbound.addresses import Destinations, embedded, is_public, literal
from proxy.outbound.failures import TargetRefused
from proxy.outbound.targets import parse_target

PRIVATE = (
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",  # metadata of Alibaba
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",  # metadata of Azure
    "169.254.169.254",  # metadata of AWS, Google, Azure and others
    "172.16.0.1",
    "192.0.0.192",  # metadata of Oracle
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe",  # Teredo to 10.0.0.1
    "2001:db8::1",
    "fc00::1",
    "fd00:ec2::254",  # metadata of AWS
    "fe80::1",
    "fec0::1",
    "ff02::1",
)
PUBLIC = ("1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8")


@pytest.mark.parametrize("text", PRIVATE)
def test_an_address_that_is_not_public_is_refused(text: str) -> None:
    with pytest.raises(TargetRefused, match=r"\[outbound\] allow"):
        Destinations().check("hooks.example.org", ipaddress.ip_address(text), scheme="https")


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_may_be_reached_by_https_alone(text: str) -> None:
    Destinations().check("hooks.example.org", ipaddress.ip_address(text), scheme="https")
    with pytest.raises(TargetRefused, match="in the clear"):
        Destinations().check("hooks.example.org", ipaddress.ip_address(text), scheme="http")


@given(st.ip_addresses(v=4))
def test_an_address_within_ipv6_is_public_if_it_is_public_itself(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) | number)
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | number)
    six_to_four = ipaddress.IPv6Address((0x2002 << 112) | (number << 80))
    for outer in (mapped, nat64, six_to_four):
        assert embedded(outer) == address
        assert is_public(outer) == is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[fe80::1%25eth0]",
        "localhost",
        "LOCALHOST.",
        "app.localhost",
        "169.254.169.254",
        "[fd00:ec2::254]",
    ],
)
def test_a_local_host_is_refused_in_every_spelling_without_a_look_up(host: str) -> None:
    with pytest.raises(TargetRefused):
        parse_target(f"https://{host}/", Destinations())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.org",
        "//hooks.example.org",
        "ftp://hooks.example.org/",
        "file:///etc/passwd",
        "gopher://hooks.example.org/",
        "https://",
        "https:///path",
        "https://user:password@hooks.example.org/",
        "https://1.1.1.1 &@127.0.0.1# @8.8.8.8/",
        "https://hooks.example.org#fragment",
        "https://hooks.example.org:0/",
        "https://hooks.example.org:99999/",
        "https://hooks%00.example.org/",
        "https://hooks example.org/",
        "https://hooks.example.org/\r\nhost: other",
        "https://１２７.0.0.1/",
        "https://" + "a" * 3000,
    ],
)
def test_a_url_that_is_malformed_or_ambiguous_is_refused(url: str) -> None:
    with pytest.raises(TargetRefused):
        parse_target(url, Destinations())


def test_names_and_networks_of_the_settings_are_allowed_and_nothing_beside_them() -> None:
    some = Destinations(["10.0.0.0/8", "localhost", "hooks.internal", "fd00::/8"])
    parse_target("http://localhost:9000/hook", some)
    parse_target("http://10.1.2.3/", some)
    for host, address in (
        ("a", "10.9.9.9"),
        ("b", "::ffff:10.0.0.1"),
        ("Hooks.Internal", "192.168.0.1"),
        ("c", "fd00::1"),
    ):
        some.check(host, ipaddress.ip_address(address), scheme="http")
    for host, address in (("a", "192.168.0.1"), ("x.hooks.internal", "192.168.0.1"), ("c", "127.0.0.1")):
        with pytest.raises(TargetRefused):
            some.check(host, ipaddress.ip_address(address), scheme="https")


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(TargetRefused):
        parse_target(f"https://{text}", Destinations())
    literal(text)
