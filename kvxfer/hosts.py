"""Where processes are: which host this is, what an address means, and whether it stays on this host."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from dataclasses import dataclass

from kvxfer.errors import ConfigurationError

WILDCARDS = frozenset({"*", "", "0.0.0.0", "::"})


@functools.cache
def host_identity() -> str:
    """Names the running kernel and network namespace: processes with the same one share loopback and Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        # Without /proc nothing proves that two processes are on one host, so each is an island of its own.
        return f"unknown:{os.urandom(16).hex()}"
    return f"{boot}/{namespace}"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address. ``scheme`` is ``tcp`` (host and port) or ``ipc`` (path; host and port are empty)."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def wildcard(self) -> bool:
        return self.scheme == "tcp" and self.host in WILDCARDS

    def with_host(self, host: str) -> Address:
        return Address(self.scheme, host, self.port, self.path)

    def __str__(self) -> str:
        return f"ipc://{self.path}" if self.scheme == "ipc" else f"tcp://{join_host_port(self.host, self.port)}"


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@functools.lru_cache(maxsize=4096)
def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Parses ``tcp://host:port``, ``host:port``, ``[::1]:port``, ``*:port`` and ``ipc://path``.

    Raises:
        ConfigurationError: the text is none of these, or the port is missing or not in 0..65535.
    """
    if text.startswith("ipc://"):
        path = text[len("ipc://") :]
        if not path:
            raise ConfigurationError("an ipc:// address needs a path, such as ipc:///run/kvxfer.sock", address=text)
        return Address("ipc", path=path)
    rest = text[len("tcp://") :] if text.startswith("tcp://") else text
    if "://" in rest:
        raise ConfigurationError("only tcp:// and ipc:// addresses are known", address=text)
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        port_text = tail[1:] if tail.startswith(":") else ""
        well_formed = bool(closed) and (tail == "" or tail.startswith(":"))
    else:
        host, _, port_text = rest.rpartition(":") if ":" in rest else (rest, "", "")
        well_formed = ":" not in host
    if not well_formed:
        raise ConfigurationError("write the address as host:port, an IPv6 host in brackets: [::1]:5000", address=text)
    if not port_text:
        if default_port is None:
            raise ConfigurationError("the address has no port; write host:port", address=text)
        return Address("tcp", host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise ConfigurationError("the port must be a number from 0 to 65535", address=text)
    if any(c.isspace() or not c.isprintable() for c in host):
        raise ConfigurationError("a host name has no blanks", address=text)
    return Address("tcp", host, int(port_text))


def resolve(host: str) -> tuple[str, ...]:
    """All IP addresses of a host name, IPv4 first, each once. A literal address is returned as it is.

    May wait for the resolver. Raises ConfigurationError where the name has no address.
    """
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as cause:
        raise ConfigurationError(f"the host name does not resolve: {cause}", host=host) from cause
    addresses = sorted({(info[0] != socket.AF_INET, str(info[4][0])) for info in found})
    if not addresses:
        raise ConfigurationError("the host name has no address", host=host)
    return tuple(address for _, address in addresses)


@functools.lru_cache(maxsize=4096)
def is_loopback_ip(address: str) -> bool:
    """True for 127.0.0.0/8, ::1 and the mapped form of the former."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def is_loopback(host: str) -> bool:
    """True only if every address of ``host`` is a loopback address; a wildcard never is."""
    if host in WILDCARDS:
        return False
    if _is_literal(host):
        return is_loopback_ip(host)
    return all(is_loopback_ip(address) for address in resolve(host))


@functools.lru_cache(maxsize=4096)
def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def outward_ip() -> str:
    """The address by which others most likely reach this host: that of the default route. Sends nothing."""
    for family, target, fallback in (
        (socket.AF_INET, "192.0.2.1", None),  # TEST-NET-1: routed like any other address, answered by nobody
        (socket.AF_INET6, "2001:db8::1", "127.0.0.1"),
    ):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            if fallback is not None:
                return fallback
    raise AssertionError("the last family has a fallback")
