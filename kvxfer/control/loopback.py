"""The loopback rule: without CURVE keys nothing is bound or dialled beyond this host, unless the caller says so."""

from __future__ import annotations

import contextlib
import socket

from kvxfer.control.keys import Keys
from kvxfer.errors import ConfigurationError, InsecureEndpoint
from kvxfer.hosts import Address, is_loopback, parse_address, resolve

_PROBE_TIMEOUT_S = 0.2


def check_secure(address: Address, keys: Keys | None, insecure: bool) -> None:
    """Raises InsecureEndpoint where the rule forbids ``address``. Without keys it may wait for the name resolver."""
    if address.scheme == "ipc" or keys is not None or insecure:
        return
    if not is_loopback(address.host):
        raise InsecureEndpoint(
            "this address lies beyond loopback and there are no CURVE keys; pass keys=Keys.load(...) "
            "(kvxfer keygen makes them), or say insecure=True",
            address=str(address),
        )


def check_dial(peer: str, *, keys: Keys | None, insecure: bool) -> None:
    """Raises InsecureEndpoint by the loopback rule, ConfigurationError for a bad address or no known server key.

    Opens nothing. Without keys it may wait for the name resolver.
    """
    address = parse_address(peer)
    check_secure(address, keys, insecure)
    if keys is not None:
        keys.server_key(address)


def bind_addresses(bind: str, keys: Keys | None, insecure: bool) -> tuple[Address, ...]:
    """The addresses to bind for ``bind``: names resolved, all of them; a wildcard stays one.

    Raises InsecureEndpoint by the loopback rule, ConfigurationError for a bad address or name.
    """
    address = parse_address(bind, default_port=0)
    check_secure(address, keys, insecure)
    if address.scheme == "ipc" or address.wildcard:
        return (address,)
    return tuple(address.with_host(ip) for ip in resolve(address.host))


def dial_address(peer: str, keys: Keys | None, insecure: bool) -> Address:
    """The address to dial for ``peer``.

    Loopback names are resolved here, because a server may listen on one of their two addresses only; other names are
    left to ZeroMQ, which resolves them without making the caller wait.

    Raises InsecureEndpoint by the loopback rule, ConfigurationError for a bad address.
    """
    address = parse_address(peer)
    check_secure(address, keys, insecure)
    if address.scheme == "ipc":
        return address
    if address.wildcard or address.port == 0:
        raise ConfigurationError(
            "name the host and port to dial; a wildcard is only good for binding", address=str(address)
        )
    if address.host == "localhost" or address.host.endswith(".localhost") or (keys is None and not insecure):
        return address.with_host(_listening(resolve(address.host), address.port))
    return address


def _listening(candidates: tuple[str, ...], port: int) -> str:
    """The first loopback address where somebody listens, else the first; the kernel answers on loopback at once."""
    if len(candidates) > 1:
        for ip in candidates:
            with contextlib.suppress(OSError), socket.create_connection((ip, port), _PROBE_TIMEOUT_S):
                return ip
    return candidates[0]
