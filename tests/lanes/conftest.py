"""A small pool in a memfd, and listeners that serve one session's lanes and remember what they were told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvxfer import _native
from kvxfer.geometry import Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes.export import MemoryExport, export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener

PAGE_BYTES = 4096
N_PAGES = 8
SESSION = 3
LANES = {"local": 2, "tcp": 2}


class Served:
    """A listener that serves the lanes of session 3, generation 0."""

    def __init__(self, memory: MemoryExport, **options: object) -> None:
        self.epoch = os.urandom(16)
        self.secret = os.urandom(32)
        self.taken: list[LaneConnection] = []
        self.refused: list[tuple[str, str, str]] = []
        settings: dict[str, object] = {"tcp_hosts": ["127.0.0.1"], "local": True, "memory": memory} | options
        self.listener = LaneListener(
            on_lane=self.taken.append,
            on_refused=lambda *refusal: self.refused.append(refusal),
            **settings,  # type: ignore[arg-type]
        )
        self.listener.serve(SESSION, self.epoch, 0, self.secret, LANES)

    def reasons(self) -> list[str]:
        return [reason for reason, _, _ in self.refused]

    def close(self) -> None:
        self.listener.close()
        for lane in self.taken:
            os.close(lane.fd)


@pytest.fixture
def export() -> Iterator[MemoryExport]:
    half = N_PAGES * PAGE_BYTES
    memory = _native.SharedMemory(2 * half, "kvxfer-test-pool")
    table = _native.SharedMemory(4096, "kvxfer-test-table")
    region = Region("layer", "uint8", PAGE_BYTES, PAGE_BYTES, unit_bytes=PAGE_BYTES)
    geometry = PoolGeometry((Group("kv", 16, N_PAGES, (region, region)),))
    regions = [[RegionMemory(memory.ptr + i * half, half, memory.fd, i * half) for i in range(2)]]
    exported = export_memory(regions, geometry, table.fd)
    yield exported
    exported.close()


@pytest.fixture
def serve(export: MemoryExport) -> Iterator[Callable[..., Served]]:
    """Makes listeners; options are LaneListener's."""
    made: list[Served] = []

    def make(**options: object) -> Served:
        memory = options.pop("memory", export)
        assert isinstance(memory, MemoryExport)
        made.append(Served(memory, **options))
        return made[-1]

    yield make
    for served in made:
        served.close()
