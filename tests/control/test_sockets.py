"""The two control sockets: messages both ways on every kind of address, and refusals that change nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from kvxfer.control.client import Answer, ControlClient
from kvxfer.control.codec import encode
from kvxfer.control.inbox import Received
from kvxfer.control.keys import Keys
from kvxfer.control.limits import Limits
from kvxfer.control.refused import Refused
from kvxfer.control.server import ControlServer
from kvxfer.errors import Closed, ConfigurationError, InsecureEndpoint, PeerLost
from kvxfer.protocol import messages as m

T = TypeVar("T")
EPOCH = b"e" * 16
DEADLINE_S = 5.0
QUIET_S = 0.3  # how long nothing must happen where nothing may happen
SMALL = Limits(max_pages=64, max_slices=64, max_groups=4, max_regions=16, max_lanes=4)


def ping(token: int) -> bytes:
    return encode(EPOCH, token, m.Ping(token))


def soon(receive: Callable[[], list[T]], n: int = 1, deadline_s: float = DEADLINE_S) -> list[T]:
    """What arrives until there are ``n``."""
    found: list[T] = []
    until = time.monotonic() + deadline_s
    while len(found) < n and time.monotonic() < until:
        found += receive()
        time.sleep(0.001)
    return found


@contextlib.contextmanager
def serving(bind: str = "127.0.0.1:0", keys: Keys | None = None, **options: bool | str) -> Iterator[ControlServer]:
    server = ControlServer(bind, keys=keys, limits=SMALL, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def dialling(peer: str, keys: Keys | None = None, **options: bool) -> Iterator[ControlClient]:
    client = ControlClient(peer, keys=keys, limits=SMALL, **options)
    try:
        yield client
    finally:
        client.close()


def ipv6_or_skip() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as cause:
        pytest.skip(f"this machine has no IPv6 loopback: {cause}")


def there_and_back(server: ControlServer, client: ControlClient) -> None:
    assert client.send(ping(1))
    (received,) = soon(server.receive)
    assert isinstance(received, Received)
    assert (received.epoch, received.sequence, received.message) == (EPOCH, 1, m.Ping(1))
    assert server.send(received.route, encode(EPOCH, 9, m.Pong(1)))
    assert soon(client.receive) == [Answer(EPOCH, 9, m.Pong(1))]


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "tcp://127.0.0.1", "localhost:0", "[::1]:0", "ipc"])
def test_messages_travel_both_ways(bind: str, tmp_path: Path) -> None:
    if "::1" in bind:
        ipv6_or_skip()
    address = f"ipc://{tmp_path}/s" if bind == "ipc" else bind
    with serving(address) as server, dialling(server.address) as client:
        there_and_back(server, client)


def test_a_wildcard_bind_is_reached_over_ipv4_and_ipv6() -> None:
    ipv6_or_skip()
    with serving("*:0", insecure=True) as server:
        for host in ("127.0.0.1", "[::1]", "localhost"):
            with dialling(f"{host}:{server.port}") as client:
                there_and_back(server, client)


def test_the_advertised_host_replaces_the_bound_one() -> None:
    with serving("127.0.0.1:0", advertise_host="node-3") as server:
        assert server.address == f"tcp://node-3:{server.port}"
        assert server.lane_hosts == (("127.0.0.1", "node-3"),)


def test_a_port_in_use_is_refused_with_a_hint() -> None:
    with serving() as server, pytest.raises(ConfigurationError, match="choose another"):
        ControlServer(f"127.0.0.1:{server.port}")


def test_beyond_loopback_without_keys_nothing_is_opened() -> None:
    with pytest.raises(InsecureEndpoint):
        ControlServer("0.0.0.0:0")
    with pytest.raises(InsecureEndpoint):
        ControlClient("198.51.100.7:5000")


def test_the_descriptor_announces_a_frame() -> None:
    with serving() as server, dialling(server.address) as client:
        until = time.monotonic() + DEADLINE_S
        client.send(ping(1))
        while not server.pending() and time.monotonic() < until:
            select.select([server.fileno()], [], [], 0.1)
        assert server.receive()
        assert not server.pending()


def test_a_batch_is_bounded_and_the_rest_stays_pending() -> None:
    with serving() as server, dialling(server.address) as client:
        for token in range(200):
            assert client.send(ping(token))
        found = soon(server.receive, 1)
        assert len(found) <= 64
        found += soon(server.receive, 200 - len(found))
        assert [one.sequence for one in found if isinstance(one, Received)] == list(range(200))


def test_each_client_has_a_route_of_its_own() -> None:
    with serving() as server, dialling(server.address) as one, dialling(server.address) as two:
        one.send(ping(1))
        two.send(ping(2))
        routes = {found.route for found in soon(server.receive, 2)}
        assert len(routes) == 2


def test_a_peer_that_is_gone_is_reported_when_it_is_written_to() -> None:
    with serving() as server:
        with dialling(server.address) as client:
            client.send(ping(1))
            (received,) = soon(server.receive)
        until = time.monotonic() + DEADLINE_S
        with pytest.raises(PeerLost):
            while time.monotonic() < until:
                server.send(received.route, ping(1))
                time.sleep(0.01)


def test_a_peer_that_never_reads_costs_a_bounded_queue_and_never_blocks() -> None:
    with serving() as server, dialling(server.address) as client:
        client.send(ping(1))
        (received,) = soon(server.receive)
        frame = encode(EPOCH, 0, m.Refuse("code", "x" * 1000))
        started = time.monotonic()
        accepted = 0
        while accepted < 200_000 and server.send(received.route, frame):
            accepted += 1
        assert accepted < 200_000
        assert time.monotonic() - started < DEADLINE_S


def test_a_closed_socket_says_so() -> None:
    with serving() as server, dialling(server.address) as client:
        server.close()
        client.close()
        for call in (server.receive, server.pending, server.fileno, client.receive, client.pending, client.fileno):
            with pytest.raises(Closed):
                call()


# ---- hostile peers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw_dealer(server: ControlServer) -> Iterator[zmq.Socket[bytes]]:
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(server.address)
    try:
        yield dealer
    finally:
        dealer.close(0)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([b"garbage"], "header"),
        ([b""], "header"),
        ([b"", ping(1)], "parts"),
        ([ping(1), ping(2)], "parts"),
        ([ping(1)[:-1]], "malformed"),
        ([b"KVXC\x09" + ping(1)[5:]], "version"),
        ([ping(1)[:32] + b"\x91\x63"], "unknown"),
    ],
    ids=["garbage", "empty", "empty part", "two frames", "truncated", "version", "unknown"],
)
def test_a_hostile_frame_is_refused_and_the_next_good_one_is_heard(parts: list[bytes], kind: str) -> None:
    with serving() as server, raw_dealer(server) as dealer, dialling(server.address) as client:
        dealer.send_multipart(parts)
        (refused,) = soon(server.receive)
        assert isinstance(refused, Refused) and refused.kind == kind
        there_and_back(server, client)


def test_an_oversize_frame_ends_its_own_connection_only() -> None:
    with serving() as server, raw_dealer(server) as dealer, dialling(server.address) as client:
        dealer.send(bytes(SMALL.max_frame_bytes + 4096))
        assert soon(server.receive, deadline_s=QUIET_S) == []
        there_and_back(server, client)


def test_bytes_that_are_not_zeromq_disturb_nobody() -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(bytes(range(256)) * 64)
        with dialling(server.address) as client:
            there_and_back(server, client)


# ---- CURVE -----------------------------------------------------------------------------------------------------------

PREFILL, DECODE, STRANGER = Keys.generate(), Keys.generate(), Keys.generate()


def test_authorised_keys_connect() -> None:
    with (
        serving("localhost:0", PREFILL.trusting(DECODE.public)) as server,
        dialling(server.address, DECODE.trusting(PREFILL.public)) as client,
    ):
        there_and_back(server, client)


def refused_and_silent(server: ControlServer, client: ControlClient) -> list[Received | Refused]:
    client.send(ping(1))
    found = soon(server.receive, 99, deadline_s=QUIET_S)
    assert not any(isinstance(one, Received) for one in found)
    assert client.receive() == []
    return found


def test_an_unauthorised_key_delivers_nothing_and_is_counted() -> None:
    with (
        serving(keys=PREFILL.trusting(DECODE.public)) as server,
        dialling(server.address, STRANGER.trusting(PREFILL.public)) as client,
    ):
        found = refused_and_silent(server, client)
        assert {one.kind for one in found if isinstance(one, Refused)} == {"unauthorised"}
        assert STRANGER.public.decode() in str(found[0])
        assert client.trouble() == "the peer does not authorise our key"


def test_a_peer_without_keys_delivers_nothing_to_a_server_with_keys_and_is_counted() -> None:
    with serving(keys=PREFILL.trusting(DECODE.public)) as server, dialling(server.address) as client:
        assert refused_and_silent(server, client) == []
        assert "security" in str(client.trouble())
        assert {refused.kind for refused in server.broken_handshakes()} == {"handshake"}


def test_the_descriptor_announces_a_broken_handshake() -> None:
    with serving(keys=PREFILL.trusting(DECODE.public)) as server, dialling(server.address):
        assert select.select([server.monitor_fileno()], [], [], DEADLINE_S)[0]
        assert soon(server.broken_handshakes)


def test_a_peer_with_keys_says_nothing_to_a_server_without_them() -> None:
    with serving() as server, dialling(server.address, DECODE.trusting(PREFILL.public)) as client:
        assert refused_and_silent(server, client) == []


def test_a_server_with_another_key_than_expected_is_not_talked_to() -> None:
    with (
        serving(keys=STRANGER.trusting(DECODE.public)) as server,
        dialling(server.address, DECODE.trusting(PREFILL.public)) as client,
    ):
        assert refused_and_silent(server, client) == []


def test_a_server_that_authorises_nobody_hears_nobody() -> None:
    with serving(keys=PREFILL) as server, dialling(server.address, DECODE.trusting(PREFILL.public)) as client:
        refused_and_silent(server, client)


def test_where_the_key_guard_is_gone_nobody_new_is_let_in() -> None:
    with serving(keys=PREFILL.trusting(DECODE.public)) as server:
        guard = server._guard
        assert guard is not None
        guard.close()
        with dialling(server.address, DECODE.trusting(PREFILL.public)) as client:
            refused_and_silent(server, client)
