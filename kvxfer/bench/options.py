"""What a benchmark run moves, and how. Both sides must be given the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from kvxfer.errors import CapacityError, GeometryError

LANES = ("local", "tcp")
VERIFY_MODES = ("digest", "coverage")
DEFAULT_TOTAL_BYTES = 256 << 20
MAX_PAGE_BYTES = 64 << 20
MAX_CHUNKS = 1_000_000
TOKENS_PER_PAGE = 16

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """``65536``, ``64K``, ``64KiB`` or ``1M`` as a number of bytes. Raises GeometryError."""
    cleaned = text.strip().lower().removesuffix("b").removesuffix("i")
    suffix = cleaned[-1:] if cleaned[-1:] in ("k", "m", "g") else ""
    digits = cleaned.removesuffix(suffix)
    if not digits.isdigit():
        raise GeometryError(f"{text!r} is not a size; write bytes, or a number with K, M or G", given=text)
    return int(digits) * _SUFFIXES[suffix]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One benchmark run.

    Attributes:
        lane: ``local`` or ``tcp``; nothing else is tried.
        page_bytes: bytes of a page in one region (1 to 64 MiB).
        pages: pages handed over in one round. Chunks = pages * regions, 1 to 1,000,000.
        regions: regions ("layers") that share the page numbering.
        connections: lanes, which is also the number of copiers, and of threads that memcpy is given.
        verify: ``digest``, or ``coverage`` (no digests).
        repeat: timed rounds.
        latency_handoffs: one-page handoffs timed for p50 and p99; 0: none.
        seed: of the contents and of the page orders.
    """

    lane: str = "local"
    page_bytes: int = 64 << 10
    pages: int = DEFAULT_TOTAL_BYTES // (64 << 10)
    regions: int = 1
    connections: int = 1
    verify: str = "digest"
    repeat: int = 7
    latency_handoffs: int = 500
    seed: int = 1

    def __post_init__(self) -> None:
        _one_of("lane", self.lane, LANES)
        _one_of("verify", self.verify, VERIFY_MODES)
        _within("page_bytes", self.page_bytes, 1, MAX_PAGE_BYTES)
        _within("pages", self.pages, 1, MAX_CHUNKS)
        _within("regions", self.regions, 1, MAX_CHUNKS)
        _within("connections", self.connections, 1, 64)
        _within("repeat", self.repeat, 1, 10_000)
        _within("latency_handoffs", self.latency_handoffs, 0, 100_000)
        _within("pages * regions (chunks)", self.chunks, 1, MAX_CHUNKS)

    @property
    def chunks(self) -> int:
        return self.pages * self.regions

    @property
    def total_bytes(self) -> int:
        return self.chunks * self.page_bytes

    @property
    def fingerprint(self) -> str:
        """Equal on both sides, or the run means nothing."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def check_memory(self, copies: int) -> None:
        """Raises CapacityError where ``copies`` times the moved bytes exceed the memory that is free now."""
        needed, available = copies * self.total_bytes, available_bytes()
        if needed > available:
            raise CapacityError(
                f"a run of {self.total_bytes} bytes needs {copies} times that in memory; ask for fewer pages",
                needed_bytes=needed,
                available_bytes=available,
            )


def available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise GeometryError(f"unknown {name} {value!r}; there are: {', '.join(allowed)}", given=value)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise GeometryError(f"{name} must lie between {low} and {high}", given=value)
