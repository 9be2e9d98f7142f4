"""Addresses, and the loopback rule: nothing beyond this host without keys, unless the caller says insecure."""

from __future__ import annotations

import socket

import pytest

from kvxfer import hosts
from kvxfer.control.keys import Keys
from kvxfer.control.loopback import bind_addresses, check_dial, dial_address
from kvxfer.errors import ConfigurationError, InsecureEndpoint
from kvxfer.hosts import Address, parse_address

KEYS = Keys.generate([Keys.generate().public])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver with names of our own: it asks nobody."""
    table = {
        "127.0.0.1": ["127.0.0.1"],
        "::1": ["::1"],
        "here": ["127.0.0.1", "::1"],
        "there": ["198.51.100.7"],
        "both": ["127.0.0.1", "198.51.100.7"],
    }

    def getaddrinfo(host: str, port: int | None, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port or 0))
            for ip in table[host]
        ]

    monkeypatch.setattr(hosts.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:5000", Address("tcp", "127.0.0.1", 5000)),
        ("127.0.0.1:5000", Address("tcp", "127.0.0.1", 5000)),
        ("[::1]:5000", Address("tcp", "::1", 5000)),
        ("tcp://[fe80::1%eth0]:1", Address("tcp", "fe80::1%eth0", 1)),
        ("node-3.example:65535", Address("tcp", "node-3.example", 65535)),
        ("*:0", Address("tcp", "*", 0)),
        ("ipc:///run/kvxfer.sock", Address("ipc", path="/run/kvxfer.sock")),
    ],
)
def test_an_address_is_understood_and_printed_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:port", "host:65536", "host:-1", "::1:5000", "[::1", "[::1]5000", "udp://h:1", "ipc://"]
    + ["a b:1", "h\n:1", "host:1²"],
)
def test_a_malformed_address_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_address(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "here"])
def test_loopback_hosts_need_no_keys(names: None, host: str) -> None:
    address = hosts.join_host_port(host, 5000)
    assert bind_addresses(address, None, False)
    assert dial_address(address, None, False)
    check_dial(address, keys=None, insecure=False)


@pytest.mark.parametrize(
    "host", ["198.51.100.7", "2001:db8::1", "::ffff:198.51.100.7", "there", "both", "*", "0.0.0.0", "::"]
)
def test_beyond_loopback_keys_are_needed_or_the_word_insecure(names: None, host: str) -> None:
    address = hosts.join_host_port(host, 5000)
    with pytest.raises(InsecureEndpoint, match="insecure=True"):
        bind_addresses(address, None, False)
    with pytest.raises(InsecureEndpoint):
        check_dial(address, keys=None, insecure=False)
    assert bind_addresses(address, KEYS, False)
    assert bind_addresses(address, None, True)


def test_a_unix_socket_needs_no_keys() -> None:
    assert bind_addresses("ipc:///run/x", None, False) == (Address("ipc", path="/run/x"),)


def test_a_name_is_bound_at_all_its_addresses(names: None) -> None:
    assert [address.host for address in bind_addresses("here:5000", None, False)] == ["127.0.0.1", "::1"]


def test_a_name_that_does_not_resolve_is_refused(names: None) -> None:
    with pytest.raises(ConfigurationError, match="does not resolve"):
        check_dial("nowhere:5000", keys=None, insecure=False)


@pytest.mark.parametrize("peer", ["*:5000", "0.0.0.0:5000", "127.0.0.1:0"])
def test_a_wildcard_cannot_be_dialled(peer: str) -> None:
    with pytest.raises(ConfigurationError, match="wildcard"):
        dial_address(peer, None, True)


def test_a_loopback_name_is_dialled_where_somebody_listens(names: None) -> None:
    with socket.socket(socket.AF_INET6) as listening:
        listening.bind(("::1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert dial_address(f"here:{port}", None, False) == Address("tcp", "::1", port)


def test_a_remote_name_is_left_to_the_socket_so_that_nobody_waits_for_the_resolver(names: None) -> None:
    assert dial_address("nowhere:5000", KEYS, False).host == "nowhere"


def test_the_host_identity_is_stable_within_a_process() -> None:
    assert hosts.host_identity() == hosts.host_identity()
