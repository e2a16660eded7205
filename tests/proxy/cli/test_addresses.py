"""Ports of an installation."""

from __future__ import annotations

import socket
import sys

import pytest

from proxy.cli.addresses import NoFreePort, claimed_port, is_free, random_free_port

HOST = "127.0.0.1"


def test_a_port_in_use_is_skipped() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert not is_free(HOST, taken)
        with claimed_port(HOST, taken, or_next=True) as port:
            assert port > taken
    with claimed_port(HOST, taken, or_next=True) as port:
        assert port == taken


def test_no_free_port_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.cli.addresses.is_free", lambda host, port: False)
    with pytest.raises(NoFreePort, match="--port"), claimed_port(HOST, 8080, or_next=True):
        pass
    with pytest.raises(NoFreePort):
        random_free_port(HOST)


def test_random_ports_of_two_installations_differ_and_are_not_ephemeral() -> None:
    ports = {random_free_port(HOST) for _ in range(20)}
    assert len(ports) > 15
    assert all(20000 <= port < 32000 for port in ports)


@pytest.mark.skipif(sys.platform != "linux", reason="claims are marks in Linux's abstract namespace")
def test_a_port_is_claimed_before_anybody_listens_on_it() -> None:
    first = random_free_port(HOST)
    with claimed_port(HOST, first) as port:
        assert port == first
        with claimed_port(HOST, first, or_next=True) as another:
            assert another > first
        with pytest.raises(NoFreePort, match="--port"), claimed_port(HOST, first):
            pass
        with socket.socket() as listener:
            listener.bind((HOST, port))
            listener.listen()
    with claimed_port(HOST, first) as again:
        assert again == first


def test_a_port_used_by_another_program_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with pytest.raises(NoFreePort, match=str(taken)), claimed_port(HOST, taken):
            pass
        with claimed_port(HOST, taken, or_next=True) as port:
            assert port != taken


def test_port_0_means_any_port() -> None:
    with claimed_port(HOST, 0) as port:
        assert is_free(HOST, port)
