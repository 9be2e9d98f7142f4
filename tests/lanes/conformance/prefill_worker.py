"""A prefill process with a Sender: serves the lanes of one session and writes what it is told to, a line of JSON each.

Arguments: kind, lanes, pages, page bytes, regions. The source bytes are those of a generator with a fixed seed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import threading
import time
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.geometry import Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes.export import export_memory
from kvxfer.lanes.listener import LaneConnection, LaneListener

SESSION, GENERATION = 5, 2


def main(kind: str, n_lanes: int, n_pages: int, page_bytes: int, n_regions: int) -> None:
    region_bytes = n_pages * page_bytes
    shared = _native.SharedMemory(n_regions * region_bytes, "kvxfer-test-pool")
    source = np.frombuffer((ctypes.c_uint8 * shared.nbytes).from_address(shared.ptr), np.uint8)
    shape = (n_regions, n_pages, page_bytes)
    source[:] = np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8).ravel()
    fd = shared.fd if kind != "local-process_vm_readv" else -1
    places = [(shared.ptr + i * region_bytes, i * region_bytes) for i in range(n_regions)]
    region = Region("layer", "uint8", page_bytes, page_bytes, unit_bytes=page_bytes)
    geometry = PoolGeometry((Group("kv", 16, n_pages, (region,) * n_regions),))
    memory = [[RegionMemory(ptr, region_bytes, fd, offset if fd >= 0 else 0) for ptr, offset in places]]

    queue = _native.CompletionQueue()
    pool = _native.PoolMap([[(ptr, page_bytes, page_bytes, n_pages) for ptr, _ in places]])
    sender = _native.Sender(queue, pool)
    epoch, secret = os.urandom(16), os.urandom(32)
    sender.open_session(SESSION, epoch, GENERATION, n_lanes)

    def take(lane: LaneConnection) -> None:
        sender.add_lane(lane.session, lane.generation, lane.lane, lane.kind, lane.fd)

    listener = LaneListener(
        tcp_hosts=["127.0.0.1"],
        local=True,
        memory=export_memory(memory, geometry, sender.generation_table_fd),
        on_lane=take,
        on_refused=lambda *refusal: print(*refusal, file=sys.stderr),
    )
    lanes = {kind.partition("-")[0]: n_lanes}
    listener.serve(SESSION, epoch, GENERATION, secret, lanes)
    (offer,) = listener.offers(lanes)
    say({"epoch": epoch.hex(), "secret": secret.hex(), "offer": (offer.kind, offer.addresses, offer.lanes)})

    grants: list[Any] = []

    def write(order: dict[str, Any]) -> None:
        grant = sender.grant(order["reservation"])
        grants.append(grant)
        logical = np.array(order["logical"], np.uint64)
        pages = np.array(order["source"], np.uint64)
        grant.attach(
            SESSION,
            GENERATION,
            order["reservation"],
            order["leg"],
            order["verify"],
            True,
            order["lanes"],
            bytes.fromhex(order["slices"]),
            [(0, 16, order["first_token"], logical)],
        )
        regions = np.arange(n_regions, dtype=np.uint32)
        for at in range(0, len(logical), 16):
            grant.write(0, logical[at : at + 16], pages[at : at + 16], regions)
            time.sleep(order["pause_s"])
        if order["commit"]:
            grant.commit(order["n_tokens"], b"aux")
        say({"event": "WRITTEN"})

    names = {getattr(_native, name): name for name in ("LEG_DRAINED", "LEG_FAILED", "LANE_DOWN")}
    while True:
        ready, _, _ = select.select([sys.stdin, queue.fileno()], [], [])
        for event in queue.poll():
            if event[0] in names:
                say({"event": names[event[0]]})
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            threading.Thread(target=write, args=(json.loads(line),), daemon=True).start()


def say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # whole lines, from any thread


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
