"""Prefill's ends of the lanes as Python sees them: frames and records by hand, digests against the xxhash package."""

from __future__ import annotations

import gc
import select
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvxfer import _native
from kvxfer.geometry import SLICE_DTYPE
from kvxfer.protocol import record as records

Bytes = npt.NDArray[np.uint8]
Completion = tuple[int, int, int, int, int, int, bytes]

SESSION, GENERATION, RESERVATION = 3, 7, 2**63 + 5
EPOCH = bytes(range(16))
PAGES, PAGE_BYTES, REGIONS = 8, 4096, 2
HEADER = struct.Struct("<IHHIIQQIIIIQQ")
WRITE, RECORD = 1, 2


class Rig:
    """A sender with one tcp lane, and the reader's end of it."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.memory = rng.integers(0, 256, (REGIONS, PAGES, PAGE_BYTES), dtype=np.uint8)
        self.completions = _native.CompletionQueue()
        pool = _native.PoolMap([[(self.memory[r].ctypes.data, PAGE_BYTES, PAGE_BYTES, PAGES) for r in range(REGIONS)]])
        self.sender = _native.Sender(self.completions, pool)
        self.sender.open_session(SESSION, EPOCH, GENERATION, 1)
        ours, self.reader = socket.socketpair()
        self.sender.add_lane(SESSION, GENERATION, 0, "tcp", ours.detach())
        self.reader.settimeout(5)

    def attach(self, grant: _native.SourceGrant, logical: list[int], reservation: int = RESERVATION) -> None:
        slices = np.zeros(REGIONS, SLICE_DTYPE)
        for region in range(REGIONS):
            slices[region] = (0, region, 0, 0, region, 1, PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES)
        groups = [(0, 16, 0, np.array(logical, np.uint64))]
        grant.attach(SESSION, GENERATION, reservation, 0, True, True, (0,), slices.tobytes(), groups)

    def frame(self) -> tuple[tuple[int, ...], bytes]:
        header = HEADER.unpack(self.read(HEADER.size))
        return header, self.read(header[-1])

    def read(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            part = self.reader.recv(count - len(got))
            assert part, "the lane ended"
            got += part
        return got

    def event(self, kind: int) -> Completion:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            select.select([self.completions.fileno()], [], [], 0.5)
            for event in self.completions.poll():
                if event[0] == kind:
                    return event
        raise AssertionError(f"no event of kind {kind}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.sender.close()
    rig.reader.close()


def write(grant: _native.SourceGrant, logical: list[int], pages: list[int], regions: list[int] | None = None) -> int:
    wanted = list(range(REGIONS)) if regions is None else regions
    return grant.write(0, np.array(logical, np.uint64), np.array(pages, np.uint64), np.array(wanted, np.uint32))


def test_written_pages_arrive_and_the_record_parses_as_the_protocol_says(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    rig.attach(grant, [0, 1])
    assert write(grant, [0, 1], [5, 2]) == 4 * PAGE_BYTES
    grant.commit(32, b"aux")

    chunks = {}
    for sequence in range(3):
        header, body = rig.frame()
        assert header[1] == (WRITE if sequence < 2 else RECORD)
        assert header[3:9] == (GENERATION, 0, sequence, RESERVATION, 0, 0)
        if header[1] == WRITE:
            slice_ordinal, n_pages, first = header[9:12]
            for i in range(n_pages):
                chunks[first + i, slice_ordinal] = body[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
    assert chunks == {(k, r): rig.memory[r, page].tobytes() for k, page in enumerate((5, 2)) for r in range(REGIONS)}

    record = records.parse(body)
    assert record.bitmap == 0b1111
    assert record.epoch == EPOCH
    assert record.aux == b"aux"
    assert record.n_tokens == 32
    assert record.ranges == ((0, 0, 32),)
    content = [xxhash.xxh3_64_intdigest(chunks[k, r]) for k in range(2) for r in range(REGIONS)]
    assert grant.digests(SESSION, RESERVATION, 0, 4).tolist() == content
    bound = _native.bind(
        np.array(content, np.uint64), RESERVATION, EPOCH, 0, 0, np.array([0, 1, 0, 1], np.uint32),
        np.zeros(4, np.uint32), np.array([0, 0, 1, 1], np.uint64),
    )  # fmt: skip
    assert record.folds.tolist() == [xxhash.xxh3_64_intdigest(bound.tobytes())]


def test_a_committed_leg_drains_with_its_counts(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    rig.attach(grant, [0, 1])
    write(grant, [0, 1], [0, 1])
    grant.commit(32, b"")
    kind, session, generation, lane, reservation, leg, data = rig.event(_native.LEG_DRAINED)
    assert (session, generation, lane, reservation, leg) == (SESSION, GENERATION, -1, RESERVATION, 0)
    assert struct.unpack("<Q", data) == (4,)


def test_lanes_are_reported_up_and_down(rig: Rig) -> None:
    assert rig.event(_native.LANE_UP)[1:4] == (SESSION, GENERATION, 0)
    grant = rig.sender.grant(1)
    rig.attach(grant, [0])
    rig.reader.close()
    down = rig.event(_native.LANE_DOWN)
    assert down[1:4] == (SESSION, GENERATION, 0)
    assert down[6] == b"eof"


def test_refusals_are_value_errors_that_name_their_kind(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    write(grant, [1], [1])
    with pytest.raises(ValueError, match="^duplicate: logical page 1 of group 0"):
        write(grant, [0, 1], [0, 1])
    with pytest.raises(ValueError, match="^bounds: source page 8 of group 0, which has 8"):
        write(grant, [2], [PAGES])
    with pytest.raises(ValueError, match="^bounds: region 2"):
        write(grant, [2], [2], [2])
    assert grant.written() == REGIONS
    assert grant.highest_logical(0) == 1
    assert grant.highest_logical(1) == -1


def test_a_closed_grant_raises_a_runtime_error_that_says_so(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    grant.commit(0, b"")
    with pytest.raises(RuntimeError, match="^closed: "):
        write(grant, [0], [0])
    with pytest.raises(RuntimeError, match="^closed: "):
        grant.commit(0, b"")


def test_a_lane_of_the_wrong_generation_is_a_native_error_and_leaves_the_socket_alone(rig: Rig) -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(_native.NativeError, match="generation"):
        rig.sender.add_lane(SESSION, GENERATION + 1, 0, "tcp", ours.fileno())
    with pytest.raises(_native.NativeError, match="already connected"):
        rig.sender.add_lane(SESSION, GENERATION, 0, "tcp", ours.fileno())
    with pytest.raises(ValueError, match="tcp or local"):
        rig.sender.add_lane(SESSION, GENERATION, 0, "carrier pigeon", ours.fileno())
    ours.sendall(b"still ours")
    assert theirs.recv(16) == b"still ours"
    ours.close()
    theirs.close()


def test_pages_a_reader_did_not_reserve_are_counted(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    write(grant, [0, 1], [0, 1])
    rig.attach(grant, [1, 2])
    write(grant, [2, 3], [2, 3])
    assert grant.skipped(RESERVATION) == 2 * REGIONS
    assert grant.skipped(RESERVATION + 1) == 0


def test_an_aborted_leg_drains_and_gets_nothing_more(rig: Rig) -> None:
    grant = rig.sender.grant(1)
    rig.attach(grant, [0])
    grant.close_admission(SESSION, RESERVATION)
    assert rig.event(_native.LEG_DRAINED)[6] == bytes(8)
    write(grant, [0], [0])
    grant.detach(SESSION, RESERVATION)
    grant.close()
    assert not select.select([rig.reader], [], [], 0.05)[0]


def test_a_grant_keeps_its_sender_and_the_sender_its_queue() -> None:
    rig = Rig()
    grant = rig.sender.grant(1)
    rig.attach(grant, [0])
    reader, memory = rig.reader, rig.memory
    del rig
    gc.collect()
    write(grant, [0], [0], [0])
    reader.settimeout(5)
    header = HEADER.unpack(reader.recv(HEADER.size, socket.MSG_WAITALL))
    assert reader.recv(header[-1], socket.MSG_WAITALL) == memory[0, 0].tobytes()
    del grant
    gc.collect()
    assert reader.recv(1) == b""
    reader.close()


def test_a_local_lane_names_pages_and_the_slot_that_pins_them() -> None:
    memory = np.ones((PAGES, PAGE_BYTES), np.uint8)
    completions = _native.CompletionQueue()
    pool = _native.PoolMap([[(memory.ctypes.data, PAGE_BYTES, PAGE_BYTES, PAGES)]])
    sender = _native.Sender(completions, pool)
    sender.open_session(SESSION, EPOCH, GENERATION, 1)
    ours, reader = socket.socketpair()
    sender.add_lane(SESSION, GENERATION, 0, "local", ours.detach())
    table = np.memmap(f"/proc/self/fd/{sender.generation_table_fd}", np.uint64, "r")
    grant = sender.grant(1)
    slices = np.array([(0, 0, 0, 0, 0, 1, PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES)], SLICE_DTYPE)
    groups = [(0, 16, 0, np.arange(2, dtype=np.uint64))]
    grant.attach(SESSION, GENERATION, RESERVATION, 0, True, False, [0], slices.tobytes(), groups)
    write(grant, [0, 1], [6, 3], [0])
    reader.settimeout(5)
    body = reader.recv(HEADER.size + 16 + 16, socket.MSG_WAITALL)[HEADER.size :]
    slot, expected, first, second = struct.unpack("<4Q", body)
    assert (first, second) == (6, 3)
    assert table[slot] == expected
    grant.close_admission(SESSION, RESERVATION)
    assert table[slot] > expected
    sender.close()
    reader.close()
