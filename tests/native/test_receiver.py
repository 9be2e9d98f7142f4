"""Decode's ends of the lanes as Python drives them: what it opens, what it is told, and what it may count on."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvxfer import _native
from kvxfer.geometry import SLICE_DTYPE

Bytes = npt.NDArray[np.uint8]

SESSION, GENERATION = 3, 7
EPOCH = bytes(range(16))
RESERVATION, LEG = 0x1122334455667788, 1
PAGE_BYTES, N_PAGES = 1024, 8
WRITE, RECORD, CONFIRM = 1, 2, 3
PINNED = 41
HEADER = struct.Struct("<IHHIIQQIIIIQQ")


class Frames:
    """A hand-written sender: numbers its frames and says exactly what it is told to."""

    def __init__(self, sock: socket.socket, lane: int) -> None:
        self.sock = sock
        self.lane = lane
        self.sequence = 0

    def send(self, kind: int, body: bytes, *, slice_ordinal: int = 0, first: int = 0, n_pages: int = 0) -> None:
        header = HEADER.pack(
            0x4658564B, kind, 0, GENERATION, self.lane, self.sequence, RESERVATION, LEG, 0, slice_ordinal, n_pages,
            first, len(body),
        )  # fmt: skip
        self.sequence += 1
        self.sock.sendall(header + body)


def record(aux: bytes = b"") -> bytes:
    body = struct.pack(
        "<IHHQ16sIIIIIIQQQQQ", 0x5258564B, 1, 1, RESERVATION, EPOCH, GENERATION, LEG, 0, 1, 0, 0, 0, 0, 0, 0, len(aux)
    )
    body += aux.ljust((len(aux) + 7) // 8 * 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def whole_pages(n_regions: int) -> bytes:
    slices = np.zeros(n_regions, SLICE_DTYPE)
    for region in range(n_regions):
        slices[region] = (0, region, 0, 0, region, 1, PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES)
    return slices.tobytes()


class Decode:
    """A pool of one group with two regions, and a receiver whose leg lies in pool pages 5, 2 and 7."""

    def __init__(self, verify: bool = True) -> None:
        self.pages: Bytes = np.full((2, N_PAGES, PAGE_BYTES), 0xA5, np.uint8)
        base = self.pages.ctypes.data
        span = N_PAGES * PAGE_BYTES
        self.queue = _native.CompletionQueue()
        pool = _native.PoolMap([[(base + r * span, PAGE_BYTES, PAGE_BYTES, N_PAGES) for r in range(2)]])
        self.receiver = _native.Receiver(self.queue, pool, SESSION, EPOCH, GENERATION, 1 << 16)
        self.receiver.open_leg(RESERVATION, LEG, verify, whole_pages(2), [(0, 16, u64(0, 1, 4), u64(5, 2, 7))])
        self.pending: list[tuple[int, int, int, int, int, int, bytes]] = []

    def connect(self, lane: int, kind: str = "tcp", source: _native.PeerMemory | None = None) -> Frames:
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        self.receiver.add_lane(lane, kind, theirs.detach(), source)
        return Frames(ours, lane)

    def event(self, kind: int) -> tuple[int, int, int, int, int, int, bytes]:
        """The next event of this kind; those before it are dropped."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            while self.pending:
                event = self.pending.pop(0)
                if event[0] == kind:
                    return event
            select.select([self.queue.fileno()], [], [], 0.1)
            self.pending += self.queue.poll()
        raise AssertionError(f"no event of kind {kind}")


def u64(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def random_bytes(n: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 160, n, dtype=np.uint8).tobytes()


@pytest.fixture
def decode() -> Iterator[Decode]:
    decode = Decode()
    yield decode
    decode.receiver.fence()


def test_a_page_lands_where_the_leg_has_it_and_the_record_follows(decode: Decode) -> None:
    frames = decode.connect(0)
    body = random_bytes(2 * PAGE_BYTES, 1)
    frames.send(WRITE, body, slice_ordinal=1, first=1, n_pages=2)
    frames.send(RECORD, record(b"aux"))
    event = decode.event(_native.RECORD)
    assert event == (_native.RECORD, SESSION, GENERATION, 0, RESERVATION, LEG, record(b"aux"))
    assert decode.pages[1, 2].tobytes() + decode.pages[1, 7].tobytes() == body
    assert (decode.pages[0] == 0xA5).all()

    bitmaps, folds, violations, landed = decode.receiver.report(RESERVATION, LEG)
    assert bitmaps == {0: bytes([0b101000])}
    assert folds.dtype == np.uint64 and folds.tolist() == [0]
    assert (violations, landed) == (0, 2 * PAGE_BYTES)
    digests = decode.receiver.digests(RESERVATION, LEG)
    expected = [xxhash.xxh3_64_intdigest(body[at : at + PAGE_BYTES]) for at in (0, PAGE_BYTES)]
    assert digests.tolist() == [0, 0, 0, expected[0], 0, expected[1]]


def test_a_complete_leg_reports_the_fold_that_python_computes(decode: Decode) -> None:
    frames = decode.connect(0)
    body = random_bytes(3 * PAGE_BYTES, 2)
    for region in range(2):
        frames.send(WRITE, body, slice_ordinal=region, n_pages=3)
    frames.send(RECORD, record())
    decode.event(_native.RECORD)
    _, folds, _, _ = decode.receiver.report(RESERVATION, LEG)
    # Pages of 16 tokens: four a fold.
    bound = _native.bind(
        decode.receiver.digests(RESERVATION, LEG), RESERVATION, EPOCH, LEG, 0,
        np.array([0, 1] * 3, np.uint32), np.zeros(6, np.uint32), u64(0, 0, 1, 1, 4, 4),
    )  # fmt: skip
    assert folds.tolist() == [xxhash.xxh3_64_intdigest(bound.tobytes())]


def test_a_duplicate_is_an_event_that_names_the_leg(decode: Decode) -> None:
    frames = decode.connect(0)
    for seed in (1, 2):
        frames.send(WRITE, random_bytes(PAGE_BYTES, seed), n_pages=1)
    event = decode.event(_native.VIOLATION)
    assert event[3:6] == (0, RESERVATION, LEG)
    assert event[6].startswith(b"duplicate: ")
    assert decode.pages[0, 5].tobytes() == random_bytes(PAGE_BYTES, 1)
    assert decode.receiver.report(RESERVATION, LEG)[2] == 1


def test_a_lane_says_when_it_is_up_and_why_it_is_down(decode: Decode) -> None:
    frames = decode.connect(4)
    assert decode.event(_native.LANE_UP)[:4] == (_native.LANE_UP, SESSION, GENERATION, 4)
    frames.sock.close()
    assert decode.event(_native.LANE_DOWN)[3:] == (4, 0, 0, b"eof")


def test_nothing_lands_after_revoke_and_the_lane_lives_on(decode: Decode) -> None:
    frames = decode.connect(0)
    decode.receiver.revoke(RESERVATION, LEG)
    decode.receiver.revoke(RESERVATION, 99)
    frames.send(WRITE, random_bytes(PAGE_BYTES, 1), n_pages=1)
    frames.send(RECORD, record())
    assert decode.event(_native.VIOLATION)[6] == b"record: of a revoked leg"
    assert (decode.pages == 0xA5).all()
    assert decode.receiver.sunk_frames() == 2


def test_fence_does_not_wait_for_a_peer_that_stopped_in_mid_frame(decode: Decode) -> None:
    frames = decode.connect(0)
    frames.send(WRITE, random_bytes(PAGE_BYTES, 1), n_pages=1)
    frames.sock.sendall(b"half a header")
    fencing = threading.Thread(target=decode.receiver.fence)
    fencing.start()
    fencing.join(5)
    assert not fencing.is_alive()
    with pytest.raises(OSError):
        frames.sock.sendall(b"x" * (1 << 20))
    with pytest.raises(_native.NativeError, match="fenced"):
        decode.connect(1)


def test_what_does_not_fit_is_refused_with_its_reason(decode: Decode) -> None:
    receiver = decode.receiver
    with pytest.raises(ValueError, match="bounds: page 8"):
        receiver.open_leg(1, 0, True, whole_pages(1), [(0, 16, u64(0), u64(N_PAGES))])
    with pytest.raises(ValueError, match="bounds: "):
        receiver.open_leg(1, 0, True, whole_pages(3), [(0, 16, u64(0), u64(0))])
    with pytest.raises(ValueError, match="bounds: "):
        receiver.open_leg(1, 0, True, whole_pages(1), [(0, 16, u64(0, 1), u64(0))])
    with pytest.raises(ValueError, match="duplicate: "):
        receiver.open_leg(RESERVATION, LEG, True, whole_pages(1), [(0, 16, u64(0), u64(0))])
    with pytest.raises(_native.NativeError, match="is not open"):
        receiver.report(1, 0)
    with pytest.raises(ValueError, match="source"):
        decode.connect(0, "local")


def test_forget_makes_the_leg_unknown_and_its_id_free(decode: Decode) -> None:
    decode.receiver.forget(RESERVATION, LEG)
    with pytest.raises(_native.NativeError):
        decode.receiver.digests(RESERVATION, LEG)
    decode.receiver.open_leg(RESERVATION, LEG, True, whole_pages(1), [(0, 16, u64(0), u64(0))])


class Prefill:
    """What a local lane reads: a sealed memfd with two regions of pages, and a generation table."""

    def __init__(self) -> None:
        self.memory = _native.SharedMemory(2 * N_PAGES * PAGE_BYTES, "source")
        self.table = _native.SharedMemory(4096, "table")
        self.pages = view(self.memory).reshape(2, N_PAGES, PAGE_BYTES)
        self.pages[:] = np.frombuffer(random_bytes(self.pages.size, 9), np.uint8).reshape(self.pages.shape)
        self.slots = view(self.table).view(np.uint64)
        self.slots[3] = PINNED
        self.probe: Bytes = np.frombuffer(random_bytes(64, 5), np.uint8).copy()

    def open(self, mapped: bool, probe: bytes | None = None) -> _native.PeerMemory:
        pidfd = os.pidfd_open(os.getpid())
        at = 0 if mapped else self.memory.ptr
        regions = [[(0 if mapped else -1, at + r * N_PAGES * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, N_PAGES)
                    for r in range(2)]]  # fmt: skip
        try:
            return _native.PeerMemory(
                os.getpid(), pidfd, regions, [self.memory.fd] if mapped else [], self.table.fd,
                self.probe.ctypes.data, self.probe.tobytes() if probe is None else probe,
            )  # fmt: skip
        finally:
            os.close(pidfd)


def view(memory: _native.SharedMemory) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.ptr))


@pytest.mark.parametrize(("mapped", "how"), [(True, "mapped"), (False, "process_vm_readv")])
def test_a_local_lane_copies_prefills_pages_and_confirms(decode: Decode, mapped: bool, how: str) -> None:
    prefill = Prefill()
    source = prefill.open(mapped)
    assert source.how == how
    frames = decode.connect(0, "local", source)
    del source
    pinned = struct.pack("<QQ", 3, PINNED)
    frames.send(WRITE, pinned + u64(6, 1).tobytes(), slice_ordinal=1, n_pages=2)
    frames.send(RECORD, pinned + record())
    decode.event(_native.RECORD)
    assert (decode.pages[1, 5] == prefill.pages[1, 6]).all()
    assert (decode.pages[1, 2] == prefill.pages[1, 1]).all()
    answer = HEADER.unpack(frames.sock.recv(HEADER.size, socket.MSG_WAITALL))
    assert answer[1] == CONFIRM and answer[6:8] == (RESERVATION, LEG)


def test_a_source_that_moved_on_is_not_counted(decode: Decode) -> None:
    prefill = Prefill()
    frames = decode.connect(0, "local", prefill.open(True))
    prefill.slots[3] += 1
    frames.send(WRITE, struct.pack("<QQ", 3, PINNED) + u64(6).tobytes(), n_pages=1)
    assert decode.event(_native.VIOLATION)[6].startswith(b"source: ")
    assert decode.receiver.report(RESERVATION, LEG)[0] == {0: b"\0"}


def test_a_peer_that_is_not_the_one_that_answered_is_refused() -> None:
    with pytest.raises(_native.NativeError, match="process_vm_readv"):
        Prefill().open(False, probe=b"something else")


def test_memory_that_can_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    table = _native.SharedMemory(4096, "table")
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(_native.NativeError, match="sealed"):
        _native.PeerMemory(os.getpid(), pidfd, [[(0, 0, 64, 64, 1)]], [fd], table.fd, 0, b"")
    os.close(fd)
    os.close(pidfd)
