"""The C++ core. Every call that may take longer than a few microseconds releases the GIL. Thread-safe throughout.

Arrays are C-contiguous NumPy arrays; pointers are plain integers. Nothing here knows of ZeroMQ, keys or policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

class NativeError(RuntimeError):
    """A failed call of the core: message names the call and errno."""

# ---- digest ----------------------------------------------------------------------------------------------------------

def xxh3_64(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> int: ...
def digest_scattered(ptrs: U64, chunk_bytes: int, threads: int = 1) -> U64:
    """XXH3-64 of each chunk of ``chunk_bytes`` contiguous bytes at ``ptrs``."""

def digest_strided(ptrs: U64, runs: int, run_bytes: int, stride: int) -> U64:
    """XXH3-64 of each chunk made of ``runs`` runs of ``run_bytes``, ``stride`` apart, concatenated."""

def copy_scattered(dst: U64, src: U64, chunk_bytes: int, threads: int = 1) -> None:
    """memcpy per chunk: the bench's limit."""

def copy_digest_scattered(dst: U64, src: U64, chunk_bytes: int, threads: int = 1) -> U64:
    """One fused pass: copy each chunk and return its XXH3-64."""

def bind(
    content: U64, reservation: int, epoch: bytes, leg: int, group: int, region: U32, slice: U32, logical: U64
) -> U64:
    """XXH3-64 of the 64 little-endian bytes (content u64, reservation u64, epoch 16 B, leg u32, group u32, region u32,
    slice u32, logical u64, 8 zero bytes) for each element; region, slice, logical have content's length."""

def isa() -> str:
    """The vector path in use: avx512, avx2, neon or scalar."""

# ---- memory ----------------------------------------------------------------------------------------------------------

class SharedMemory:
    """A memfd of ``nbytes``, mapped read-write, sealed against shrinking and growing; unmapped when collected."""

    def __init__(self, nbytes: int, name: str, huge_pages: bool = False) -> None: ...
    ptr: int
    nbytes: int
    fd: int
    def close(self) -> None: ...

def zero_runs(bases: U64, runs: int, stride: int, nbytes: int) -> None:
    """For each base: zero ``runs`` runs of ``nbytes``, ``stride`` apart."""

class PoolMap:
    """A pool's memory by [group][region]: tuples (ptr, page_stride, page_bytes, n_pages)."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, int, int, int]]]) -> None: ...

# ---- completions -----------------------------------------------------------------------------------------------------

# kinds of completion
LANE_UP: int
LANE_DOWN: int  # data: cause
RECORD: int  # data: the record's bytes; everything posted before it on this lane has landed
VIOLATION: int  # data: what was refused; reservation and leg where one was named
LEG_DRAINED: int  # sender: admission closed, all writes (and records) accepted or confirmed; data: u64 chunks a lane
LEG_FAILED: int  # sender: data: cause, "source_changed: ..." or "lane: ..."

class CompletionQueue:
    """Unbounded in events per reservation and lane (which are few), one eventfd."""

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def poll(self) -> list[tuple[int, int, int, int, int, int, bytes]]:
        """Drains the eventfd and returns all events: (kind, session, generation, lane, reservation, leg, data)."""

# ---- sender (prefill) ------------------------------------------------------------------------------------------------

class Sender:
    """Prefill's ends of the lanes of all its sessions, one thread each."""

    def __init__(self, cq: CompletionQueue, pool: PoolMap, frame_bytes: int = 1 << 20) -> None: ...
    generation_table_fd: int  # memfd of u64 source generations that local lanes' readers map
    def open_session(self, session: int, epoch: bytes, generation: int, n_lanes: int) -> None:
        """Ready to take connections for lanes 0..n_lanes-1 of this generation."""

    def add_lane(self, session: int, generation: int, lane: int, kind: str, fd: int) -> None:
        """Takes over a connected, authenticated socket (kind "tcp" or "local"). Raises NativeError on a wrong
        generation, an unknown session or a lane that is already connected; the fd is then still the caller's."""

    def close_session(self, session: int, generation: int) -> None:
        """Destroys this end of all lanes up to ``generation`` and joins their threads. Legs on them fail."""

    def grant(self, grant: int, digests: bool = True) -> SourceGrant:
        """``digests=False``: nothing is digested at write(), and only legs with ``verify=False`` can be attached."""

    def close(self) -> None: ...

class SourceGrant:
    """One request's source pages, digested when written, and the legs that carry them to readers."""

    def write(self, group: int, logical: U64, pages: U64, regions: U32, progress: bool = False) -> int:
        """Pins and digests pages (S3) in the calling thread and queues them for all attached legs; returns the bytes.
        Raises ValueError("duplicate: ...") (nothing queued), ValueError("bounds: ..."), RuntimeError("closed: ...")."""

    def attach(
        self,
        session: int,
        generation: int,
        reservation: int,
        leg: int,
        verify: bool,
        carries_aux: bool,
        lanes: Sequence[int],
        slices: bytes,
        groups: Sequence[tuple[int, int, int, U64]],
    ) -> None:
        """groups: (decode's group, tokens_per_page, first_token, logical pages sorted). All written so far is queued.
        Raises ValueError("bounds: ...") for slices outside the pool."""

    def commit(self, n_tokens: int, aux: bytes) -> None:
        """Closes admission on all legs, attached now or later; each lane then carries its record behind its writes."""

    def close_admission(self, session: int, reservation: int) -> None:
        """Aborts one leg: nothing more is posted, source reads end at once; LEG_DRAINED or LEG_FAILED follows once.
        Unknown legs are fine."""

    def detach(self, session: int, reservation: int) -> None: ...
    def digests(self, session: int, reservation: int, first: int, count: int) -> U64: ...
    def written(self) -> int:
        """Chunks written so far."""
    def highest_logical(self, group: int) -> int:
        """Highest logical page written in the group, or -1."""
    def skipped(self, reservation: int) -> int:
        """Chunks written that this reader had not reserved (prefix hits)."""
    def end_writes(self) -> None:
        """Ends writes in other threads; once it has returned, none reads a source. Legs and digests stay."""

    def close(self) -> None:
        """All legs must be drained or failed; no source is read after this returns."""

# ---- receiver (decode) -----------------------------------------------------------------------------------------------

class PeerMemory:
    """Prefill's pool as the local lane reads it."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        regions: Sequence[Sequence[tuple[int, int, int, int, int]]],
        fds: Sequence[int],
        table_fd: int,
        probe_ptr: int,
        probe: bytes,
    ) -> None:
        """regions by [group][region]: (fd index or -1, offset in the fd or address, page_stride, page_bytes, n_pages).
        Refuses (NativeError) fds not sealed against shrinking or too short, and a probe that process_vm_readv cannot
        read back equal. fds are duplicated."""
    how: str  # "mapped", "process_vm_readv" or "mixed"

class Receiver:
    """Decode's ends of the lanes of one session and generation, one thread each."""

    def __init__(
        self, cq: CompletionQueue, pool: PoolMap, session: int, epoch: bytes, generation: int, max_record_bytes: int
    ) -> None: ...
    def add_lane(self, lane: int, kind: str, fd: int, source: PeerMemory | None = None) -> None: ...
    def open_leg(
        self, reservation: int, leg: int, verify: bool, slices: bytes, groups: Sequence[tuple[int, int, U64, U64]]
    ) -> None:
        """groups: (group, tokens_per_page, logical pages sorted, pool pages)."""

    def revoke(self, reservation: int, leg: int) -> None:
        """When this returns no further byte lands for the leg. Unknown legs are fine."""

    def report(self, reservation: int, leg: int) -> tuple[dict[int, bytes], U64, int, int]:
        """(bitmap of chunks placed per lane, folds over what landed, violations, bytes landed). Every lane has its
        bitmap, also where nothing came. Works after fence(). Raises NativeError for a leg that is not open."""

    def digests(self, reservation: int, leg: int) -> U64:
        """Content digests by chunk ordinal, 0 where nothing landed."""

    def forget(self, reservation: int, leg: int) -> None:
        """Revokes first."""

    def sunk_frames(self) -> int:
        """Frames for unknown or revoked legs, and refused ones, whose bytes went nowhere."""

    def fence(self) -> None:
        """Closes all lanes and joins their threads: when this returns no byte from this peer lands."""
