"""A prefill process that serves one local and one tcp lane over memory of the kinds named on its command line.

Kinds: sealed (a memfd as pools have it), unsealed (a memfd that may shrink), raw (no memfd). Prints what is needed to
dial it as JSON, then waits until its standard input is closed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys

import numpy as np

from kvxfer import _native
from kvxfer.geometry import Group, PoolGeometry, Region, RegionMemory
from kvxfer.lanes.export import export_memory
from kvxfer.lanes.listener import LaneListener

PAGE_BYTES, N_PAGES = 4096, 4
BYTES = PAGE_BYTES * N_PAGES

keep: list[object] = []


def memory_of(kind: str) -> RegionMemory:
    if kind == "sealed":
        sealed = _native.SharedMemory(BYTES, "kvxfer-test-pool")
        keep.append(sealed)
        return RegionMemory(sealed.ptr, BYTES, sealed.fd)
    fd = os.memfd_create("kvxfer-test-unsealed") if kind == "unsealed" else -1
    if fd >= 0:
        os.ftruncate(fd, BYTES)
    mapped = mmap.mmap(fd, BYTES)
    keep.append(mapped)
    return RegionMemory(np.frombuffer(mapped, np.uint8).ctypes.data, BYTES, fd)


def main(kinds: list[str]) -> None:
    table = _native.SharedMemory(4096, "kvxfer-test-table")
    region = Region("layer", "uint8", PAGE_BYTES, PAGE_BYTES, unit_bytes=PAGE_BYTES)
    geometry = PoolGeometry((Group("kv", 16, N_PAGES, (region,) * len(kinds)),))
    memory = export_memory([[memory_of(kind) for kind in kinds]], geometry, table.fd)
    lanes = {"local": 1, "tcp": 1}
    listener = LaneListener(
        tcp_hosts=["127.0.0.1"],
        local=True,
        memory=memory,
        on_lane=keep.append,
        on_refused=lambda reason, peer, cause: print(reason, peer, cause, file=sys.stderr),
    )
    epoch, secret = os.urandom(16), os.urandom(32)
    listener.serve(1, epoch, 0, secret, lanes)
    offers = [(offer.kind, offer.addresses, offer.lanes) for offer in listener.offers(lanes)]
    print(json.dumps({"epoch": epoch.hex(), "secret": secret.hex(), "offers": offers}), flush=True)
    sys.stdin.read()
    listener.close()


if __name__ == "__main__":
    main(sys.argv[1:])
