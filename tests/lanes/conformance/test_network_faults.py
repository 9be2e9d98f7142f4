"""What a network, or a peer that stops reading, does to a lane: nothing false is accepted, and sources are let go."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import VerificationFailed
from kvxfer.hosts import parse_address
from kvxfer.lanes import handshake as hs
from kvxfer.protocol.messages import LaneOffer

FIRST_FRAME_AT = hs.CHALLENGE_BYTES + hs.ACCEPT_BYTES
Change = Callable[[int, bytes], bytes]

tcp_only = pytest.mark.parametrize("kind", ["tcp"])
local_only = pytest.mark.parametrize("kind", ["local-mapped", "local-process_vm_readv"])


@contextlib.contextmanager
def relay_that(change: Change) -> Iterator[Callable[[LaneOffer], LaneOffer]]:
    """A middleman for tcp lanes; ``change(offset, bytes)`` sees what prefill sends, counted from each connection's
    start, and returns what decode gets. ConnectionError cuts the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = [listening]
    targets: list[tuple[str, int]] = []

    def pump(source: socket.socket, target: socket.socket, alter: Change) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(alter(offset, data))
                offset += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                decode, _ = listening.accept()
                prefill = socket.create_connection(targets[0])
                sockets.extend((decode, prefill))
                for arguments in ((prefill, decode, change), (decode, prefill, lambda offset, data: data)):
                    threads.append(threading.Thread(target=pump, args=arguments, daemon=True))
                    threads[-1].start()

    def relay(offer: LaneOffer) -> LaneOffer:
        where = parse_address(offer.addresses[0])
        targets.append((where.host, where.port))
        threads.append(threading.Thread(target=accept, daemon=True))
        threads[-1].start()
        return LaneOffer(offer.kind, (f"127.0.0.1:{listening.getsockname()[1]}",), offer.lanes)

    try:
        yield relay
    finally:
        for sock in list(sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in threads:
            thread.join(5)


def flip_bit_at(place: int) -> Change:
    def change(offset: int, data: bytes) -> bytes:
        if offset <= place < offset + len(data):
            changed = bytearray(data)
            changed[place - offset] ^= 0x04
            return bytes(changed)
        return data

    return change


@tcp_only
@pytest.mark.parametrize("into_body", [0, 1, 4095, 4096, 8 * 4096 - 1])
def test_a_bit_flipped_on_the_wire_is_found(make_rig: Callable[..., Any], into_body: int) -> None:
    with relay_that(flip_bit_at(FIRST_FRAME_AT + 64 + into_body)) as relay:
        rig = make_rig(n_lanes=1, relay=relay)
        leg = rig.offer(1)
        grant = rig.grant(leg)
        rig.write(grant, leg)
        grant.commit(leg.end_token, b"")
        with pytest.raises(VerificationFailed) as refused:
            rig.delivered(leg)
        assert refused.value.details["kind"] == "digest"
        assert int(leg.pool[into_body // 4096]) in refused.value.details["pool_pages"]["kv"]
        rig.close()


@tcp_only
def test_without_a_flipped_bit_the_same_way_is_accepted(make_rig: Callable[..., Any]) -> None:
    with relay_that(lambda offset, data: data) as relay:
        rig = make_rig(n_lanes=1, relay=relay)
        leg = rig.offer(1)
        grant = rig.grant(leg)
        rig.write(grant, leg)
        grant.commit(leg.end_token, b"")
        rig.delivered(leg)
        assert rig.landed(leg)
        rig.close()


@tcp_only
@pytest.mark.parametrize("field", range(0, 64, 8))
def test_a_bit_flipped_in_a_header_is_never_accepted_and_moves_nothing_outside(
    make_rig: Callable[..., Any], field: int
) -> None:
    with relay_that(flip_bit_at(FIRST_FRAME_AT + field)) as relay:
        rig = make_rig(n_lanes=1, relay=relay)
        leg = rig.offer(1)
        grant = rig.grant(leg)
        rig.write(grant, leg)
        grant.commit(leg.end_token, b"")
        until = time.monotonic() + 5
        while not (rig.decode.of(_native.RECORD) or rig.decode.of(_native.LANE_DOWN)) and time.monotonic() < until:
            if rig.decode.of(_native.VIOLATION):
                break
            time.sleep(0.001)
        with pytest.raises(VerificationFailed):
            rig.judge(leg)
        rig.receiver.fence()
        assert rig.untouched(rig.others(leg))
        rig.close()


@tcp_only
def test_a_connection_cut_in_mid_frame_fails_the_leg_on_both_sides(make_rig: Callable[..., Any]) -> None:
    def cut(offset: int, data: bytes) -> bytes:
        if offset + len(data) > FIRST_FRAME_AT + 64 + 1000:
            raise ConnectionError
        return data

    with relay_that(cut) as relay:
        rig = make_rig(n_lanes=1, relay=relay)
        leg = rig.offer(1)
        grant = rig.grant(leg)
        rig.write(grant, leg)
        rig.decode.wait(_native.LANE_DOWN)
        rig.prefill.wait(_native.LEG_FAILED)
        with pytest.raises(VerificationFailed):
            rig.judge(leg)
        rig.close()


# ---- a decode that stopped reading -----------------------------------------------------------------------------------


def test_sources_are_let_go_although_decode_reads_nothing_any_more(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(deaf=True, page_bytes=1 << 18, n_pages=64)
    leg = rig.offer(1, 64)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    time.sleep(0.05)
    started = time.monotonic()
    grant.close_admission(5, leg.reservation)
    rig.prefill.wait(_native.LEG_DRAINED)
    assert time.monotonic() - started < 1
    grant.close()
    rig.source[:] = 0xC3  # the pages are another request's now
    for ear in rig.ears:
        ear.settimeout(0.2)
        assert b"\xc3" * 64 not in everything(ear)


def everything(sock: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(OSError):
        while data := sock.recv(1 << 20):
            found += data
    return bytes(found)


def test_a_deaf_decode_does_not_hold_up_the_end_of_the_session(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(deaf=True, page_bytes=1 << 18, n_pages=64)
    leg = rig.offer(1, 64)
    grant = rig.grant(leg)
    rig.write(grant, leg)
    started = time.monotonic()
    rig.sender.close_session(5, 2)
    assert time.monotonic() - started < 1
    rig.prefill.wait(_native.LEG_FAILED)
    grant.close()


# ---- sources that may have been reused (local) -----------------------------------------------------------------------


@local_only
@pytest.mark.parametrize("verify", [True, False], ids=["digest", "coverage"])
@pytest.mark.parametrize("when", ["before the write", "before the record"])
def test_a_source_generation_that_was_raised_is_never_accepted(
    make_rig: Callable[..., Any], when: str, verify: bool
) -> None:
    rig = make_rig(hostile=True, n_lanes=1)
    slots = np.frombuffer(rig.table_bytes(), np.uint64)
    leg = rig.offer(1, verify=verify)
    writes = rig.all_writes(leg)
    record = rig.record_frame(0, leg, rig.record(0, leg, rig.all_chunks(leg)))
    if when == "before the record":
        rig.say(0, *writes)
        until = time.monotonic() + 5
        while rig.report(leg).bytes_landed < leg.layout.total_bytes and time.monotonic() < until:
            time.sleep(0.001)
        slots[0] += 1
        rig.say(0, record)
    else:
        slots[0] += 1
        rig.say(0, *writes, record)
    rig.decode.wait(_native.VIOLATION)
    assert any(event.text.startswith("source") for event in rig.decode.of(_native.VIOLATION))
    with pytest.raises(VerificationFailed):
        rig.judge(leg)


@local_only
def test_source_pages_outside_prefills_pool_are_not_read(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(hostile=True, n_lanes=1)
    leg = rig.offer(1)
    for page in (rig.n_pages, 2**40, 2**64 - 1):
        rig.say(0, rig.write_frame(0, leg, 0, 0, source=np.array([page], np.uint64)))
    rig.decode.wait(_native.VIOLATION)
    rig.receiver.fence()
    assert rig.untouched(range(rig.n_pages))
    with pytest.raises(VerificationFailed):
        rig.judge(leg)


@local_only
def test_a_slot_outside_the_generation_table_is_never_accepted(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(hostile=True, n_lanes=1)
    leg = rig.offer(1)
    for slot in (1 << 20, 2**64 - 1):
        body = struct.pack("<QQ", slot, 0) + leg.source[:1].tobytes()
        rig.say(0, rig.write_frame(0, leg, 0, 0, body=body))
    rig.decode.wait(_native.VIOLATION)
    with pytest.raises(VerificationFailed):
        rig.judge(leg)
