"""Ports."""

from __future__ import annotations

import socket

import pytest

from proxy.cli.addresses import NoFreePort, is_free, next_free_port, random_free_port

HOST = "127.0.0.1"


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert not is_free(HOST, taken)
        assert next_free_port(HOST, taken) > taken
    assert next_free_port(HOST, taken) == taken


def test_no_free_port_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.cli.addresses.is_free", lambda host, port: False)
    with pytest.raises(NoFreePort, match="--port"):
        next_free_port(HOST, 8080)
    with pytest.raises(NoFreePort):
        random_free_port(HOST)


def test_random_ports_of_two_installations_differ_and_are_no_outgoing_ones() -> None:
    ports = {random_free_port(HOST) for _ in range(20)}
    assert len(ports) > 15
    assert all(20000 <= port < 32000 for port in ports)
