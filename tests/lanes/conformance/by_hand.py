"""A prefill whose frames are written by hand: right ones, and those that no sender of ours would make."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer import digest
from kvxfer.protocol import record as rec

from .offers import GENERATION, TOKENS_PER_PAGE, U8, U64, Leg


class ByHand:
    """The hostile half of a rig. Frames are numbered in the order in which they are made."""

    kind: str
    regions: int
    source: U8
    epoch: bytes
    wires: dict[int, socket.socket]
    _table: Any
    _sequences: dict[int, int]

    def header(self, wire: int, of: Leg, frame_type: int, n_bytes: int, **fields: int) -> bytes:
        """A frame header; ``fields`` replace what would be right. Numbers rise by themselves."""
        sequence = self._sequences.get(wire, 0)
        self._sequences[wire] = sequence + 1
        right = {
            "magic": 0x4658564B,
            "type": frame_type,
            "flags": 0,
            "generation": GENERATION,
            "lane": wire,
            "sequence": sequence,
            "reservation": of.reservation,
            "leg": of.number,
            "group": 0,
            "slice": 0,
            "n_pages": 0,
            "page_first": 0,
            "body_bytes": n_bytes,
        }
        return struct.pack("<IHHIIQQIIIIQQ", *(right | fields).values())

    def write_frame(self, wire: int, of: Leg, page: int, slice_: int, n_pages: int = 1, **fields: Any) -> bytes:
        """A write of ``n_pages`` chunks from page index ``page`` on. ``source``: other source pages; ``body``: other
        bytes."""
        pages = np.asarray(fields.pop("source", of.source[page : page + n_pages]), np.uint64)
        body = fields.pop("body", None)
        if body is None and self.kind == "local":
            body = struct.pack("<QQ", 0, 0) + pages.tobytes()
        elif body is None:
            body = self.source[slice_, pages].tobytes()
        named = {"slice": slice_, "n_pages": n_pages, "page_first": page} | fields
        return self.header(wire, of, 1, len(body), **named) + body

    def record_frame(self, wire: int, of: Leg, record: bytes, **fields: int) -> bytes:
        body = record if self.kind == "tcp" else struct.pack("<QQ", 0, 0) + record
        return self.header(wire, of, 2, len(body), **fields) + body

    def record(self, wire: int, of: Leg, chunks: Sequence[int], **changes: Any) -> bytes:
        """A true record of ``chunks`` (ordinals) posted on this lane, or one changed by ``changes``."""
        first = wire == of.lanes[0]
        true = {
            "reservation": of.reservation,
            "epoch": self.epoch,
            "generation": GENERATION,
            "leg": of.number,
            "lane": wire,
            "n_lanes": len(of.lanes),
            "ranges": [(0, of.first_page * TOKENS_PER_PAGE, len(of.pool) * TOKENS_PER_PAGE)],
            "n_chunks": of.layout.n_chunks,
            "bitmap": sum(1 << chunk for chunk in chunks),
            "n_tokens": of.end_token,
            "folds": self.folds(of) if first and of.verify else None,
            "aux": b"" if first else None,
        }
        return rec.build(**(true | changes))

    def folds(self, leg: Leg) -> U64:
        """Folds over all of the leg's source pages."""
        places = [(page, region) for page in range(len(leg.source)) for region in range(self.regions)]
        contents = [digest.content(self.source[region, leg.source[page]]) for page, region in places]
        bound = digest.bind(
            np.array(contents, np.uint64),
            reservation=leg.reservation,
            epoch=self.epoch,
            leg=leg.number,
            group=0,
            regions=np.array([region for _, region in places], np.uint32),
            slices=np.zeros(len(places), np.uint32),
            logical=np.array([leg.logical[page] for page, _ in places], np.uint64),
        )
        return digest.folds(bound, 64 // TOKENS_PER_PAGE * self.regions)

    def table_bytes(self) -> Any:
        """The hostile prefill's generation table, writable: u64 slots."""
        return (ctypes.c_uint8 * self._table.nbytes).from_address(self._table.ptr)

    def restart_numbers(self) -> None:
        """Frames are numbered from 0 again: those made so far are not going to be sent."""
        self._sequences.clear()

    def say(self, lane: int, *frames: bytes) -> None:
        self.wires[lane].sendall(b"".join(frames))

    def all_writes(self, leg: Leg, lane: int = 0) -> list[bytes]:
        return [self.write_frame(lane, leg, 0, region, len(leg.pool)) for region in range(self.regions)]

    def all_chunks(self, leg: Leg) -> range:
        return range(leg.layout.n_chunks)
