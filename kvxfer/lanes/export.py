"""Prefill's pool as it is described to a decode on the same host: which memory, and how to reach it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import ConfigurationError, ProtocolViolation
from kvxfer.geometry import PoolGeometry, RegionMemory

MAX_FDS = 64
MAX_DESCRIPTION_BYTES = 1 << 20
PROBE_BYTES = 32
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
_HEADER = struct.Struct(f"<4sHHIQ{PROBE_BYTES}s")  # magic, version, n_fds, pid, probe address, probe
_MAGIC = b"KVXM"
_VERSION = 1
_COUNT = struct.Struct("<I")
_REGION = struct.Struct("<qQQQQ")  # fd index or -1, offset or address, page stride, page bytes, pages

RegionClaim = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class MemoryClaims:
    """What prefill claims of its memory; the native core checks it. Regions by [group][region] are
    ``(fd index or -1, offset in the fd or address, page_stride, page_bytes, n_pages)``."""

    regions: tuple[tuple[RegionClaim, ...], ...]
    n_fds: int
    pid: int
    probe_ptr: int
    probe: bytes


class MemoryExport:
    """A pool's memory, ready to be handed to a peer. Owns duplicates of the descriptors until ``close``. Thread-safe.

    ``fds`` are the memfds behind the pool; ``table_fd`` holds the source generations. The probe is a random value at a
    known address: a peer that reads it back has reached this very process.
    """

    def __init__(self, regions: tuple[tuple[RegionClaim, ...], ...], fds: Sequence[int], table_fd: int) -> None:
        self._probe = ctypes.create_string_buffer(os.urandom(PROBE_BYTES), PROBE_BYTES)
        self.claims = MemoryClaims(
            regions, len(fds), os.getpid(), ctypes.addressof(self._probe), bytes(self._probe.raw)
        )
        self.description = pack_claims(self.claims)
        self._fds = tuple(_duplicate(fd) for fd in (*fds, table_fd))

    @property
    def fds_to_send(self) -> tuple[int, ...]:
        """The memfds, then the generation table."""
        return self._fds

    def close(self) -> None:
        """Closes the duplicates; the memory itself is the pool's. Idempotent."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)


def export_memory(
    region_memory: Sequence[Sequence[RegionMemory]], geometry: PoolGeometry, table_fd: int
) -> MemoryExport:
    """Describes a pool: regions in memfds sealed against shrinking are to be mapped, all others to be read by
    ``process_vm_readv``, for which this process then lets processes of its user attach (Yama), as far as it may.

    Args:
        region_memory: by [group][region], as ``PagePool`` has it.
        geometry: the pool's, with the same groups and regions.
        table_fd: the sender's generation table.
    """
    index_of: dict[tuple[int, int], int] = {}
    fds: list[int] = []
    any_by_address = False
    groups = []
    for group, memories in zip(geometry.groups, region_memory, strict=True):
        claims = []
        for region, memory in zip(group.regions, memories, strict=True):
            index = _index_of(memory.fd, index_of, fds)
            any_by_address = any_by_address or index < 0
            at = memory.ptr if index < 0 else memory.fd_offset
            claims.append((index, at, region.page_stride, region.page_bytes, group.n_pages))
        groups.append(tuple(claims))
    if any_by_address:
        _allow_readers()
    return MemoryExport(tuple(groups), fds, table_fd)


def _index_of(fd: int, index_of: dict[tuple[int, int], int], fds: list[int]) -> int:
    """The descriptor's place among those to send, or -1 where its memory must be read by address."""
    if fd < 0 or not _is_sealed(fd):
        return -1
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    if key not in index_of:
        if len(fds) == MAX_FDS:
            return -1
        index_of[key] = len(fds)
        fds.append(fd)
    return index_of[key]


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _allow_readers() -> None:
    # Without Yama the call fails and is not needed; where it is refused, decode finds out and falls back to tcp.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


# ---- the description on the wire -------------------------------------------------------------------------------------


def pack_claims(claims: MemoryClaims) -> bytes:
    """Raises ConfigurationError where the pool has more regions than a description may hold."""
    parts = [
        _HEADER.pack(_MAGIC, _VERSION, claims.n_fds, claims.pid, claims.probe_ptr, claims.probe),
        _COUNT.pack(len(claims.regions)),
    ]
    for group in claims.regions:
        parts.append(_COUNT.pack(len(group)))
        parts.extend(_REGION.pack(*region) for region in group)
    packed = b"".join(parts)
    if len(packed) > MAX_DESCRIPTION_BYTES:
        raise ConfigurationError(
            "the pool has more regions than local lanes can describe; use tcp lanes only",
            n_bytes=len(packed),
            limit=MAX_DESCRIPTION_BYTES,
        )
    return packed


def parse_claims(data: bytes) -> MemoryClaims:
    """Raises ProtocolViolation for anything but one well-formed description; whether it is true is not asked here."""
    try:
        magic, version, n_fds, pid, probe_ptr, probe = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or n_fds > MAX_FDS:
            raise ProtocolViolation("the peer's memory is described in another way", kind="framing")
        (n_groups,) = _COUNT.unpack_from(data, _HEADER.size)
        at = _HEADER.size + _COUNT.size
        groups = []
        for _ in range(n_groups):
            (n_regions,) = _COUNT.unpack_from(data, at)
            at += _COUNT.size
            end = at + n_regions * _REGION.size
            if end > len(data):
                raise ProtocolViolation("the description of the peer's memory is cut short", kind="framing")
            groups.append(tuple(_REGION.iter_unpack(data[at:end])))
            at = end
    except struct.error as cause:
        raise ProtocolViolation("the description of the peer's memory is cut short", kind="framing") from cause
    if at != len(data):
        raise ProtocolViolation("the description of the peer's memory is followed by further bytes", kind="framing")
    for group in groups:
        for index, *_rest in group:
            if not -1 <= index < n_fds:
                raise ProtocolViolation("the description names a descriptor that was not sent", kind="framing")
    return MemoryClaims(tuple(groups), n_fds, pid, probe_ptr, bytes(probe))
