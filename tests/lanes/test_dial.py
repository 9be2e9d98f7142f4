"""Dialling picks the first kind of lane that works, says why others do not, and reads only who answered."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import _native
from kvxfer.errors import LaneFailed, ProtocolViolation
from kvxfer.geometry import Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes import dial
from kvxfer.lanes.dial import Connected, connect_lanes
from kvxfer.lanes.export import MAX_FDS, MemoryClaims, MemoryExport, export_memory, pack_claims, parse_claims
from kvxfer.protocol.messages import LaneOffer

LANES = {"local": 2, "tcp": 2}
HERE = Path(__file__).parent


def connect(served: Any, kinds: tuple[str, ...] = ("local", "tcp"), **changes: Any) -> tuple[str, Any, dict[str, str]]:
    offers = changes.pop("offers", None) or served.listener.offers(LANES)
    what = {"epoch": served.epoch, "generation": 0, "secret": served.secret, "timeout_s": 5.0} | changes
    return connect_lanes(offers, kinds, **what)


def close_all(lanes: list[Connected]) -> None:
    for lane in lanes:
        lane.close()


@contextlib.contextmanager
def memory_peer(*kinds: str) -> Iterator[dict[str, Any]]:
    """A prefill process whose regions lie in memory of these kinds."""
    peer = subprocess.Popen(
        [sys.executable, str(HERE / "memory_peer.py"), *kinds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    try:
        yield json.loads(peer.stdout.readline())
    finally:
        peer.stdin.close()
        peer.stdout.close()
        peer.wait(10)


def dial_peer(peer: dict[str, Any], kinds: tuple[str, ...] = ("local", "tcp")) -> tuple[str, Any, dict[str, str]]:
    return connect_lanes(
        [LaneOffer(*offer) for offer in peer["offers"]],
        kinds,
        epoch=bytes.fromhex(peer["epoch"]),
        generation=0,
        secret=bytes.fromhex(peer["secret"]),
        timeout_s=5,
    )


# ---- the peer's memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        (("sealed", "sealed"), "mapped"),
        (("raw",), "process_vm_readv"),
        (("sealed", "raw"), "mixed"),
        (("unsealed",), "process_vm_readv"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value,
)
def test_another_process_is_read_as_its_memory_allows(kinds: tuple[str, ...], how: str) -> None:
    with memory_peer(*kinds) as peer:
        kind, lanes, reasons = dial_peer(peer)
        assert (kind, reasons) == ("local", {})
        assert lanes[0].peer_memory.how == how
        close_all(lanes)


def test_where_process_vm_readv_is_forbidden_the_lane_falls_back_to_tcp_and_says_why() -> None:
    with memory_peer("raw") as peer:
        found = subprocess.run(
            [sys.executable, str(HERE / "dial_without_readv.py")],
            input=json.dumps(peer) + "\n",
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    result = json.loads(found.stdout)
    if "unavailable" in result:
        pytest.skip(f"system calls cannot be filtered here: {result['unavailable']}")
    assert result["kind"] == "tcp"
    assert "process_vm_readv" in result["reasons"]["local"]


def test_a_pid_that_belongs_to_another_process_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        with memory_peer("raw") as peer:
            monkeypatch.setattr(dial, "peer_credentials", lambda sock: (other.pid, os.geteuid()))
            kind, lanes, reasons = dial_peer(peer)
            assert kind == "tcp"
            assert str(other.pid) in reasons["local"]
            close_all(lanes)
    finally:
        other.kill()
        other.wait()


def test_a_pid_that_the_kernel_does_not_vouch_for_must_be_what_the_peer_calls_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with memory_peer("sealed") as peer:
        monkeypatch.setattr(dial, "peer_credentials", lambda sock: (os.getpid(), os.geteuid()))
        monkeypatch.setattr(dial, "peer_pidfd", lambda sock, pid: (os.pidfd_open(pid), False))
        kind, lanes, reasons = dial_peer(peer)
        assert kind == "tcp"
        assert "not the one that answered" in reasons["local"]
        close_all(lanes)


def test_a_process_of_another_user_is_not_asked_and_not_answered(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.lanes import listener

    served = serve()
    monkeypatch.setattr(listener, "peer_credentials", lambda sock: (1, os.geteuid() + 1))
    with pytest.raises(LaneFailed):
        connect(served, ("local",))
    until = time.monotonic() + 5
    while not served.refused and time.monotonic() < until:
        time.sleep(0.001)
    assert served.reasons() == ["foreign_user"]
    monkeypatch.undo()
    monkeypatch.setattr(dial, "peer_credentials", lambda sock: (1, os.geteuid() + 1))
    with pytest.raises(LaneFailed) as refused:
        connect(served, ("local",))
    assert "user" in refused.value.details["reasons"]["local"]


def claims_of(n_regions: int) -> PoolGeometry:
    region = Region("layer", "uint8", 4096, 4096, unit_bytes=4096)
    return PoolGeometry((Group("kv", 16, 1, (region,) * n_regions),))


def test_regions_of_one_memfd_share_one_descriptor_and_those_beyond_the_bound_are_read_by_address() -> None:
    table = _native.SharedMemory(4096, "table")
    shared = _native.SharedMemory(4096 * 3, "shared")
    many = [_native.SharedMemory(4096, "one") for _ in range(MAX_FDS + 5)]
    regions = [RegionMemory(shared.ptr + i * 4096, 4096, shared.fd, i * 4096) for i in range(3)]
    regions += [RegionMemory(memory.ptr, 4096, memory.fd) for memory in many]
    exported = export_memory([regions], claims_of(len(regions)), table.fd)
    try:
        (claims,) = exported.claims.regions
        assert exported.claims.n_fds == MAX_FDS
        assert len(exported.fds_to_send) == MAX_FDS + 1
        assert [claim[:2] for claim in claims[:3]] == [(0, 0), (0, 4096), (0, 8192)]
        by_address = [claim for claim in claims if claim[0] == -1]
        assert [claim[1] for claim in by_address] == [memory.ptr for memory in many[-6:]]
    finally:
        exported.close()


def test_a_memfd_that_may_shrink_is_never_offered_for_mapping() -> None:
    table = _native.SharedMemory(4096, "table")
    fd = os.memfd_create("kvxfer-test-unsealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    exported = export_memory([[RegionMemory(0x7000, 4096, fd)]], claims_of(1), table.fd)
    try:
        assert exported.claims.n_fds == 0
        assert exported.claims.regions == (((-1, 0x7000, 4096, 4096, 1),),)
    finally:
        exported.close()
        os.close(fd)


def test_a_long_description_arrives_whole(serve: Any) -> None:
    table = _native.SharedMemory(4096, "table")
    n_regions = 20_000
    memory = _native.SharedMemory(4096, "pool")
    regions = [[RegionMemory(memory.ptr, 4096, memory.fd)] * n_regions]
    exported = export_memory(regions, claims_of(n_regions), table.fd)
    assert len(exported.description) > 500_000
    kind, lanes, _ = connect(serve(memory=exported), ("local",))
    assert (kind, lanes[0].peer_memory.how) == ("local", "mapped")
    close_all(lanes)


def test_an_export_owns_sealed_descriptors_that_no_child_inherits(export: MemoryExport) -> None:
    for fd in export.fds_to_send:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in export.fds_to_send)


def test_a_description_comes_back_equal(export: MemoryExport) -> None:
    assert parse_claims(export.description) == export.claims


@given(data=st.binary(max_size=200))
def test_random_descriptions_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_claims(data)


@given(data=st.data())
def test_a_cut_or_changed_description_is_refused_or_names_only_what_was_sent(data: st.DataObject) -> None:
    claims = MemoryClaims((((0, 0, 1, 1, 1), (-1, 5, 1, 1, 1)), ((1, 0, 2, 2, 2),)), 2, 1, 7, bytes(32))
    packed = bytearray(pack_claims(claims))
    packed = packed[: data.draw(st.integers(0, len(packed)))]
    if packed:
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse_claims(bytes(packed))
    except ProtocolViolation:
        return
    assert all(-1 <= region[0] < found.n_fds <= MAX_FDS for group in found.regions for region in group)


# ---- which kind ------------------------------------------------------------------------------------------------------


def test_the_first_offer_that_decode_accepts_is_taken(serve: Any) -> None:
    for kinds, expected in ((("local", "tcp"), "local"), (("tcp", "local"), "local"), (("tcp",), "tcp")):
        kind, lanes, reasons = connect(serve(), kinds)
        assert (kind, reasons, len(lanes)) == (expected, {}, 2)
        assert all((lane.peer_memory is None) == (kind == "tcp") for lane in lanes)
        close_all(lanes)


def test_all_local_lanes_share_one_view_of_the_peers_memory(serve: Any) -> None:
    _, lanes, _ = connect(serve(), ("local",))
    assert lanes[0].peer_memory is lanes[1].peer_memory
    close_all(lanes)


def test_a_local_socket_that_is_not_here_falls_back_to_tcp(serve: Any) -> None:
    served = serve()
    local, tcp = served.listener.offers(LANES)
    elsewhere = LaneOffer("local", ("@kvxfer-of-another-host",), 2)
    kind, lanes, reasons = connect(served, offers=(elsewhere, tcp))
    assert kind == "tcp"
    assert "another host" in reasons["local"]
    close_all(lanes)


def test_the_second_address_is_tried_when_the_first_does_not_answer(serve: Any) -> None:
    served = serve()
    (address,) = served.listener.addresses("tcp")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        unused = f"127.0.0.1:{nobody.getsockname()[1]}"
        kind, lanes, _ = connect(served, offers=(LaneOffer("tcp", (unused, address), 2),))
    assert kind == "tcp"
    close_all(lanes)


def test_the_host_of_the_control_plane_is_tried_where_the_offered_one_cannot_be_reached(serve: Any) -> None:
    served = serve(tcp_hosts=[("127.0.0.1", "127.0.0.2")])
    with pytest.raises(LaneFailed):
        connect(served, ("tcp",))
    kind, lanes, _ = connect(served, ("tcp",), control_host="127.0.0.1")
    assert kind == "tcp"
    close_all(lanes)


def test_where_no_kind_works_the_error_has_the_reason_of_each(serve: Any) -> None:
    served = serve(local=False)
    with pytest.raises(LaneFailed) as refused:
        connect(served, ("local", "tcp"), secret=bytes(32))
    assert refused.value.retryable
    assert refused.value.details["reasons"]["local"] == "not offered by the peer"
    assert "proof" in refused.value.details["reasons"]["tcp"]


@pytest.mark.parametrize(
    "offer",
    [
        LaneOffer("tcp", (), 1),
        LaneOffer("tcp", ("no port",), 1),
        LaneOffer("tcp", ("127.0.0.1:1",), 0),
        LaneOffer("tcp", ("127.0.0.1:1",), 10_000),
        LaneOffer("local", ("no-at-sign",), 1),
        LaneOffer("local", ("@" + "x" * 500,), 1),
        LaneOffer("local", ("@\0",), 1),
    ],
    ids=str,
)
def test_a_nonsensical_offer_is_an_error_and_not_a_crash(serve: Any, offer: LaneOffer) -> None:
    with pytest.raises(LaneFailed):
        connect(serve(), offers=(offer,))


# ---- peers that do not play along ------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(talk: Callable[[socket.socket], None]) -> Iterator[LaneOffer]:
    """A server that is not ours, in a thread; ``talk`` has one connection at a time."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):
            while not ended.is_set():
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    talk(connection)
                    ended.wait(5)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield LaneOffer("tcp", (f"127.0.0.1:{listening.getsockname()[1]}",), 1)
    finally:
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def failure(serve: Any, offer: LaneOffer, timeout_s: float = 5.0) -> str:
    with pytest.raises(LaneFailed) as refused:
        connect(serve(), offers=(offer,), timeout_s=timeout_s)
    return str(refused.value.details["reasons"]["tcp"])


def test_a_silent_peer_costs_no_more_than_the_deadline(serve: Any) -> None:
    with stranger(lambda connection: None) as offer:
        started = time.monotonic()
        assert "in time" in failure(serve, offer, timeout_s=0.3)
        assert time.monotonic() - started < 2


def test_a_silent_peer_leaves_time_for_the_kind_behind_it(serve: Any) -> None:
    served = serve()
    _, tcp = served.listener.offers(LANES)
    with socket.socket(socket.AF_UNIX) as silent:
        name = f"kvxfer-silent-{os.getpid()}"
        silent.bind(b"\0" + name.encode())
        silent.listen()
        kind, lanes, reasons = connect(served, offers=(LaneOffer("local", (f"@{name}",), 1), tcp), timeout_s=0.6)
    assert kind == "tcp" and "in time" in reasons["local"]
    close_all(lanes)


def test_another_service_on_the_port_is_recognised(serve: Any) -> None:
    with stranger(lambda connection: connection.sendall(b"SSH-2.0-server\r\n" * 10)) as offer:
        assert "does not answer as a lane" in failure(serve, offer)


def test_a_peer_that_cannot_prove_the_secret_is_not_used(serve: Any) -> None:
    from kvxfer.lanes import handshake as hs

    def impostor(connection: socket.socket) -> None:
        connection.sendall(hs.pack_challenge(bytes(32)))
        connection.recv(hs.PROOF_BYTES, socket.MSG_WAITALL)
        connection.sendall(bytes(hs.ACCEPT_BYTES))

    with stranger(impostor) as offer:
        assert "did not prove" in failure(serve, offer)


def test_failed_and_closed_lanes_leave_no_descriptor_behind(serve: Any) -> None:
    served = serve()
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(1, 6):
        served.listener.serve(3, served.epoch, generation, served.secret, LANES)
        _, lanes, _ = connect(served, ("local",), generation=generation)
        close_all(lanes)
        with pytest.raises(LaneFailed):
            connect(served, secret=bytes(32))
    until = time.monotonic() + 5
    while len(served.taken) < 10 and time.monotonic() < until:
        time.sleep(0.001)
    lanes.clear()
    assert len(os.listdir("/proc/self/fd")) <= before + len(served.taken)
