"""The listener takes each lane once from whoever proves the secret, and nobody else keeps a real peer out."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvxfer.errors import Closed, ConfigurationError, LaneFailed
from kvxfer.hosts import parse_address
from kvxfer.lanes import handshake as hs
from kvxfer.lanes.dial import Connected, connect_lane, connect_lanes
from kvxfer.lanes.export import MemoryExport

LANES = {"local": 2, "tcp": 2}
SESSION = 3


def eventually(reached: Callable[[], bool], deadline_s: float = 5.0) -> bool:
    until = time.monotonic() + deadline_s
    while not reached():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def connect(served: Any, kinds: Sequence[str] = ("tcp",), **changes: Any) -> list[Connected]:
    what = {"epoch": served.epoch, "generation": 0, "secret": served.secret, "timeout_s": 5.0} | changes
    _, lanes, _ = connect_lanes(served.listener.offers(LANES), kinds, **what)
    return lanes


def close_all(lanes: Sequence[Connected]) -> None:
    for lane in lanes:
        lane.close()


def dial(served: Any, kind: str = "tcp") -> socket.socket:
    """A connection that has said nothing yet."""
    (address,) = served.listener.addresses(kind)
    if kind == "local":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + address[1:].encode())
        return sock
    where = parse_address(address)
    return socket.create_connection((where.host, where.port), 5)


def challenge(sock: socket.socket) -> bytes:
    return hs.parse_challenge(sock.recv(hs.CHALLENGE_BYTES, socket.MSG_WAITALL))


def closed_without_a_word(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_proven_lanes_are_handed_over_once_each(serve: Any, kind: str) -> None:
    served = serve()
    lanes = connect(served, (kind,))
    assert eventually(lambda: len(served.taken) == 2)
    assert sorted((lane.session, lane.generation, lane.lane, lane.kind) for lane in served.taken) == [
        (SESSION, 0, 0, kind),
        (SESSION, 0, 1, kind),
    ]
    assert served.refused == []
    close_all(lanes)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_handed_over_socket_carries_bytes_and_outlives_the_listener(serve: Any, kind: str) -> None:
    served = serve()
    lanes = connect(served, (kind,))
    assert eventually(lambda: len(served.taken) == 2)
    served.listener.close()
    by_lane = {lane.lane: lane.fd for lane in served.taken}
    for number, lane in enumerate(lanes):
        os.write(by_lane[number], bytes([number]) * 10)
        theirs = lane.detach()
        assert eventually(lambda fd=theirs: readable(fd))
        assert os.read(theirs, 100) == bytes([number]) * 10
        os.close(theirs)


def readable(fd: int) -> bool:
    try:
        return bool(socket.socket(fileno=os.dup(fd)).recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_both_ends_are_non_blocking_and_close_on_exec(serve: Any, kind: str) -> None:
    served = serve()
    lanes = connect(served, (kind,))
    assert eventually(lambda: len(served.taken) == 2)
    for fd in [lane.fd for lane in lanes] + [lane.fd for lane in served.taken]:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    close_all(lanes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": bytes(32)}, "bad_proof"),
        ({"epoch": bytes(16)}, "unknown_epoch"),
        ({"generation": 1}, "stale_generation"),
    ],
)
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_wrong_secret_epoch_or_generation_is_refused(
    serve: Any, kind: str, changes: dict[str, Any], reason: str
) -> None:
    served = serve()
    with pytest.raises(LaneFailed):
        connect(served, (kind,), **changes)
    assert eventually(lambda: served.reasons() == [reason])
    assert served.taken == []


def test_a_lane_that_is_not_served_is_refused(serve: Any) -> None:
    served = serve()
    with pytest.raises(LaneFailed):
        connect_lane(
            "tcp",
            served.listener.addresses("tcp"),
            epoch=served.epoch,
            generation=0,
            lane=2,
            secret=served.secret,
            timeout_s=5,
        )
    assert eventually(lambda: served.reasons() == ["unknown_lane"])


def test_a_lane_is_taken_once_whatever_its_kind(serve: Any) -> None:
    served = serve()
    first = connect(served, ("tcp",))
    second = connect(served, ("local",))
    assert eventually(lambda: served.reasons() == ["lane_taken"] * 2)
    assert len(served.taken) == 2
    close_all(first + second)


def test_a_replayed_proof_proves_nothing(serve: Any) -> None:
    served = serve()
    with dial(served) as first:
        claim = hs.Claim("tcp", served.epoch, 0, 0, os.urandom(32))
        proof = hs.pack_proof(served.secret, claim, challenge(first))
        first.sendall(proof)
        assert len(first.recv(hs.ACCEPT_BYTES, socket.MSG_WAITALL)) == hs.ACCEPT_BYTES
    with dial(served) as second:
        challenge(second)
        second.sendall(proof)
        assert closed_without_a_word(second)
    assert eventually(lambda: "bad_proof" in served.reasons())
    assert served.taken == []


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_garbage_is_closed_without_a_word(serve: Any, kind: str) -> None:
    served = serve()
    with dial(served, kind) as stranger:
        challenge(stranger)
        stranger.sendall(bytes(range(256)))
        assert closed_without_a_word(stranger)
    assert eventually(lambda: served.reasons() == ["framing"])


def test_nothing_but_a_random_number_is_told_before_the_proof(serve: Any) -> None:
    served = serve(handshake_timeout_s=0.2)
    with dial(served, "local") as stranger:
        stranger.settimeout(5)
        told = b""
        while chunk := stranger.recv(4096):
            told += chunk
    assert len(told) == hs.CHALLENGE_BYTES


def test_the_kind_that_is_proven_must_be_that_of_the_connection(serve: Any) -> None:
    served = serve()
    with dial(served, "tcp") as sock:
        claim = hs.Claim("local", served.epoch, 0, 0, os.urandom(32), want_memory=True)
        sock.sendall(hs.pack_proof(served.secret, claim, challenge(sock)))
        assert closed_without_a_word(sock)
    assert eventually(lambda: served.reasons() == ["framing"])


@pytest.mark.parametrize("sent", [0, 10, hs.PROOF_BYTES - 1])
def test_a_peer_that_stops_in_mid_handshake_is_closed_at_the_deadline(serve: Any, sent: int) -> None:
    served = serve(handshake_timeout_s=0.2)
    with dial(served) as slow:
        claim = hs.Claim("tcp", served.epoch, 0, 0, os.urandom(32))
        slow.sendall(hs.pack_proof(served.secret, claim, challenge(slow))[:sent])
        started = time.monotonic()
        assert closed_without_a_word(slow)
        assert time.monotonic() - started < 2
    assert eventually(lambda: served.reasons() == ["timeout"])


def test_a_proven_peer_that_never_takes_its_lane_leaves_it_free(serve: Any) -> None:
    served = serve(handshake_timeout_s=0.2)
    with dial(served) as undecided:
        claim = hs.Claim("tcp", served.epoch, 0, 0, os.urandom(32))
        undecided.sendall(hs.pack_proof(served.secret, claim, challenge(undecided)))
        undecided.recv(hs.ACCEPT_BYTES, socket.MSG_WAITALL)
        assert closed_without_a_word(undecided)
    lanes = connect(served)
    assert eventually(lambda: len(served.taken) == 2)
    close_all(lanes)


def test_many_silent_connections_keep_no_real_peer_out(serve: Any) -> None:
    served = serve(max_pending=16, handshake_timeout_s=30.0)
    silent = [dial(served) for _ in range(40)]
    started = time.monotonic()
    lanes = connect(served)
    assert time.monotonic() - started < 2
    assert eventually(lambda: len(served.taken) == 2)
    assert served.reasons().count("evicted") >= 24
    close_all(lanes)
    for sock in silent:
        sock.close()


def test_a_flood_of_new_connections_keeps_no_real_peer_out(serve: Any) -> None:
    served = serve(max_pending=32)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                dial(served).close()
            except OSError:
                continue

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        lanes = connect(served)
        assert eventually(lambda: len(served.taken) == 2)
        close_all(lanes)
    finally:
        stop.set()
        thread.join()


def test_a_withdrawn_generation_takes_no_lane_any_more(serve: Any) -> None:
    served = serve()
    served.listener.withdraw(SESSION, 0)
    with pytest.raises(LaneFailed):
        connect(served)
    assert served.taken == []


def test_a_generation_withdrawn_in_mid_handshake_takes_no_lane(serve: Any) -> None:
    served = serve()
    with dial(served) as sock:
        claim = hs.Claim("tcp", served.epoch, 0, 0, os.urandom(32))
        sock.sendall(hs.pack_proof(served.secret, claim, challenge(sock)))
        sock.recv(hs.ACCEPT_BYTES, socket.MSG_WAITALL)
        served.listener.withdraw(SESSION, 0)
        sock.sendall(hs.GO)
        assert closed_without_a_word(sock)
    assert eventually(lambda: served.reasons() == ["stale_generation"])
    assert served.taken == []


def test_the_next_generation_replaces_the_one_before(serve: Any) -> None:
    served = serve()
    secret = os.urandom(32)
    served.listener.serve(SESSION, served.epoch, 1, secret, LANES)
    served.listener.withdraw(SESSION, 0)
    with pytest.raises(LaneFailed):
        connect(served)
    lanes = connect(served, generation=1, secret=secret)
    assert eventually(lambda: [lane.generation for lane in served.taken] == [1, 1])
    close_all(lanes)


def test_several_hosts_are_served_at_one_port(serve: Any) -> None:
    try:
        served = serve(tcp_hosts=["127.0.0.1", "::1"])
        socket.create_connection(("::1", parse_address(served.listener.addresses("tcp")[1]).port)).close()
    except (OSError, IndexError) as cause:
        pytest.skip(f"this machine has no IPv6 loopback: {cause}")
    ports = {parse_address(address).port for address in served.listener.addresses("tcp")}
    assert len(ports) == 1


def test_the_offered_host_may_differ_from_the_bound_one(serve: Any) -> None:
    served = serve(tcp_hosts=[("127.0.0.1", "node-3")])
    (address,) = served.listener.addresses("tcp")
    assert parse_address(address).host == "node-3"


def test_kinds_that_are_off_are_not_offered(serve: Any) -> None:
    served = serve(tcp_hosts=(), local=True)
    assert [offer.kind for offer in served.listener.offers(LANES)] == ["local"]
    assert serve(local=False).listener.offers({"local": 2, "tcp": 0}) == ()


def test_a_host_that_cannot_be_bound_is_named(export: MemoryExport) -> None:
    from kvxfer.lanes.listener import LaneListener

    with pytest.raises(ConfigurationError, match="198.51.100.7"):
        LaneListener(
            tcp_hosts=["198.51.100.7"],
            local=False,
            memory=None,
            on_lane=lambda lane: None,
            on_refused=lambda *refusal: None,
        )


def test_close_ends_waiting_handshakes_and_is_idempotent(serve: Any) -> None:
    served = serve(handshake_timeout_s=30.0)
    with dial(served) as waiting:
        challenge(waiting)
        served.listener.close()
        served.listener.close()
        assert closed_without_a_word(waiting)
    with pytest.raises(Closed):
        served.listener.serve(SESSION, served.epoch, 1, served.secret, LANES)
    with pytest.raises(OSError) as refused:
        dial(served)
    assert refused.value.errno == errno.ECONNREFUSED


def test_a_callback_that_raises_does_not_end_the_listener(export: MemoryExport) -> None:
    from kvxfer.lanes.listener import LaneConnection, LaneListener

    taken: list[LaneConnection] = []

    def take(lane: LaneConnection) -> None:
        os.close(lane.fd)
        taken.append(lane)
        raise RuntimeError("not wanted")

    listener = LaneListener(
        tcp_hosts=["127.0.0.1"], local=False, memory=None, on_lane=take, on_refused=lambda *refusal: None
    )
    epoch, secret = os.urandom(16), os.urandom(32)
    try:
        for generation in range(2):
            listener.serve(SESSION, epoch, generation, secret, {"tcp": 1})
            _, lanes, _ = connect_lanes(
                listener.offers({"tcp": 1}),
                ("tcp",),
                epoch=epoch,
                generation=generation,
                secret=secret,
                timeout_s=5,
            )
            close_all(lanes)
            assert eventually(lambda n=generation: len(taken) == n + 1)
    finally:
        listener.close()
